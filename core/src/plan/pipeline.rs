//! Pipeline parallel: which layers each stage holds.

use std::ops::Range;
use thiserror::Error;

/// The most stages; far above any deployment, so that a slip in a flag is an error and not an
/// allocation.
pub const MAX_STAGES: u32 = 4096;

/// Why layers cannot be spread over stages.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PipelineError {
    /// There is no stage to hold a layer.
    #[error("pipeline parallel size is 0: it must be at least 1")]
    NoStages,
    /// A stage would have no layer.
    #[error("{layers} layers do not fill {stages} pipeline stages: use a smaller pipeline parallel size")]
    TooFewLayers {
        /// Layers of the model.
        layers: u64,
        /// Pipeline parallel size.
        stages: u32,
    },
    /// More stages than [`MAX_STAGES`].
    #[error("a pipeline parallel size of {stages} is too large: at most {MAX_STAGES}")]
    TooManyStages {
        /// Pipeline parallel size.
        stages: u32,
    },
    /// A partition for another number of stages.
    #[error(
        "the layer partition has {given} entries for {stages} pipeline stages: give the number of layers of \
         each stage"
    )]
    PartitionCount {
        /// Entries of the partition.
        given: usize,
        /// Pipeline parallel size.
        stages: u32,
    },
    /// A partition that leaves a stage without layers.
    #[error("the layer partition gives stage {stage} no layers: give each stage at least 1")]
    EmptyStage {
        /// The first such stage, counted from 0.
        stage: usize,
    },
    /// A partition of another number of layers.
    #[error("the layer partition has {sum} layers and the model {layers}: make it add up to {layers}")]
    PartitionSum {
        /// Layers of all stages of the partition.
        sum: u128,
        /// Layers of the model.
        layers: u64,
    },
}

/// The contiguous layers of each pipeline stage, first stage first.
///
/// Without a `partition` each stage has `layers / pipeline` of them, and the remainder goes one each
/// to the stages before the last, from the back: the last stage has the head to compute. That is the
/// rule of vLLM (`get_pp_indices`). A `partition` gives the number of layers of each stage, as
/// `VLLM_PP_LAYER_PARTITION` does there.
///
/// # Errors
///
/// No stage, more than [`MAX_STAGES`] or more than layers; a partition that has not one entry per
/// stage, an entry of 0, or another sum than `layers`.
pub fn stages(
    layers: u64,
    pipeline: u32,
    partition: Option<&[u64]>,
) -> Result<Vec<Range<u64>>, PipelineError> {
    if pipeline == 0 {
        return Err(PipelineError::NoStages);
    }
    if layers < u64::from(pipeline) {
        let stages = pipeline;
        return Err(PipelineError::TooFewLayers { layers, stages });
    }
    if pipeline > MAX_STAGES {
        return Err(PipelineError::TooManyStages { stages: pipeline });
    }
    Ok(match partition {
        Some(partition) => {
            check(partition, layers, pipeline)?;
            ranges(partition.iter().copied())
        }
        None => {
            let stages = u64::from(pipeline);
            let (base, remainder) = (layers / stages, layers % stages);
            // There are fewer of them than stages, so the last stage never gets one.
            let longer = stages - 1 - remainder..stages - 1;
            ranges((0..stages).map(|stage| base + u64::from(longer.contains(&stage))))
        }
    })
}

fn check(partition: &[u64], layers: u64, stages: u32) -> Result<(), PipelineError> {
    let given = partition.len();
    if given != stages as usize {
        return Err(PipelineError::PartitionCount { given, stages });
    }
    if let Some(stage) = partition.iter().position(|&layers| layers == 0) {
        return Err(PipelineError::EmptyStage { stage });
    }
    let sum = partition.iter().copied().map(u128::from).sum();
    if sum != u128::from(layers) {
        return Err(PipelineError::PartitionSum { sum, layers });
    }
    Ok(())
}

/// Lays stages of these sizes one after the other.
fn ranges(sizes: impl Iterator<Item = u64>) -> Vec<Range<u64>> {
    sizes
        .scan(0, |end, layers| {
            let start = *end;
            *end += layers;
            Some(start..*end)
        })
        .collect()
}
