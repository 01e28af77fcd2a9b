//! How quantization methods store a layer.

/// How a method stores a layer.
#[derive(Debug)]
pub(super) struct Method {
    /// `quant_method` in the configuration.
    pub names: &'static [&'static str],
    /// What the configuration has to say beside the name, where that decides: a field and its values,
    /// the first of which counts where it says nothing.
    pub variant: Option<(&'static str, &'static [&'static str])>,
    /// The bits of what elements are packed into.
    pub container: u64,
    /// The bits of an element, where the configuration does not say it.
    pub bits: Option<u64>,
    /// The inputs of a block, where the configuration does not say it.
    pub block: Option<u64>,
    pub fields: &'static [Field],
}

/// One of the tensors that a layer is stored as.
#[derive(Debug)]
pub(super) struct Field {
    /// How its name ends: after the layer's name and a dot, or as it stands here.
    pub suffix: &'static str,
    pub out: Axis,
    pub input: Axis,
}

/// The dimension that goes along with one of the layer's. Those before it that count experts are not
/// counted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Axis {
    /// None does: it is the same for all parts.
    Same,
    /// One element for each.
    Each(usize),
    /// One element of the container for as many as it holds.
    Packs(usize),
    /// One element for each block.
    Blocks(usize),
}
use Axis::{Blocks, Each, Packs, Same};

/// The methods whose layers can be split.
pub(super) const METHODS: &[Method] = &[
    Method {
        names: &["gptq"],
        variant: Some(("checkpoint_format", &["gptq", "gptq_v2"])),
        container: 32,
        bits: None,
        block: None,
        fields: &[
            Field {
                suffix: "qweight",
                out: Each(1),
                input: Packs(0),
            },
            Field {
                suffix: "qzeros",
                out: Packs(1),
                input: Blocks(0),
            },
            Field {
                suffix: "scales",
                out: Each(1),
                input: Blocks(0),
            },
            Field {
                suffix: "g_idx",
                out: Same,
                input: Each(0),
            },
        ],
    },
    Method {
        names: &["awq"],
        variant: Some(("version", &["gemm", "GEMM"])),
        container: 32,
        bits: None,
        block: None,
        fields: &[
            Field {
                suffix: "qweight",
                out: Packs(1),
                input: Each(0),
            },
            Field {
                suffix: "qzeros",
                out: Packs(1),
                input: Blocks(0),
            },
            Field {
                suffix: "scales",
                out: Each(1),
                input: Blocks(0),
            },
        ],
    },
    Method {
        names: &["fp8", "fbgemm_fp8"],
        variant: None,
        container: 8,
        bits: Some(8),
        block: None,
        fields: PLAIN,
    },
    Method {
        names: &["compressed-tensors"],
        variant: Some((
            "format",
            &["dense", "int-quantized", "float-quantized", "naive-quantized"],
        )),
        container: 8,
        bits: Some(8),
        block: None,
        fields: PLAIN,
    },
    Method {
        names: &["compressed-tensors"],
        variant: Some(("format", &["pack-quantized"])),
        container: 32,
        bits: None,
        block: None,
        fields: PACKED,
    },
    Method {
        names: &["compressed-tensors"],
        variant: Some(("format", &["nvfp4-pack-quantized"])),
        container: 8,
        bits: Some(4),
        block: Some(16),
        fields: PACKED,
    },
    Method {
        names: &["compressed-tensors"],
        variant: Some(("format", &["mxfp4-pack-quantized"])),
        container: 8,
        bits: Some(4),
        block: Some(32),
        fields: PACKED,
    },
    Method {
        names: &["modelopt", "modelopt_fp8"],
        variant: Some(("quant_algo", &["FP8"])),
        container: 8,
        bits: Some(8),
        block: None,
        fields: PLAIN,
    },
    Method {
        names: &["modelopt", "modelopt_fp4"],
        variant: Some(("quant_algo", &["NVFP4"])),
        container: 8,
        bits: Some(4),
        block: Some(16),
        fields: &[
            Field {
                suffix: "weight",
                out: Each(0),
                input: Packs(1),
            },
            Field {
                suffix: "weight_scale",
                out: Each(0),
                input: Blocks(1),
            },
            Field {
                suffix: "weight_scale_2",
                out: Same,
                input: Same,
            },
            Field {
                suffix: "input_scale",
                out: Same,
                input: Same,
            },
        ],
    },
    Method {
        names: &["mxfp4"],
        variant: None,
        container: 8,
        bits: Some(4),
        block: Some(32),
        // The elements of a block are one more dimension.
        fields: &[
            Field {
                suffix: "_blocks",
                out: Each(0),
                input: Blocks(1),
            },
            Field {
                suffix: "_scales",
                out: Each(0),
                input: Blocks(1),
            },
        ],
    },
];

/// An element for each weight. Scales are for a tensor, for each output, or for blocks.
const PLAIN: &[Field] = &[
    Field {
        suffix: "weight",
        out: Each(0),
        input: Each(1),
    },
    Field {
        suffix: "weight_scale",
        out: Blocks(0),
        input: Blocks(1),
    },
    Field {
        suffix: "weight_scale_inv",
        out: Blocks(0),
        input: Blocks(1),
    },
    Field {
        suffix: "weight_zero_point",
        out: Blocks(0),
        input: Blocks(1),
    },
    Field {
        suffix: "weight_g_idx",
        out: Same,
        input: Each(0),
    },
    Field {
        suffix: "input_scale",
        out: Same,
        input: Same,
    },
    Field {
        suffix: "input_zero_point",
        out: Same,
        input: Same,
    },
];

/// Packed along the inputs; zero points along the outputs.
const PACKED: &[Field] = &[
    Field {
        suffix: "weight_packed",
        out: Each(0),
        input: Packs(1),
    },
    Field {
        suffix: "weight_scale",
        out: Each(0),
        input: Blocks(1),
    },
    Field {
        suffix: "weight_zero_point",
        out: Packs(0),
        input: Blocks(1),
    },
    Field {
        suffix: "weight_g_idx",
        out: Same,
        input: Each(0),
    },
    Field {
        suffix: "weight_shape",
        out: Same,
        input: Same,
    },
    Field {
        suffix: "weight_global_scale",
        out: Same,
        input: Same,
    },
    Field {
        suffix: "input_global_scale",
        out: Same,
        input: Same,
    },
    Field {
        suffix: "input_scale",
        out: Same,
        input: Same,
    },
];

/// Methods of which no more is known than that they are: served as they are stored, never split.
pub(super) const WHOLE: &[&str] = &[
    "aqlm",
    "auto-round",
    "bitblas",
    "bitnet",
    "bitsandbytes",
    "eetq",
    "fp_quant",
    "higgs",
    "hqq",
    "quanto",
    "quark",
    "quip",
    "spqr",
    "torchao",
    "vptq",
];
