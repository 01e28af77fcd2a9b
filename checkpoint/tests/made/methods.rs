//! Quantization methods as their own documentation has them: which stored elements a weight is read from.
//!
//! Each is said for one layer of so many outputs and inputs, element by element; nothing is said of splitting.
//! What a rank has of a layer has to be such a layer again.

use super::{Decoder, Tensor};
use serde_json::{Value, json};

/// A way to store a linear layer.
pub struct Method {
    /// What failures say.
    pub name: String,
    /// `quantization_config`.
    pub config: Value,
    /// Outputs and inputs that stay together.
    pub units: [u64; 2],
    /// What the sizes of a layer that is not split have to be multiples of.
    pub whole: u64,
    store: Box<dyn Fn(u64, u64) -> Vec<Stored>>,
}

/// One of the tensors of a layer.
pub struct Stored {
    pub suffix: &'static str,
    pub dtype: &'static str,
    pub shape: Vec<u64>,
    at: Elements,
}

/// Adds the numbers of the elements that the weight of an output and an input is read from.
type Elements = Box<dyn Fn(u64, u64, &mut Vec<u64>)>;

impl Method {
    /// The tensors of a layer of `out` outputs and `input` inputs.
    pub fn store(&self, out: u64, input: u64) -> Vec<Stored> {
        (self.store)(out, input)
    }

    /// The same, to be written.
    pub fn tensors(&self, module: &str, out: u64, input: u64) -> Vec<Tensor> {
        let stored = self.store(out, input).into_iter();
        stored
            .map(|stored| (format!("{module}.{}", stored.suffix), stored.dtype, stored.shape))
            .collect()
    }

    /// A decoder with all of its layers stored like this, but for embedding and head.
    pub fn quantize(&self, decoder: &Decoder) -> (Value, Vec<Tensor>) {
        let mut config = decoder.config();
        config["quantization_config"] = self.config.clone();
        let store = |tensor: Tensor| match tensor.0.strip_suffix("_proj.weight") {
            Some(module) => self.tensors(&format!("{module}_proj"), tensor.2[0], tensor.2[1]),
            None => vec![tensor],
        };
        (config, decoder.tensors().into_iter().flat_map(store).collect())
    }

    fn new(
        name: impl Into<String>,
        config: Value,
        units: [u64; 2],
        whole: u64,
        store: impl Fn(u64, u64) -> Vec<Stored> + 'static,
    ) -> Method {
        Method {
            name: name.into(),
            config,
            units,
            whole,
            store: Box::new(store),
        }
    }
}

impl Stored {
    fn new(
        suffix: &'static str,
        dtype: &'static str,
        shape: &[u64],
        at: impl Fn(u64, u64, &mut Vec<u64>) + 'static,
    ) -> Stored {
        Stored {
            suffix,
            dtype,
            shape: shape.to_vec(),
            at: Box::new(at),
        }
    }

    /// One for the whole layer.
    fn one(suffix: &'static str, dtype: &'static str, shape: &[u64]) -> Stored {
        Stored::new(suffix, dtype, shape, |_, _, at| at.push(0))
    }

    /// A value for each block of `[out, in]` weights; 0 for all of a dimension. `columns` are the blocks of inputs.
    fn blocks(suffix: &'static str, dtype: &'static str, shape: &[u64], [out, input]: [u64; 2]) -> Stored {
        let columns = *shape.last().unwrap();
        let block = |index: u64, size: u64| index.checked_div(size).unwrap_or(0);
        Stored::new(suffix, dtype, shape, move |o, i, at| {
            at.push(block(o, out) * columns + block(i, input))
        })
    }

    /// An element for each weight, or for each output where the shape is of those alone.
    pub fn plain(dtype: &'static str, shape: &[u64]) -> Stored {
        let columns = shape.get(1).copied().unwrap_or(1);
        Stored::new("weight", dtype, shape, move |o, i, at| at.push(o * columns + i))
    }

    /// Puts into `at` the numbers of all elements, in row-major order, that the weight of output `o` and input
    /// `i` is read from.
    pub fn elements(&self, o: u64, i: u64, at: &mut Vec<u64>) {
        at.clear();
        (self.at)(o, i, at);
    }
}

/// The groups of `inputs`; all of them are one where `group` is 0.
fn groups(inputs: u64, group: u64) -> u64 {
    if group == 0 { 1 } else { inputs.div_ceil(group) }
}

fn config_group(group: u64) -> i64 {
    if group == 0 { -1 } else { group as i64 }
}

/// The words of 32 bits that an element of a stream of them is in: of 3 bits, maybe two.
fn words(index: u64, bits: u64) -> std::ops::RangeInclusive<u64> {
    index * bits / 32..=(index * bits + bits - 1) / 32
}

/// AutoGPTQ: a stream of bits down each column, zero points along each row of groups.
fn gptq(bits: u64, group: u64) -> Method {
    let config = json!({
        "quant_method": "gptq", "bits": bits, "group_size": config_group(group), "desc_act": false, "sym": true,
        "checkpoint_format": if bits == 8 { "gptq_v2" } else { "gptq" },
    });
    let pack = if bits == 3 { 32 } else { 32 / bits };
    let units = [pack, group.max(pack)];
    Method::new(
        format!("gptq of {bits} bits, groups of {group}"),
        config,
        units,
        pack,
        move |n, k| {
            let (groups, zeros) = (groups(k, group), n * bits / 32);
            let of = move |i: u64| i.checked_div(group).unwrap_or(0);
            vec![
                Stored::new("qweight", "I32", &[k * bits / 32, n], move |o, i, at| {
                    at.extend(words(i, bits).map(|row| row * n + o));
                }),
                Stored::new("qzeros", "I32", &[groups, zeros], move |o, i, at| {
                    at.extend(words(o, bits).map(|word| of(i) * zeros + word));
                }),
                Stored::new("scales", "F16", &[groups, n], move |o, i, at| {
                    at.push(of(i) * n + o)
                }),
                Stored::new("g_idx", "I32", &[k], |_, i, at| at.push(i)),
            ]
        },
    )
}

/// AutoAWQ: eight outputs to a word, in another order, which does not matter here.
fn awq(group: u64) -> Method {
    let config = json!({
        "quant_method": "awq", "bits": 4, "group_size": config_group(group), "zero_point": true,
        "version": if group == 0 { "GEMM" } else { "gemm" },
    });
    Method::new(
        format!("awq, groups of {group}"),
        config,
        [8, group.max(1)],
        8,
        move |n, k| {
            let groups = groups(k, group);
            let of = move |i: u64| i.checked_div(group).unwrap_or(0);
            vec![
                Stored::new("qweight", "I32", &[k, n / 8], move |o, i, at| {
                    at.push(i * (n / 8) + o / 8)
                }),
                Stored::new("qzeros", "I32", &[groups, n / 8], move |o, i, at| {
                    at.push(of(i) * (n / 8) + o / 8)
                }),
                Stored::new("scales", "F16", &[groups, n], move |o, i, at| {
                    at.push(of(i) * n + o)
                }),
            ]
        },
    )
}

/// A byte for each weight, a scale for each tensor: of this shape.
fn per_tensor(name: &str, config: Value, weight: &'static str, scale: &'static [u64]) -> Method {
    Method::new(name, config, [1, 1], 1, move |n, k| {
        vec![
            Stored::plain(weight, &[n, k]),
            Stored::one("weight_scale", "F32", scale),
            Stored::one("input_scale", "F32", scale),
        ]
    })
}

/// A byte for each weight, a scale and maybe a zero point for each output.
fn per_channel(name: &str, config: Value, weight: &'static str, zero_points: bool) -> Method {
    Method::new(name, config, [1, 1], 1, move |n, k| {
        let scale = |suffix, dtype| Stored::blocks(suffix, dtype, &[n, 1], [1, 0]);
        let mut stored = vec![Stored::plain(weight, &[n, k]), scale("weight_scale", "BF16")];
        stored.extend(zero_points.then(|| scale("weight_zero_point", "I8")));
        stored
    })
}

/// A byte for each weight, a scale for each block; those at the end may be smaller.
fn per_block(name: &str, config: Value, scale: &'static str, block: [u64; 2]) -> Method {
    Method::new(name, config, block, 1, move |n, k| {
        let shape = [n.div_ceil(block[0]), k.div_ceil(block[1])];
        vec![
            Stored::plain("F8_E4M3", &[n, k]),
            Stored::blocks(scale, "F32", &shape, block),
        ]
    })
}

/// compressed-tensors, with these arguments of the weights.
fn compressed(format: &str, weights: Value) -> Value {
    json!({
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights, "input_activations": null } },
    })
}

/// compressed-tensors' packs: a stream of bits of weights along each row of inputs, and of zero points down the
/// outputs.
fn packed(bits: u64, group: u64, symmetric: bool) -> Method {
    let config = compressed(
        "pack-quantized",
        json!({
            "num_bits": bits, "type": "int", "symmetric": symmetric,
            "strategy": if group == 0 { "channel" } else { "group" },
            "group_size": if group == 0 { json!(null) } else { json!(group) },
        }),
    );
    let pack = if bits == 3 { 32 } else { 32 / bits };
    let units = [if symmetric { 1 } else { pack }, group.max(pack)];
    let name = format!("pack-quantized of {bits} bits, groups of {group}, symmetric: {symmetric}");
    Method::new(name, config, units, pack, move |n, k| {
        let (columns, groups) = (k * bits / 32, groups(k, group));
        let of = move |i: u64| i.checked_div(group).unwrap_or(0);
        let mut stored = vec![
            Stored::new("weight_packed", "I32", &[n, columns], move |o, i, at| {
                at.extend(words(i, bits).map(|word| o * columns + word));
            }),
            Stored::blocks("weight_scale", "BF16", &[n, groups], [1, group]),
            Stored::new("weight_shape", "I64", &[2], |_, _, at| at.extend([0, 1])),
        ];
        stored.extend((!symmetric).then(|| {
            Stored::new(
                "weight_zero_point",
                "I32",
                &[n * bits / 32, groups],
                move |o, i, at| {
                    at.extend(words(o, bits).map(|row| row * groups + of(i)));
                },
            )
        }));
        stored
    })
}

/// Scales for the whole of a layer, and their shapes.
type Further = &'static [(&'static str, &'static [u64])];

/// Two weights to a byte, a scale of this type for each group, and further scales for the whole.
fn halves(
    name: &str,
    config: Value,
    weight: &'static str,
    (scale, group): (&'static str, u64),
    further: Further,
) -> Method {
    Method::new(name, config, [1, group], group, move |n, k| {
        let mut stored = vec![
            Stored::blocks(weight, "U8", &[n, k / 2], [1, 2]),
            Stored::blocks("weight_scale", scale, &[n, k / group], [1, group]),
        ];
        stored.extend(
            further
                .iter()
                .map(|(suffix, shape)| Stored::one(suffix, "F32", shape)),
        );
        stored
    })
}

/// The method with this name.
pub fn method(name: &str) -> Method {
    methods()
        .into_iter()
        .find(|method| method.name == name)
        .unwrap_or_else(|| panic!("no method is called {name}"))
}

/// Every method that stores layers one by one.
pub fn methods() -> Vec<Method> {
    let fp8 = |more: Value| {
        let mut config = json!({ "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static" });
        config
            .as_object_mut()
            .unwrap()
            .append(&mut more.as_object().unwrap().clone());
        config
    };
    let of = |bits: u64, kind: &str, strategy: &str| json!({ "num_bits": bits, "type": kind, "strategy": strategy });
    let block = |strategy: &str, structure: Value| json!({ "num_bits": 8, "type": "float", "strategy": strategy, "block_structure": structure });
    let int8_groups = json!({ "num_bits": 8, "type": "int", "strategy": "group", "group_size": 4 });
    let modelopt = |name: &str, algorithm: &str| json!({ "quant_method": name, "quant_algo": algorithm });
    let mut all = Vec::new();
    for bits in [2, 3, 4, 8] {
        all.extend([0, 32, 128].map(|group| gptq(bits, group)));
    }
    all.extend([awq(0), awq(16), awq(128)]);
    all.push(per_tensor("fp8", fp8(json!({})), "F8_E4M3", &[]));
    all.push(per_tensor(
        "fp8, scales of one element",
        fp8(json!({})),
        "F8_E4M3",
        &[1],
    ));
    all.push(per_channel("fp8 per channel", fp8(json!({})), "F8_E4M3", false));
    all.push(per_block(
        "fp8 blocks",
        fp8(json!({ "weight_block_size": [3, 5] })),
        "weight_scale_inv",
        [3, 5],
    ));
    all.push(per_block(
        "fp8 square blocks",
        fp8(json!({ "weight_block_size": [8, 8] })),
        "weight_scale_inv",
        [8, 8],
    ));
    all.push(per_channel(
        "fbgemm",
        json!({ "quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0 }),
        "F8_E4M3",
        false,
    ));
    all.push(per_channel(
        "int8",
        compressed("int-quantized", of(8, "int", "channel")),
        "I8",
        false,
    ));
    all.push(per_channel(
        "int8 with zero points",
        compressed("int-quantized", of(8, "int", "channel")),
        "I8",
        true,
    ));
    all.push(Method::new(
        "int8 groups",
        compressed("int-quantized", int8_groups),
        [1, 4],
        1,
        |n, k| {
            vec![
                Stored::plain("I8", &[n, k]),
                Stored::blocks("weight_scale", "BF16", &[n, k.div_ceil(4)], [1, 4]),
            ]
        },
    ));
    all.push(per_tensor(
        "int8 per tensor",
        compressed("naive-quantized", of(8, "int", "tensor")),
        "I8",
        &[1],
    ));
    all.push(per_tensor(
        "compressed fp8",
        compressed("float-quantized", of(8, "float", "tensor")),
        "F8_E4M3",
        &[1],
    ));
    all.push(per_channel(
        "compressed fp8 per channel",
        compressed("float-quantized", of(8, "float", "channel")),
        "F8_E4M3",
        false,
    ));
    all.push(per_block(
        "compressed fp8 blocks",
        compressed("float-quantized", block("block", json!([4, 6]))),
        "weight_scale",
        [4, 6],
    ));
    for (bits, group) in [(3, 32), (4, 0), (4, 16), (4, 128), (8, 0), (8, 32)] {
        all.extend([true, false].map(|symmetric| packed(bits, group, symmetric)));
    }
    const GLOBAL: Further = &[("weight_global_scale", &[1]), ("input_global_scale", &[1])];
    const SECOND: Further = &[("weight_scale_2", &[]), ("input_scale", &[])];
    let tensor_group = compressed("nvfp4-pack-quantized", of(4, "float", "tensor_group"));
    all.push(halves(
        "nvfp4",
        tensor_group,
        "weight_packed",
        ("F8_E4M3", 16),
        GLOBAL,
    ));
    all.push(halves(
        "packed mxfp4",
        compressed("mxfp4-pack-quantized", of(4, "float", "group")),
        "weight_packed",
        ("U8", 32),
        &[],
    ));
    all.push(per_tensor(
        "modelopt fp8",
        modelopt("modelopt", "FP8"),
        "F8_E4M3",
        &[],
    ));
    all.push(halves(
        "modelopt nvfp4",
        modelopt("modelopt_fp4", "NVFP4"),
        "weight",
        ("F8_E4M3", 16),
        SECOND,
    ));
    all
}
