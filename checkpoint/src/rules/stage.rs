//! Which pipeline stages a tensor is on.

use super::{Draft, ModelPart, Rule, RuleError, ShardingOptions, tables::Table};
use crate::ModelConfig;
use std::ops::Range;
use weightd_core::plan::pipeline;

/// Where a tensor belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The stage of a layer.
    Layer(u64),
    /// The first: the embedding.
    First,
    /// The last: what comes after the layers.
    Last,
    /// First and last: an embedding that is the head as well.
    Ends,
    /// Every one: buffers of the model as a whole.
    Every,
}

/// The layers of all stages.
#[derive(Debug)]
pub(super) struct Stages {
    /// One for each stage; empty where there is just one.
    layers: Vec<Range<u64>>,
    /// The layers of the model, where the configuration says it and the architecture is known: a
    /// checkpoint can have more.
    known: Option<u64>,
    part: ModelPart,
}

impl Stages {
    pub fn new(
        config: &ModelConfig,
        table: Option<&Table>,
        options: &ShardingOptions,
    ) -> Result<Stages, RuleError> {
        let count = options.parallel.pipeline;
        let part = options.part;
        let known = match part {
            ModelPart::Target => config.num_hidden_layers.filter(|_| table.is_some() || count > 1),
            ModelPart::Draft(Draft::Mtp) => Some(config.num_hidden_layers.ok_or(RuleError::ConfigLacks {
                field: "num_hidden_layers",
                what: "a draft of the layers beyond",
            })?),
            ModelPart::Draft(Draft::Eagle) => None,
        };
        if count == 1 && options.layer_partition.is_none() {
            return Ok(Stages {
                layers: Vec::new(),
                known,
                part,
            });
        }
        if table.is_some_and(Table::is_replicated) && count > 1 {
            let architecture = config.architectures.join(",");
            return Err(RuleError::NoStages { architecture });
        }
        let layers = config.num_hidden_layers.ok_or(RuleError::ConfigLacks {
            field: "num_hidden_layers",
            what: "pipeline parallelism",
        })?;
        let layers = pipeline::stages(layers, count, options.layer_partition.as_deref())?;
        Ok(Stages { layers, known, part })
    }

    /// Where a tensor belongs by its name, layer and rule; `is_head_too` where the head is tied to it.
    pub fn of(&self, tensor: &str, layer: Option<u64>, rule: Rule, is_head_too: bool) -> Stage {
        match (layer, rule) {
            (Some(layer), _) => Stage::Layer(layer),
            _ if is_head_too => Stage::Ends,
            (None, Rule::Embedding) => Stage::First,
            (None, _) if super::held::is_buffer(tensor) => Stage::Every,
            (None, _) => Stage::Last,
        }
    }

    /// Whether what belongs to this layer, or to none, is of the part of the checkpoint that is meant.
    pub fn is_meant(&self, layer: Option<u64>) -> bool {
        let is_beyond = layer
            .zip(self.known)
            .is_some_and(|(layer, layers)| layer >= layers);
        is_beyond == (self.part == ModelPart::Draft(Draft::Mtp))
    }

    /// Whether a pipeline rank has what belongs to `stage`.
    pub fn has(&self, stage: Stage, rank: u32) -> bool {
        let Some(layers) = self.layers.get(rank as usize) else {
            return true;
        };
        let (first, last) = (rank == 0, rank as usize + 1 == self.layers.len());
        match stage {
            Stage::Layer(layer) => layers.contains(&layer),
            Stage::First => first,
            Stage::Last => last,
            Stage::Ends => first || last,
            Stage::Every => true,
        }
    }
}
