//! Which pipeline stages a tensor is on.

use super::{Draft, ModelPart, Rule, RuleError, ShardingOptions, name, tables::Table};
use crate::ModelConfig;
use std::collections::BTreeSet;
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
    /// The layers of the model, where those of the checkpoint are compared with it.
    known: Option<u64>,
    /// Whether layers beyond those are known to predict further tokens.
    further: bool,
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
        let lacks = |what| RuleError::ConfigLacks {
            field: "num_hidden_layers",
            what,
        };
        let further = table.is_some_and(Table::has_further_layers);
        let known = match part {
            ModelPart::Target => config.num_hidden_layers.filter(|_| further || count > 1),
            ModelPart::Draft(Draft::Mtp) => Some(
                config
                    .num_hidden_layers
                    .ok_or(lacks("a draft of the layers beyond"))?,
            ),
            ModelPart::Draft(Draft::Eagle) => None,
        };
        let stages = |layers| Stages {
            layers,
            known,
            further,
            part,
        };
        if count == 1 && options.layer_partition.is_none() {
            return Ok(stages(Vec::new()));
        }
        if table.is_some_and(Table::is_replicated) && count > 1 {
            let architecture = config.architectures.join(",");
            return Err(RuleError::NoStages { architecture });
        }
        let layers = config.num_hidden_layers.ok_or(lacks("pipeline parallelism"))?;
        let partition = options.layer_partition.as_deref();
        Ok(stages(pipeline::stages(layers, count, partition)?))
    }

    /// Where a tensor belongs by its name, layer and rule.
    pub fn of(&self, tensor: &str, layer: Option<u64>, rule: Rule) -> Stage {
        const EMBEDDINGS: &[&str] = &[
            "embed_tokens",
            "tok_embeddings",
            "word_embeddings",
            "embed_in",
            "embeddings",
            "wte",
            "wpe",
        ];
        match layer {
            Some(layer) => Stage::Layer(layer),
            None if rule == Rule::Embedding || EMBEDDINGS.contains(&name::module(tensor)) => Stage::First,
            None if super::held::is_buffer(tensor) => Stage::Every,
            None => Stage::Last,
        }
    }

    /// Whether a tensor of this layer, or of none, is of the part of the checkpoint that is meant.
    pub fn is_meant(&self, tensor: &str, layer: Option<u64>) -> Result<bool, RuleError> {
        let beyond = layer.zip(self.known).filter(|(layer, layers)| layer >= layers);
        match (self.part, beyond) {
            (ModelPart::Draft(Draft::Mtp), beyond) => Ok(beyond.is_some()),
            (_, None) => Ok(true),
            (_, Some(_)) if self.further => Ok(false),
            (_, Some((layer, layers))) => Err(RuleError::LayerBeyond {
                tensor: tensor.to_owned(),
                layer,
                layers,
            }),
        }
    }

    /// Checks that every stage has its layers.
    pub fn check(&self, present: impl IntoIterator<Item = u64>) -> Result<(), RuleError> {
        let present: BTreeSet<u64> = present.into_iter().collect();
        let layers = self.layers.last().map_or(0, |last| last.end);
        match (0..layers).find(|layer| !present.contains(layer)) {
            None => Ok(()),
            Some(layer) => Err(RuleError::LayerMissing { layer, layers }),
        }
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
