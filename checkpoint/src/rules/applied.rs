//! The rules that count for a checkpoint, and what they make of its tensors.

use super::name::{self, Expert};
use super::patterns::Patterns;
use super::quantization::Quantization;
use super::split::{Split, Splitter, Ways};
use super::stage::{Stage, Stages};
use super::tables::{EAGLE, TABLES, Table, Vllm};
use super::{
    Draft, FloatDtype, Layout, ModelPart, Rule, RuleError, RuledTensor, ShardingOptions, TpPlan, held, layout,
};
use crate::{Checkpoint, ModelConfig, StoredTensor};
use std::collections::{BTreeMap, BTreeSet};
use weightd_core::plan::experts::ExpertPlacement;

/// How many tensors an error lists by name.
const LISTED: usize = 5;

/// More than this many experts of a layer are none, but a dimension of another meaning.
pub(super) const MOST_EXPERTS: u64 = 1 << 16;

/// The rules that count for a checkpoint.
pub(super) struct Rules<'o> {
    /// What is known of its architecture.
    pub table: Option<&'static Table>,
    options: &'o ShardingOptions,
    config: &'o ModelConfig,
    quantization: Option<Quantization<'o>>,
    /// The ranks that share what belongs to no expert.
    dense: Ways,
    /// Those that share an expert, unless it is whole.
    sliced: Ways,
    /// Something is split, so that every tensor needs a rule.
    splits: bool,
    /// Those of the user's plan, else of the table, with their rules.
    patterns: Patterns<'o>,
    by_pattern: Vec<Rule>,
}

impl<'o> Rules<'o> {
    pub fn of(checkpoint: &'o Checkpoint, options: &'o ShardingOptions) -> Result<Rules<'o>, RuleError> {
        let config = checkpoint.config();
        let parallel = &options.parallel;
        let table = match options.part {
            ModelPart::Draft(Draft::Eagle) => Some(&EAGLE),
            _ => table(config),
        };
        let experts = options.experts.is_some() && parallel.tensor * parallel.data > 1;
        let vllm = options.layout == Layout::Vllm;
        let splits = parallel.tensor > 1 || parallel.pipeline > 1 || experts || vllm;
        let casts = options.dtype != FloatDtype::Auto;
        let quantization = match Quantization::of(checkpoint, splits, casts)? {
            Some(found) if vllm => return Err(found.refuse_layout(checkpoint)),
            found => found,
        };
        if vllm && options.tp_plan.is_some() {
            return Err(RuleError::PlanWithLayout);
        }
        if vllm && options.part != ModelPart::Target {
            return Err(RuleError::DraftLayout);
        }
        if vllm && table.is_none() {
            return Err(no_layout(config));
        }
        if splits && table.is_none() && options.tp_plan.is_none() {
            return Err(unknown_architecture(checkpoint));
        }
        // vLLM slices experts over all tensor parallel ranks, whichever replica they are of.
        let sliced = match vllm {
            true => Ways::tensor_and_data(parallel),
            false => Ways::tensor(parallel),
        };
        let (patterns, by_pattern) = match (&options.tp_plan, table) {
            (Some(plan), _) => (
                Patterns::new(plan.patterns(), TpPlan::covers),
                plan.rules().collect(),
            ),
            (None, table) => {
                let covers = match options.part {
                    // Some have the base model's names, and some the whole model's.
                    ModelPart::Draft(Draft::Eagle) => TpPlan::covers,
                    _ => name::covers,
                };
                let rules = || table.into_iter().flat_map(|table| table.rules).copied().flatten();
                let patterns = Patterns::new(rules().map(|(pattern, _)| *pattern), covers);
                (patterns, rules().map(|(_, rule)| *rule).collect())
            }
        };
        Ok(Rules {
            table,
            options,
            quantization,
            config,
            dense: Ways::tensor(parallel),
            sliced,
            splits,
            patterns,
            by_pattern,
        })
    }

    fn rule(&mut self, tensor: &str) -> Option<Rule> {
        if !self.splits {
            return Some(Rule::Replicated);
        }
        match self.patterns.first(tensor) {
            Some(number) => Some(self.by_pattern[number]),
            // What a plan does not name is whole.
            None => self.options.tp_plan.is_some().then_some(Rule::Replicated),
        }
    }

    /// The rule for what no pattern covers and is one number for a whole module, as the scales of a
    /// quantized KV cache are.
    fn rule_of_scale(&self, stored: &StoredTensor) -> Option<Rule> {
        let is_one = stored.shape.iter().all(|&size| size == 1);
        (self.quantization.is_some() && is_one).then_some(Rule::Replicated)
    }

    fn splitter(&self, ways: Ways) -> Splitter<'_> {
        Splitter {
            config: self.config,
            quantization: self.quantization.as_ref(),
            ways,
        }
    }

    /// Every tensor that is meant, with how it is split, in the order in which they are stored; and how many
    /// are not.
    pub fn apply<'a>(
        &mut self,
        checkpoint: &'a Checkpoint,
        stages: &Stages,
    ) -> Result<(Vec<RuledTensor<'a>>, usize), RuleError> {
        let mut tensors = Vec::with_capacity(checkpoint.tensors().len());
        let mut uncovered = Vec::new();
        let mut left_out = 0;
        for (name, stored) in checkpoint.tensors() {
            let layer = name::layer(name);
            if !stages.is_meant(name, layer)? {
                left_out += 1;
                continue;
            }
            match self.rule(name).or_else(|| self.rule_of_scale(stored)) {
                Some(rule) => tensors.push(self.ruled(rule, name, layer, stored, stages)?),
                None => uncovered.push(name.as_str()),
            }
        }
        self.check_plan(checkpoint)?;
        self.check_coverage(uncovered)?;
        if tensors.is_empty() && self.options.part == ModelPart::Draft(Draft::Mtp) {
            let layers = self.config.num_hidden_layers.unwrap_or(0);
            return Err(RuleError::NoFurtherLayers { layers });
        }
        stages.check(tensors.iter().filter_map(|tensor| tensor.layer))?;
        self.check_experts(&tensors)?;
        tensors.sort_by_cached_key(|tensor| (tensor.stored.file, tensor.stored.offset, tensor.stored.bytes));
        Ok((tensors, left_out))
    }

    fn ruled<'a>(
        &self,
        rule: Rule,
        name: &'a str,
        layer: Option<u64>,
        stored: &'a StoredTensor,
        stages: &Stages,
    ) -> Result<RuledTensor<'a>, RuleError> {
        let expert = name::expert(name);
        let is_padded = matches!(rule, Rule::Embedding | Rule::Head) && self.options.layout == Layout::Vllm;
        let padded = is_padded.then(|| layout::padded_vocabulary(stored));
        let split = match (expert, padded) {
            _ if self.is_sequence_parallel(name) => Split::WHOLE,
            (None, Some(rows)) => self.splitter(self.dense).padded(name, stored, rows)?,
            (None, None) => self.splitter(self.dense).split(rule, name, stored)?,
            (Some(_), _) if self.options.experts.is_some() => Split::WHOLE,
            (Some(_), _) => self.splitter(self.sliced).split(rule, name, stored)?,
        };
        let stage = match self.vllm_has(name, |vllm| vllm.every_stage) {
            true => Stage::Every,
            false => stages.of(name, layer, rule),
        };
        let quantization = self.quantization.as_ref();
        let quantized_apart = quantization.is_none_or(|found| found.may_be_cast(name, stored));
        let castable = quantized_apart && !held::is_buffer(name);
        Ok(RuledTensor {
            name,
            stored,
            split,
            layer,
            expert,
            stage,
            padded,
            castable,
        })
    }

    /// Whether vLLM splits tokens over the ranks here, and not the weights.
    fn is_sequence_parallel(&self, name: &str) -> bool {
        let ShardingOptions {
            parallel, experts, ..
        } = self.options;
        let spread = experts.is_some() && parallel.tensor > 1 && parallel.data > 1;
        spread && self.vllm_has(name, |vllm| vllm.sequence_parallel)
    }

    /// Whether a name is covered by patterns that count in vLLM's layout.
    fn vllm_has(&self, name: &str, patterns: impl Fn(&Vllm) -> &'static [&'static str]) -> bool {
        let vllm = self.table.and_then(|table| table.vllm);
        let vllm = vllm.filter(|_| self.options.layout == Layout::Vllm);
        vllm.is_some_and(|vllm| patterns(vllm).iter().any(|pattern| name::covers(pattern, name)))
    }

    /// Checks that every pattern of the user's plan that splits covers something.
    fn check_plan(&self, checkpoint: &Checkpoint) -> Result<(), RuleError> {
        let Some(plan) = self.options.tp_plan.as_ref().filter(|_| self.splits) else {
            return Ok(());
        };
        let covers = |pattern: &&str| {
            checkpoint
                .tensors()
                .keys()
                .any(|name| TpPlan::covers(pattern, name))
        };
        let unused = plan.splitting().filter(|pattern| !covers(pattern));
        let patterns: Vec<String> = unused.map(str::to_owned).take(LISTED).collect();
        if patterns.is_empty() {
            return Ok(());
        }
        let (names, _) = generic_names(checkpoint);
        Err(RuleError::UnusedPatterns { patterns, names })
    }

    fn check_coverage(&self, mut uncovered: Vec<&str>) -> Result<(), RuleError> {
        if uncovered.is_empty() {
            return Ok(());
        }
        let more = uncovered.len().saturating_sub(LISTED);
        uncovered.truncate(LISTED);
        let tensors = uncovered.into_iter().map(str::to_owned).collect();
        Err(match self.options.part {
            ModelPart::Target => RuleError::Uncovered {
                architecture: self.config.architectures.join(","),
                tensors,
                more,
            },
            ModelPart::Draft(_) => RuleError::UncoveredDraft { tensors, more },
        })
    }

    /// Checks that layers have the experts that the configuration states, and ranks enough of them.
    fn check_experts(&self, tensors: &[RuledTensor<'_>]) -> Result<(), RuleError> {
        let Some(placement) = self.options.experts.filter(|_| self.splits) else {
            return Ok(());
        };
        if self.options.layout == Layout::Vllm
            && placement == ExpertPlacement::RoundRobin
            && self.config.expert_groups.unwrap_or(1) <= 1
        {
            return Err(RuleError::UngroupedExperts);
        }
        let ranks = Ways::tensor_and_data(&self.options.parallel).count();
        let mut none = true;
        for (experts, count, tensor) in experts_of_layers(tensors) {
            none = false;
            let stated = self.config.num_experts.unwrap_or(experts);
            if (experts, count) != (stated, stated) {
                let tensor = tensor.to_owned();
                return Err(RuleError::Experts {
                    tensor,
                    found: count,
                    last: experts.saturating_sub(1),
                    stated,
                });
            }
            if experts > MOST_EXPERTS {
                let tensor = tensor.to_owned();
                return Err(RuleError::TooManyExperts { tensor, experts });
            }
            if experts < ranks {
                return Err(RuleError::TooFewExperts { experts, ranks });
            }
        }
        // A dense draft beside a target with experts is none the worse.
        match none && self.options.part == ModelPart::Target {
            true => Err(RuleError::NoExperts),
            false => Ok(()),
        }
    }
}

/// For each kind of expert tensor in each layer: the number of the last expert and one, how many
/// there are, and one's name.
fn experts_of_layers<'a>(tensors: &'a [RuledTensor<'_>]) -> impl Iterator<Item = (u64, u64, &'a str)> {
    let mut found = BTreeMap::new();
    for tensor in tensors {
        let (end, count, kind) = match tensor.expert {
            None => continue,
            Some(Expert::One(number)) => (number.saturating_add(1), 1, name::without_expert(tensor.name)),
            Some(Expert::Stacked) => {
                let experts = tensor.stored.shape.first().copied().unwrap_or(0);
                (experts, experts, tensor.name.to_owned())
            }
        };
        let (most, sum, _) = found.entry(kind).or_insert((0, 0, tensor.name));
        *most = end.max(*most);
        *sum += count;
    }
    found.into_values()
}

pub(super) fn no_layout(config: &ModelConfig) -> RuleError {
    RuleError::NoLayout {
        architecture: config.architectures.join(","),
        known: known(|table| table.vllm.is_some()),
    }
}

fn unknown_architecture(checkpoint: &Checkpoint) -> RuleError {
    let (names, more) = generic_names(checkpoint);
    let module = |name: &String| name.rsplit_once('.').map(|(module, _)| module.to_owned());
    RuleError::UnknownArchitecture {
        architecture: checkpoint.config().architectures.join(","),
        example: names
            .iter()
            .find_map(module)
            .unwrap_or_else(|| "model.layers.*.mlp.up_proj".to_owned()),
        tensors: names,
        more,
        known: known(|_| true),
    }
}

/// Some of the checkpoint's names with `*` for numbers, those of matrices where there are any, and how many more there
/// are.
fn generic_names(checkpoint: &Checkpoint) -> (Vec<String>, usize) {
    let of_dimensions = |least: usize| -> BTreeSet<String> {
        let tensors = checkpoint.tensors().iter();
        let tensors = tensors.filter(|(_, stored)| stored.shape.len() >= least);
        tensors.map(|(name, _)| name::generic(name)).collect()
    };
    let mut names = of_dimensions(2);
    if names.is_empty() {
        names = of_dimensions(0);
    }
    let more = names.len().saturating_sub(LISTED);
    (names.into_iter().take(LISTED).collect(), more)
}

fn known(with: impl Fn(&&Table) -> bool) -> String {
    let tables = TABLES.iter().filter(with);
    tables
        .flat_map(|table| table.architectures)
        .copied()
        .collect::<Vec<_>>()
        .join(", ")
}

fn table(config: &ModelConfig) -> Option<&'static Table> {
    match config.architectures.as_slice() {
        [one] => TABLES
            .iter()
            .find(|table| table.architectures.contains(&one.as_str())),
        _ => None,
    }
}
