//! Why a checkpoint cannot be split as asked.

use weightd_core::content::Dtype;

/// Why a checkpoint cannot be split over the ranks. Known from configuration and headers alone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum RuleError {
    /// No table has rules for this architecture.
    #[error(
        "architecture {architecture} cannot be split with tensor parallel size {tp}: there are rules for \
         {known}; use tensor parallel size 1"
    )]
    UnknownArchitecture {
        architecture: String,
        tp: u32,
        known: String,
    },
    /// The architecture's table has no rule for some tensors.
    #[error(
        "{architecture} has no sharding rule for {}{}; use tensor parallel size 1",
        .tensors.join(", "), unlisted(.more)
    )]
    Uncovered {
        architecture: String,
        tensors: Vec<String>,
        more: usize,
    },
    /// Packs, blocks and groups are not known to the rules.
    #[error(
        "checkpoint quantized with {method} (quantization_config in config.json) cannot be split with tensor \
         parallel size {tp}; use tensor parallel size 1, which serves it as it is stored"
    )]
    Quantized { method: String, tp: u32 },
    /// Stages are not known to the rules.
    #[error("pipeline parallel size {pp} is not supported: use 1")]
    Pipeline { pp: u32 },
    /// A number that the rules need is missing.
    #[error("config.json does not say {field}, which tensor parallel size {tp} needs")]
    ConfigLacks { field: &'static str, tp: u32 },
    /// Query heads cannot be divided.
    #[error(
        "tensor parallel size {tp} does not evenly divide the {heads} attention heads: use one that does"
    )]
    Heads { tp: u32, heads: u64 },
    /// Key and value heads can neither be divided nor repeated.
    #[error(
        "tensor parallel size {tp} neither evenly divides the {heads} key and value heads nor is a multiple"
    )]
    KvHeads { tp: u32, heads: u64 },
    /// The rule's dimension cannot be divided.
    #[error("{tensor} has size {size} in dimension {dim}, which {parts} {of} do not evenly divide")]
    Indivisible {
        tensor: String,
        dim: usize,
        size: u64,
        parts: u64,
        of: &'static str,
    },
    /// The tensor is not of the heads that the configuration states.
    #[error(
        "{tensor} has {size} rows, and config.json says {heads} {of} of {head_dim} elements: correct config.json"
    )]
    HeadSize {
        tensor: String,
        size: u64,
        heads: u64,
        of: &'static str,
        head_dim: u64,
    },
    /// The vocabulary is too small to give every rank rows.
    #[error(
        "{tensor} has {size} rows: with {tp} ranks of {per_rank} rows the last would have none; use a \
         smaller tensor parallel size"
    )]
    EmptyVocabulary {
        tensor: String,
        size: u64,
        tp: u32,
        per_rank: u64,
    },
    /// The rule splits a dimension that the tensor does not have.
    #[error("{tensor} of shape {shape:?} has no dimension {dim} to split")]
    NoDimension {
        tensor: String,
        shape: Vec<u64>,
        dim: usize,
    },
    /// A cut would go through a byte.
    #[error("{tensor} of shape {shape:?} and type {} would be cut inside a byte", .dtype.name())]
    CutsByte {
        tensor: String,
        shape: Vec<u64>,
        dtype: Dtype,
    },
    /// The configuration ties two tensors that cannot be one.
    #[error(
        "config.json ties {head} to {embedding}, but one is {head_shape:?} and the other {embedding_shape:?}; \
         set tie_word_embeddings to false if they are not the same"
    )]
    TiedApart {
        head: &'static str,
        embedding: &'static str,
        head_shape: Vec<u64>,
        embedding_shape: Vec<u64>,
    },
}

fn unlisted(more: &usize) -> String {
    if *more == 0 {
        String::new()
    } else {
        format!(" and {more} more")
    }
}
