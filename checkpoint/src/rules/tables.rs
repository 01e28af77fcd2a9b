//! The sharding rules of the known architectures.

use super::Rule::{self, Column, KvColumn, QueryColumn, Replicated, Row, Vocabulary};

/// What is known of an architecture.
#[derive(Debug)]
pub(super) struct Table {
    /// The class in `architectures` of `config.json`.
    pub architecture: &'static str,
    /// Whether transformers ties the head to the embedding where `config.json` does not say.
    pub tied_by_default: bool,
    /// Lists of patterns and their rules; the first pattern that covers a tensor counts.
    pub rules: &'static [&'static [(&'static str, Rule)]],
}

/// Every architecture that can be split.
pub(super) const TABLES: &[Table] = &[
    Table {
        architecture: "LlamaForCausalLM",
        tied_by_default: false,
        rules: &[DECODER],
    },
    Table {
        architecture: "Qwen3ForCausalLM",
        tied_by_default: false,
        rules: &[DECODER, QK_NORM],
    },
];

/// A decoder of attention and gated MLP, as Llama's.
const DECODER: &[(&str, Rule)] = &[
    ("model.embed_tokens", Vocabulary),
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
    ("lm_head", Vocabulary),
];

/// Norms over the elements of a head: every head has the same.
const QK_NORM: &[(&str, Rule)] = &[
    ("model.layers.*.self_attn.q_norm", Replicated),
    ("model.layers.*.self_attn.k_norm", Replicated),
];
