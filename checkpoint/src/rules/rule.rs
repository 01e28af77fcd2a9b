//! What tensor parallelism does to a tensor.

/// What tensor parallelism does to a tensor, named after the styles of the tensor parallel plans of
/// Hugging Face transformers where those have it.
///
/// A weight is `[out, in]`, a bias `[out]`; a tensor of all experts has them as its first dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The outputs in equal parts (`colwise`).
    Column,
    /// The outputs in equal parts of whole query heads, whatever a head's size.
    HeadColumn,
    /// The same, of heads of the size that the configuration states.
    QueryColumn,
    /// The outputs in equal parts of whole key and value heads. With more ranks than heads each
    /// head is on several ranks: rank r holds head `r * heads / tp`, rounded down.
    KvColumn,
    /// The outputs of query, key and value projections one after another, each as by its own rule.
    QkvColumn,
    /// Two projections' outputs one after another, each in equal parts (`packed_colwise`).
    PackedColumn,
    /// The inputs in equal parts (`rowwise`). The bias is added once, to the sum over the ranks, so
    /// every rank holds all of it.
    Row,
    /// Two projections' inputs one after another, each in equal parts (`packed_rowwise`).
    PackedRow,
    /// The outputs in parts of whole blocks of a quantization, each of so many outputs for an element of
    /// such a block, rounded up; the last ranks have what remains.
    UnevenColumn(u64),
    /// The same of the inputs.
    UnevenRow(u64),
    /// The vocabulary of the embedding (`embedding_rowwise`): rows in parts of `size / tp` rows,
    /// rounded up; the last rank has what remains.
    Embedding,
    /// Outputs that are gathered (`colwise_gather_output`), above all the head's: parts as the
    /// embedding's.
    Head,
    /// Whole on every rank.
    Replicated,
}

/// The styles of transformers 5 that say how a parameter is split, and those that leave it whole.
/// (Some others are about activations and gradients alone, and some about expert parallelism, which
/// is not a matter of plans here.)
pub(super) const STYLES: &[(&str, Rule)] = &[
    ("colwise", Rule::Column),
    ("colwise_gather_output", Rule::Head),
    ("colwise_rep", Rule::Head),
    ("rowwise", Rule::Row),
    ("rowwise_split_input", Rule::Row),
    ("rowwise_rep", Rule::Row),
    ("packed_colwise", Rule::PackedColumn),
    ("packed_rowwise", Rule::PackedRow),
    ("embedding_rowwise", Rule::Embedding),
    ("replicated", Rule::Replicated),
    ("replicated_with_grad_allreduce", Rule::Replicated),
    ("sequence_parallel", Rule::Replicated),
    ("mla_kv_a_proj", Rule::Replicated),
    ("ep_router", Rule::Replicated),
    ("moe_tp_experts", Rule::Replicated),
    ("moe_identity_expert", Rule::Replicated),
    ("ep_dispatch_experts", Rule::Replicated),
    ("all_reduce", Rule::Replicated),
    ("qkv_colwise", Rule::QkvColumn),
    ("heads_colwise", Rule::HeadColumn),
];
