//! Why a checkpoint cannot be split as asked.

use super::applied::MOST_EXPERTS;
use weightd_core::content::Dtype;
use weightd_core::plan::pipeline::PipelineError;

/// Why a checkpoint cannot be split over the ranks. Known from configuration and headers alone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum RuleError {
    /// No table has rules for this architecture.
    #[error(
        "architecture {architecture} has no sharding rules; pass them with --tp-plan FILE.json, for example \
         {{\"{example}\": \"colwise\"}}, which has to cover {}{}; or use one rank. Known are {known}",
        such_names(.tensors), unlisted(.more)
    )]
    UnknownArchitecture {
        architecture: String,
        tensors: Vec<String>,
        more: usize,
        example: String,
        known: String,
    },
    /// The architecture's table has no rule for some tensors.
    #[error(
        "{architecture} has no sharding rule for {}{}; pass rules for all of its modules with --tp-plan FILE.json, \
         or use one rank",
        .tensors.join(", "), unlisted(.more)
    )]
    Uncovered {
        architecture: String,
        tensors: Vec<String>,
        more: usize,
    },
    /// Patterns of a plan that split nothing.
    #[error(
        "the tensor parallel plan's {} cover{} no tensor of this checkpoint, which has {}: use the names in the \
         checkpoint",
        .patterns.join(", "), if .patterns.len() == 1 { "s" } else { "" }, such_names(.names)
    )]
    UnusedPatterns {
        patterns: Vec<String>,
        names: Vec<String>,
    },
    /// The layout is not known for this architecture.
    #[error("layout vllm is not known for {architecture}: use layout checkpoint, or one of {known}")]
    NoLayout { architecture: String, known: String },
    /// A plan says nothing of fused tensors.
    #[error("a tensor parallel plan is for layout checkpoint: with layout vllm, leave it out")]
    PlanWithLayout,
    /// vLLM rearranges quantized weights after loading.
    #[error(
        "{tensor} is quantized with {method}, whose weights vLLM rearranges after loading: use layout checkpoint, or let \
         the engine publish what it made of them"
    )]
    QuantizedLayout { tensor: String, method: String },
    /// Quantized weights of which the configuration does not say how.
    #[error(
        "{tensor} is quantized, and config.json has no quantization_config: put it there (tools write it to \
         hf_quant_config.json, quantize_config.json or quant_config.json), or use one rank, --dtype auto and layout \
         checkpoint"
    )]
    QuantizedUnsaid { tensor: String },
    /// A configuration without a method.
    #[error("quantization_config in config.json does not say quant_method: add it")]
    QuantizationUnnamed,
    /// A method that is not known.
    #[error(
        "quantization method {method:?} (quant_method in config.json) is not supported; use a checkpoint quantized with \
         one of {known}"
    )]
    UnknownQuantization { method: String, known: String },
    /// It is not known how the tensor goes along with its layer.
    #[error(
        "{tensor} cannot be split: how {method} stores it is not known; use tensor parallel size 1, which serves it as it \
         is stored"
    )]
    QuantizedWhole { tensor: String, method: String },
    /// A part would begin or end inside a pack, a block or a group.
    #[error(
        "{tensor} cannot be split into parts of {per_rank}: {method} keeps {unit} together; use tensor parallel size \
         {ranks}, or another that leaves them whole"
    )]
    CutsUnit {
        tensor: String,
        method: String,
        unit: u64,
        per_rank: u64,
        ranks: u64,
    },
    /// Groups of inputs that are anywhere in the layer.
    #[error(
        "{tensor} cannot be split by inputs: {method} in activation order (desc_act or actorder) has groups of inputs \
         from anywhere in the layer; use tensor parallel size 1, or a checkpoint without activation order"
    )]
    ActOrder { tensor: String, method: String },
    /// A tensor of another size than the configuration implies.
    #[error(
        "{tensor} has {found} elements in dimension {dim}, and by quantization_config ({method}) it should have \
         {expected}: correct config.json"
    )]
    QuantizedShape {
        tensor: String,
        method: String,
        dim: usize,
        found: u64,
        expected: u64,
    },
    /// Scales of nothing.
    #[error("{tensor} cannot be split: the checkpoint lacks the {method} weights that it belongs to")]
    QuantizedAlone { tensor: String, method: String },
    /// A number that splitting needs.
    #[error(
        "quantization_config ({method}) does not say {what}, which splitting needs: add it to config.json"
    )]
    QuantizationLacks { method: String, what: &'static str },
    /// A value that is none, or layers that are not all quantized alike.
    #[error(
        "quantization_config ({method}): {field} is {value}, which is no usable value or not the same for all layers; \
         use tensor parallel size 1"
    )]
    QuantizationField {
        method: String,
        field: &'static str,
        value: String,
    },
    /// A draft's tensors that no rule covers.
    #[error(
        "the draft has no sharding rule for {}{}: use tensor parallel size 1, or a draft of another kind",
        .tensors.join(", "), unlisted(.more)
    )]
    UncoveredDraft { tensors: Vec<String>, more: usize },
    /// The layers are not those of the configuration.
    #[error(
        "{tensor} is of layer {layer}, and config.json says {layers} layers (num_hidden_layers): correct config.json"
    )]
    LayerBeyond { tensor: String, layer: u64, layers: u64 },
    /// A stage would lack its layers.
    #[error(
        "the checkpoint has no tensor of layer {layer} of {layers} (num_hidden_layers in config.json), or names its \
         layers in a way that is not known: use pipeline parallel size 1"
    )]
    LayerMissing { layer: u64, layers: u64 },
    /// There is no such draft in the checkpoint.
    #[error(
        "the checkpoint has no layers at or beyond num_hidden_layers ({layers}), which method mtp takes for its draft: use \
         a checkpoint with them, or another method"
    )]
    NoFurtherLayers { layers: u64 },
    /// vLLM's layout of drafts.
    #[error("layout vllm is not known for drafts: use layout checkpoint")]
    DraftLayout,
    /// Layers cannot be spread over the stages.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// Replicated models have no stages.
    #[error("{architecture} is whole on every rank and has no pipeline stages: use pipeline parallel size 1")]
    NoStages { architecture: String },
    /// A number that the rules need is missing.
    #[error("config.json does not say {field}, which {what} needs: add it")]
    ConfigLacks { field: &'static str, what: &'static str },
    /// Query heads cannot be divided.
    #[error(
        "{ranks} tensor parallel ranks do not evenly divide the {heads} attention heads: use a size that does"
    )]
    Heads { ranks: u64, heads: u64 },
    /// Key and value heads can neither be divided nor repeated.
    #[error(
        "{ranks} tensor parallel ranks neither evenly divide the {heads} key and value heads nor are a multiple of them: \
         use a size that is either"
    )]
    KvHeads { ranks: u64, heads: u64 },
    /// The rule's dimension cannot be divided.
    #[error(
        "{tensor} has a dimension of size {size} to split, which {parts} {of} do not evenly divide: use \
         a tensor parallel size that divides it"
    )]
    Indivisible {
        tensor: String,
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
    /// The last rank would have nothing.
    #[error(
        "{tensor} has {size} rows to split: with {ranks} ranks of {per_rank} rows the last would have none; use a \
         smaller tensor parallel size"
    )]
    NothingLeft {
        tensor: String,
        size: u64,
        ranks: u64,
        per_rank: u64,
    },
    /// vLLM could not split the vocabulary either.
    #[error(
        "{tensor}: its vocabulary, padded to {padded} rows as vLLM does, is not evenly divided by {ranks} ranks; use \
         a tensor parallel size that divides it, or layout checkpoint"
    )]
    PaddedVocabulary { tensor: String, padded: u64, ranks: u64 },
    /// vLLM could not hold it as a vocabulary.
    #[error(
        "{tensor} of shape {shape:?} has no row or number for each token, as layout vllm has them: use layout checkpoint"
    )]
    NoVocabulary { tensor: String, shape: Vec<u64> },
    /// The rule splits a dimension that the tensor does not have.
    #[error(
        "{tensor} of shape {shape:?} has no dimension {dim} to split: give it the rule \"replicated\" in --tp-plan"
    )]
    NoDimension {
        tensor: String,
        shape: Vec<u64>,
        dim: usize,
    },
    /// A cut would go through a byte.
    #[error("{tensor} of shape {shape:?} and type {} would be cut inside a byte: use a smaller tensor \
         parallel size", .dtype.name())]
    CutsByte {
        tensor: String,
        shape: Vec<u64>,
        dtype: Dtype,
    },
    /// A layer's experts are not those of the configuration.
    #[error(
        "{tensor} and its kin are of {found} experts, up to number {last}, and config.json says {stated} experts: the \
         checkpoint is not whole, or config.json is of another"
    )]
    Experts {
        tensor: String,
        found: u64,
        last: u64,
        stated: u64,
    },
    /// A dimension that cannot count experts.
    #[error(
        "{tensor} is of {experts} experts, and more than {MOST_EXPERTS} cannot be spread: leave expert parallelism out"
    )]
    TooManyExperts { tensor: String, experts: u64 },
    /// Fewer experts than ranks to spread them over.
    #[error("{experts} experts cannot be spread over {ranks} ranks: use fewer, or no expert parallelism")]
    TooFewExperts { experts: u64, ranks: u64 },
    /// vLLM would not place experts like this.
    #[error(
        "vLLM places experts linearly where they are not in groups (n_group in config.json), whatever it is told: use \
         expert placement strategy linear"
    )]
    UngroupedExperts,
    /// There is nothing to spread.
    #[error("expert parallelism is for models with experts, and this checkpoint has none: leave it out")]
    NoExperts,
    /// A fused tensor lacks a part.
    #[error("{fused} cannot be fused: the checkpoint lacks {part}; complete it, or use layout checkpoint")]
    PartMissing { fused: String, part: String },
    /// What is stored both fused and in parts, or a part twice.
    #[error(
        "{fused} cannot be fused: the checkpoint has both {first} and {second} for the same part of it; remove one of \
         them, or use layout checkpoint"
    )]
    StoredTwice {
        fused: String,
        first: String,
        second: String,
    },
    /// A fused tensor's parts do not fit together.
    #[error("{fused} cannot be fused: {first} and {second} do not go together; use layout checkpoint")]
    PartsDiffer {
        fused: String,
        first: String,
        second: String,
    },
    /// A tensor that has to be looked at could not be read.
    #[error(
        "cannot compare {what} with what config.json ties it to: {why}; set tie_word_embeddings to false if they \
         are not the same"
    )]
    Unreadable { what: &'static str, why: String },
}

fn such_names(names: &[String]) -> String {
    match names {
        [] => "no tensors".to_owned(),
        names => format!("such names as {}", names.join(", ")),
    }
}

fn unlisted(more: &usize) -> String {
    if *more == 0 {
        String::new()
    } else {
        format!(" and {more} more")
    }
}
