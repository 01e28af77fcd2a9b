//! What decides how a checkpoint is spread over ranks.

use super::TpPlan;
use std::fmt;
use std::str::FromStr;
use weightd_core::content::Dtype;
use weightd_core::plan::experts::ExpertPlacement;
use weightd_core::plan::placement::Parallel;

/// Everything beside the checkpoint that decides which bytes a rank holds, by which names and as
/// which types. Launcher and engine must have it in common, so all of it is in the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardingOptions {
    /// Which of the checkpoint's tensors are meant.
    pub part: ModelPart,
    /// The sizes of the world.
    pub parallel: Parallel,
    /// Under which names and shapes tensors are held.
    pub layout: Layout,
    /// The type of floating weights.
    pub dtype: FloatDtype,
    /// With expert parallelism, how experts are spread over the ranks; without, they are sliced.
    pub experts: Option<ExpertPlacement>,
    /// The layers of each pipeline stage, where they are not spread evenly.
    pub layer_partition: Option<Vec<u64>>,
    /// Rules in place of those of the architecture.
    pub tp_plan: Option<TpPlan>,
}

impl ShardingOptions {
    /// A world of these sizes, weights as they are stored.
    pub fn new(parallel: Parallel) -> ShardingOptions {
        ShardingOptions {
            part: ModelPart::default(),
            parallel,
            layout: Layout::default(),
            dtype: FloatDtype::default(),
            experts: None,
            layer_partition: None,
            tp_plan: None,
        }
    }

    /// Whether a rank is one of the world. (Without stages, pipeline ranks are all alike.)
    pub(crate) fn has(&self, rank: Rank) -> bool {
        let Parallel {
            tensor,
            pipeline,
            data,
        } = self.parallel;
        rank.tp < tensor && rank.dp < data && (pipeline == 1 || rank.pp < pipeline)
    }

    /// The same for a draft, which has no pipeline stages.
    pub fn of_draft(&self, draft: Draft) -> ShardingOptions {
        ShardingOptions {
            part: ModelPart::Draft(draft),
            parallel: Parallel {
                pipeline: 1,
                ..self.parallel
            },
            layer_partition: None,
            // Only a draft from the target's own checkpoint has the names that the plan is of.
            tp_plan: self.tp_plan.clone().filter(|_| draft == Draft::Mtp),
            ..self.clone()
        }
    }
}

/// Which of a checkpoint's tensors are meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ModelPart {
    /// The model that the configuration describes.
    #[default]
    Target,
    /// A draft for speculative decoding.
    Draft(Draft),
}

/// The kinds of drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draft {
    /// Layers of the target's own checkpoint, at and beyond its `num_hidden_layers`, which predict further
    /// tokens.
    Mtp,
    /// A decoder in a checkpoint of its own that goes by the target's hidden states (EAGLE and EAGLE3).
    Eagle,
}

impl Draft {
    /// The name that keys use.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Draft::Mtp => "mtp",
            Draft::Eagle => "eagle",
        }
    }
}

impl Default for ShardingOptions {
    /// One rank.
    fn default() -> ShardingOptions {
        ShardingOptions::new(Parallel {
            tensor: 1,
            pipeline: 1,
            data: 1,
        })
    }
}

/// One rank's coordinates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rank {
    /// Data parallel rank.
    pub dp: u32,
    /// Pipeline stage.
    pub pp: u32,
    /// Tensor parallel rank.
    pub tp: u32,
}

/// Under which names and shapes tensors are held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// The checkpoint's own: each tensor its shard.
    #[default]
    Checkpoint,
    /// What the modules of vLLM 0.32 hold, before it post-processes them: projections and experts
    /// fused, the vocabulary padded. The parts of a fused tensor are listed as well, by their own names.
    Vllm,
}

impl Layout {
    /// The name that flags and keys use.
    pub fn name(self) -> &'static str {
        match self {
            Layout::Checkpoint => "checkpoint",
            Layout::Vllm => "vllm",
        }
    }
}

/// The type that floating weights (F32, F16, BF16) are held in. Others, among them all that is
/// quantized, are never cast.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FloatDtype {
    /// As stored. In vLLM's layout: the type that the configuration names, and bfloat16 for float32,
    /// as vLLM has it.
    #[default]
    Auto,
    /// BF16.
    Bfloat16,
    /// F16.
    Float16,
    /// F32.
    Float32,
}

impl FloatDtype {
    /// The name that keys use.
    pub fn name(self) -> &'static str {
        match self {
            FloatDtype::Auto => "auto",
            FloatDtype::Bfloat16 => "bfloat16",
            FloatDtype::Float16 => "float16",
            FloatDtype::Float32 => "float32",
        }
    }

    /// The element type; none for [`Auto`](FloatDtype::Auto).
    pub(super) fn dtype(self) -> Option<Dtype> {
        match self {
            FloatDtype::Auto => None,
            FloatDtype::Bfloat16 => Some(Dtype::BF16),
            FloatDtype::Float16 => Some(Dtype::F16),
            FloatDtype::Float32 => Some(Dtype::F32),
        }
    }
}

/// A name that is none of those that are known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is no {of}: use {known}")]
pub struct UnknownName {
    given: String,
    of: &'static str,
    known: &'static str,
}

impl FromStr for Layout {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Layout, UnknownName> {
        match text {
            "checkpoint" => Ok(Layout::Checkpoint),
            "vllm" => Ok(Layout::Vllm),
            _ => Err(UnknownName {
                given: text.to_owned(),
                of: "layout",
                known: "checkpoint or vllm",
            }),
        }
    }
}

impl FromStr for FloatDtype {
    type Err = UnknownName;

    /// The names that vLLM takes, and the short ones.
    fn from_str(text: &str) -> Result<FloatDtype, UnknownName> {
        match text {
            "auto" => Ok(FloatDtype::Auto),
            "bfloat16" | "bf16" => Ok(FloatDtype::Bfloat16),
            "float16" | "half" | "f16" | "fp16" => Ok(FloatDtype::Float16),
            "float32" | "float" | "f32" | "fp32" => Ok(FloatDtype::Float32),
            _ => Err(UnknownName {
                given: text.to_owned(),
                of: "type of weights",
                known: "auto, bfloat16, float16 or float32",
            }),
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for FloatDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
