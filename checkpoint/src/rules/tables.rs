//! The sharding rules of the known architectures, and the names that vLLM gives their tensors.
//!
//! Rules follow from the modules of each model in Hugging Face transformers (version 5); what vLLM
//! makes of them was compared with what vLLM 0.32 loads (`tests/data/families/`).

use super::Rule::{
    self, Column, Embedding, Head, HeadColumn, KvColumn, PackedColumn, QkvColumn, QueryColumn, Replicated,
    Row, UnevenColumn, UnevenRow,
};

/// What is known of some architectures.
#[derive(Debug)]
pub(super) struct Table {
    /// The classes in `architectures` of `config.json`.
    pub architectures: &'static [&'static str],
    /// Whether transformers ties the head to the embedding where `config.json` does not say.
    pub tied_by_default: bool,
    /// Lists of patterns and their rules; the first pattern that covers a tensor counts.
    pub rules: &'static [&'static [(&'static str, Rule)]],
    /// How vLLM holds it, where that is known.
    pub vllm: Option<&'static Vllm>,
}

/// How vLLM holds a model.
#[derive(Debug)]
pub(super) struct Vllm {
    /// Modules that become one.
    pub fused: &'static [Fused],
    /// The projections of an expert.
    pub experts: Option<ExpertNames>,
    /// Tensors of all experts.
    pub stacked: &'static [StackedName],
    /// Parts of names that change.
    pub renamed: &'static [(&'static str, &'static str)],
    /// Tensors that are float32 whatever the model is.
    pub float32: &'static [&'static str],
    /// Modules beside the layers that every pipeline stage has.
    pub every_stage: &'static [&'static str],
    /// Modules that are whole where experts are spread over data and tensor parallel ranks alike: the
    /// tokens are split over the ranks there, not the weights.
    pub sequence_parallel: &'static [&'static str],
}

/// Modules that become one, by the last part of their names.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fused {
    pub into: &'static str,
    pub parts: &'static [&'static str],
    /// Whether the others stay as they are where the first is not there.
    pub if_first: bool,
}

/// The projections of an expert, by the last part of their names.
#[derive(Debug)]
pub(super) struct ExpertNames {
    /// Gate and up, which become `w13`.
    pub fused: &'static [&'static str],
    /// The one that becomes `w2`.
    pub down: &'static [&'static str],
}

/// A tensor of all of a layer's experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct StackedName {
    /// The last part of the stored name.
    pub stored: &'static str,
    /// The last part of vLLM's.
    pub held: &'static str,
    pub how: Stacked,
}

/// What vLLM makes of a tensor of all experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stacked {
    AsStored,
    /// Its last two dimensions are swapped.
    Transposed,
    /// Where experts are sliced, it is zero on all ranks but the first: it is added to a sum over the ranks.
    OnFirstRank,
}

impl Table {
    /// Whether layers beyond the model's own are known.
    pub fn has_further_layers(&self) -> bool {
        self.rules.contains(&FURTHER_TOKENS)
    }

    /// Whether every rank has everything.
    pub fn is_replicated(&self) -> bool {
        self.rules
            .iter()
            .copied()
            .flatten()
            .all(|(_, rule)| *rule == Replicated)
    }
}

/// Every architecture that can be split.
pub(super) const TABLES: &[Table] = &[
    Table {
        architectures: &[
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "Qwen2ForCausalLM",
            "GraniteForCausalLM",
        ],
        tied_by_default: false,
        rules: &[DECODER],
        vllm: Some(&DENSE),
    },
    Table {
        architectures: &["Qwen3ForCausalLM"],
        tied_by_default: false,
        rules: &[DECODER, HEAD_NORMS],
        vllm: Some(&DENSE),
    },
    Table {
        architectures: &["GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"],
        tied_by_default: true,
        rules: &[DECODER, HEAD_NORMS, MORE_NORMS],
        vllm: Some(&NORM_ON_EVERY_STAGE),
    },
    Table {
        architectures: &["Phi3ForCausalLM"],
        tied_by_default: false,
        rules: &[FUSED_PROJECTIONS, DECODER],
        vllm: Some(&DENSE),
    },
    Table {
        architectures: &["MixtralForCausalLM"],
        tied_by_default: false,
        rules: &[DECODER, MIXTRAL_EXPERTS],
        vllm: Some(&MIXTRAL),
    },
    Table {
        architectures: &["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"],
        tied_by_default: false,
        rules: &[DECODER, HEAD_NORMS, EXPERTS],
        vllm: Some(&QWEN_MOE),
    },
    Table {
        architectures: &["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"],
        tied_by_default: false,
        rules: &[LATENT_ATTENTION, DECODER, EXPERTS, FURTHER_TOKENS],
        vllm: Some(&DEEPSEEK),
    },
    Table {
        architectures: &["Olmo2ForCausalLM", "Olmo3ForCausalLM"],
        tied_by_default: false,
        rules: &[DECODER, HEAD_NORMS, MORE_NORMS],
        vllm: Some(&DENSE),
    },
    Table {
        architectures: &["GlmForCausalLM", "Glm4ForCausalLM"],
        tied_by_default: false,
        rules: &[FUSED_PROJECTIONS, DECODER, MORE_NORMS],
        vllm: Some(&DENSE),
    },
    Table {
        architectures: &["Glm4MoeForCausalLM"],
        tied_by_default: false,
        rules: &[DECODER, HEAD_NORMS, EXPERTS, FURTHER_TOKENS],
        vllm: Some(&GLM4_MOE),
    },
    Table {
        architectures: &["CohereForCausalLM", "Cohere2ForCausalLM"],
        tied_by_default: true,
        rules: &[NORMS_BY_HEAD, DECODER],
        vllm: Some(&NORM_ON_EVERY_STAGE),
    },
    Table {
        architectures: &["GptOssForCausalLM"],
        tied_by_default: false,
        rules: &[DECODER, GPT_OSS_MODULES],
        vllm: Some(&GPT_OSS),
    },
    Table {
        architectures: &[
            "BertModel",
            "BertForMaskedLM",
            "BertForSequenceClassification",
            "BertForTokenClassification",
            "RobertaModel",
            "RobertaForMaskedLM",
            "RobertaForSequenceClassification",
            "XLMRobertaModel",
            "XLMRobertaForMaskedLM",
            "XLMRobertaForSequenceClassification",
            "CamembertModel",
            "DistilBertModel",
            "ElectraModel",
            "MPNetModel",
            "ModernBertModel",
            "ModernBertForSequenceClassification",
            "NomicBertModel",
        ],
        tied_by_default: false,
        rules: &[&[("**", Replicated)]],
        vllm: None,
    },
];

/// EAGLE and EAGLE3 drafts, whatever their architecture is called. Theirs are the base model's names.
pub(super) const EAGLE: Table = Table {
    architectures: &[],
    tied_by_default: false,
    rules: &[&[
        ("embed_tokens", Embedding),
        ("fc", Replicated),
        ("layers.*.self_attn.q_proj", QueryColumn),
        ("layers.*.self_attn.k_proj", KvColumn),
        ("layers.*.self_attn.v_proj", KvColumn),
        ("layers.*.self_attn.o_proj", Row),
        ("layers.*.self_attn.q_norm", Replicated),
        ("layers.*.self_attn.k_norm", Replicated),
        ("layers.*.mlp.gate_proj", Column),
        ("layers.*.mlp.up_proj", Column),
        ("layers.*.mlp.down_proj", Row),
        ("layers.*.input_layernorm", Replicated),
        ("layers.*.post_attention_layernorm", Replicated),
        ("layers.*.hidden_norm", Replicated),
        ("midlayer.self_attn.q_proj", QueryColumn),
        ("midlayer.self_attn.k_proj", KvColumn),
        ("midlayer.self_attn.v_proj", KvColumn),
        ("midlayer.self_attn.o_proj", Row),
        ("midlayer.self_attn.q_norm", Replicated),
        ("midlayer.self_attn.k_norm", Replicated),
        ("midlayer.mlp.gate_proj", Column),
        ("midlayer.mlp.up_proj", Column),
        ("midlayer.mlp.down_proj", Row),
        ("midlayer.input_layernorm", Replicated),
        ("midlayer.post_attention_layernorm", Replicated),
        ("midlayer.hidden_norm", Replicated),
        ("norm", Replicated),
        ("lm_head", Head),
        // Between the vocabularies of draft and target.
        ("d2t", Replicated),
        ("t2d", Replicated),
    ]],
    vllm: None,
};

/// A decoder of attention and gated MLP, as Llama's.
const DECODER: &[(&str, Rule)] = &[
    ("model.embed_tokens", Embedding),
    ("model.layers.*.self_attn.q_proj", QueryColumn),
    ("model.layers.*.self_attn.k_proj", KvColumn),
    ("model.layers.*.self_attn.v_proj", KvColumn),
    ("model.layers.*.self_attn.o_proj", Row),
    ("model.layers.*.self_attn.rotary_emb", Replicated),
    ("model.layers.*.mlp.gate_proj", Column),
    ("model.layers.*.mlp.up_proj", Column),
    ("model.layers.*.mlp.down_proj", Row),
    ("model.layers.*.input_layernorm", Replicated),
    ("model.layers.*.post_attention_layernorm", Replicated),
    ("model.rotary_emb", Replicated),
    ("model.norm", Replicated),
    ("lm_head", Head),
];

/// Norms of queries and keys whose weights all heads share, or that are over all heads together.
const HEAD_NORMS: &[(&str, Rule)] = &[
    ("model.layers.*.self_attn.q_norm", Replicated),
    ("model.layers.*.self_attn.k_norm", Replicated),
];

/// Norms of queries and keys with weights for each head, `[heads, head_dim]`.
const NORMS_BY_HEAD: &[(&str, Rule)] = &[
    ("model.layers.*.self_attn.q_norm", QueryColumn),
    ("model.layers.*.self_attn.k_norm", KvColumn),
];

/// Norms around the MLP, or behind it.
const MORE_NORMS: &[(&str, Rule)] = &[
    ("model.layers.*.pre_feedforward_layernorm", Replicated),
    ("model.layers.*.post_feedforward_layernorm", Replicated),
    ("model.layers.*.post_self_attn_layernorm", Replicated),
    ("model.layers.*.post_mlp_layernorm", Replicated),
];

/// Projections that the checkpoint has as one tensor.
const FUSED_PROJECTIONS: &[(&str, Rule)] = &[
    ("model.layers.*.self_attn.qkv_proj", QkvColumn),
    ("model.layers.*.mlp.gate_up_proj", PackedColumn),
];

const MIXTRAL_EXPERTS: &[(&str, Rule)] = &[
    ("model.layers.*.block_sparse_moe.gate", Replicated),
    ("model.layers.*.block_sparse_moe.experts.*.w1", Column),
    ("model.layers.*.block_sparse_moe.experts.*.w2", Row),
    ("model.layers.*.block_sparse_moe.experts.*.w3", Column),
];

/// Routed and shared experts. (Qwen's layers have one shared expert, the others' maybe several as one.)
const EXPERTS: &[(&str, Rule)] = &[
    ("model.layers.*.mlp.gate", Replicated),
    ("model.layers.*.mlp.experts.*.gate_proj", Column),
    ("model.layers.*.mlp.experts.*.up_proj", Column),
    ("model.layers.*.mlp.experts.*.down_proj", Row),
    ("model.layers.*.mlp.shared_experts.gate_proj", Column),
    ("model.layers.*.mlp.shared_experts.up_proj", Column),
    ("model.layers.*.mlp.shared_experts.down_proj", Row),
    ("model.layers.*.mlp.shared_expert.gate_proj", Column),
    ("model.layers.*.mlp.shared_expert.up_proj", Column),
    ("model.layers.*.mlp.shared_expert.down_proj", Row),
    ("model.layers.*.mlp.shared_expert_gate", Replicated),
];

/// Multi-head latent attention: what compresses is whole on every rank, what expands goes by heads.
const LATENT_ATTENTION: &[(&str, Rule)] = &[
    ("model.layers.*.self_attn.q_proj", HeadColumn),
    ("model.layers.*.self_attn.q_a_proj", Replicated),
    ("model.layers.*.self_attn.q_a_layernorm", Replicated),
    ("model.layers.*.self_attn.q_b_proj", HeadColumn),
    ("model.layers.*.self_attn.kv_a_proj_with_mqa", Replicated),
    ("model.layers.*.self_attn.kv_a_layernorm", Replicated),
    ("model.layers.*.self_attn.kv_b_proj", HeadColumn),
];

/// The experts' weights are `[experts, in, out]`, so what cuts their outputs is the rule for inputs;
/// gate and up alternate, and stay pairs. Quantized they are `[experts, out, in / block, ..]`. Parts are
/// uneven where ranks do not divide them, as vLLM has it: gpt-oss has 90 blocks, and runs on 4 and 8 ranks.
const GPT_OSS_MODULES: &[(&str, Rule)] = &[
    ("model.layers.*.self_attn.sinks", HeadColumn),
    ("model.layers.*.mlp.router", Replicated),
    ("model.layers.*.mlp.experts.gate_up_proj", UnevenRow(2)),
    ("model.layers.*.mlp.experts.gate_up_proj_blocks", UnevenColumn(2)),
    ("model.layers.*.mlp.experts.gate_up_proj_scales", UnevenColumn(2)),
    ("model.layers.*.mlp.experts.gate_up_proj_bias", UnevenColumn(2)),
    ("model.layers.*.mlp.experts.down_proj", UnevenColumn(1)),
    ("model.layers.*.mlp.experts.down_proj_blocks", UnevenRow(1)),
    ("model.layers.*.mlp.experts.down_proj_scales", UnevenRow(1)),
    ("model.layers.*.mlp.experts.down_proj_bias", Replicated),
];

/// What a layer that predicts further tokens has beside a decoder layer's modules.
const FURTHER_TOKENS: &[(&str, Rule)] = &[
    ("model.layers.*.embed_tokens", Embedding),
    ("model.layers.*.enorm", Replicated),
    ("model.layers.*.hnorm", Replicated),
    ("model.layers.*.eh_proj", Replicated),
    ("model.layers.*.shared_head.norm", Replicated),
    ("model.layers.*.shared_head.head", Head),
];

const DENSE: Vllm = Vllm {
    fused: &[QKV, GATE_UP],
    experts: None,
    stacked: &[],
    renamed: &[],
    float32: &[],
    every_stage: &[],
    sequence_parallel: &[],
};

/// vLLM has these on every stage of some models, whether they are used there or not.
const ENDS: &[&str] = &["model.embed_tokens", "model.norm", "lm_head"];

const NORM_ON_EVERY_STAGE: Vllm = Vllm {
    every_stage: &["model.norm"],
    ..DENSE
};

const MIXTRAL: Vllm = Vllm {
    experts: Some(ExpertNames {
        fused: &["w1", "w3"],
        down: &["w2"],
    }),
    every_stage: ENDS,
    ..DENSE
};

const MOE: Vllm = Vllm {
    experts: Some(ExpertNames {
        fused: &["gate_proj", "up_proj"],
        down: &["down_proj"],
    }),
    ..DENSE
};

const QWEN_MOE: Vllm = Vllm {
    every_stage: ENDS,
    ..MOE
};

const GLM4_MOE: Vllm = Vllm {
    float32: &["model.layers.*.mlp.gate"],
    ..MOE
};

const DEEPSEEK: Vllm = Vllm {
    float32: &["model.layers.*.mlp.gate.e_score_correction_bias"],
    fused: &[
        GATE_UP,
        Fused {
            into: "fused_qkv_a_proj",
            parts: &["q_a_proj", "kv_a_proj_with_mqa"],
            if_first: true,
        },
    ],
    sequence_parallel: &["model.layers.*.mlp.shared_experts.**"],
    ..MOE
};

const GPT_OSS: Vllm = Vllm {
    stacked: &[
        StackedName {
            stored: "gate_up_proj",
            held: "w13_weight",
            how: Stacked::Transposed,
        },
        StackedName {
            stored: "gate_up_proj_bias",
            held: "w13_bias",
            how: Stacked::AsStored,
        },
        StackedName {
            stored: "down_proj",
            held: "w2_weight",
            how: Stacked::Transposed,
        },
        StackedName {
            stored: "down_proj_bias",
            held: "w2_bias",
            how: Stacked::OnFirstRank,
        },
    ],
    renamed: &[(".self_attn.", ".attn."), (".embed_tokens.", ".embedding.")],
    every_stage: ENDS,
    ..DENSE
};

const QKV: Fused = Fused {
    into: "qkv_proj",
    parts: &["q_proj", "k_proj", "v_proj"],
    if_first: false,
};
const GATE_UP: Fused = Fused {
    into: "gate_up_proj",
    parts: &["gate_proj", "up_proj"],
    if_first: false,
};
