//! Sharding rules: which part of which stored tensor a rank holds, and by which names.
//!
//! Sharding is data. A table lists, for each architecture, name patterns and what becomes of the
//! tensors they cover, in the terms of the tensor parallel plans of Hugging Face transformers
//! ([`Rule`]); a user can pass such a plan instead ([`TpPlan`]). Which pipeline stage a tensor is on,
//! and which expert it belongs to, follows from its name. A [`Layout`] says how the parts are put
//! together and named.
//!
//! With one rank and the checkpoint's layout every tensor is whole and no table is asked, so that any
//! architecture, quantized or not, is served as it is stored.

mod error;
mod held;
mod layout;
mod name;
mod options;
mod patterns;
mod quantization;
mod rule;
mod split;
mod stage;
mod tables;
mod tied;
mod tp_plan;

pub use error::RuleError;
pub use held::{Held, HeldPart};
pub use options::{Draft, FloatDtype, Layout, ModelPart, Rank, ShardingOptions, UnknownName};
pub use rule::Rule;
pub use tp_plan::{TpPlan, TpPlanError, TpPlanFault};

use crate::{Checkpoint, ModelConfig, Shard, StoredTensor};
use layout::Slot;
use name::Expert;
use patterns::Patterns;
use quantization::Quantization;
use split::{Split, Splitter, Ways};
use stage::{Stage, Stages};
use std::collections::{BTreeMap, BTreeSet};
use tables::{EAGLE, TABLES, Table, Vllm};
use tied::Tied;
use weightd_core::plan::experts::{ExpertPlacement, LocalExperts, local_experts};

/// How many tensors an error lists by name.
const LISTED: usize = 5;

/// The rules of a checkpoint, applied: what every rank holds. Everything was checked, so giving a
/// rank its part cannot fail.
#[derive(Debug)]
pub struct Sharding<'a> {
    tensors: Vec<RuledTensor<'a>>,
    slots: Vec<Slot<'a>>,
    tied: Option<Tied>,
    stages: Stages,
    options: ShardingOptions,
    left_out: usize,
}

/// A stored tensor, and how it is split.
#[derive(Debug)]
struct RuledTensor<'a> {
    name: &'a str,
    stored: &'a StoredTensor,
    split: Split,
    layer: Option<u64>,
    expert: Option<Expert>,
    stage: Stage,
    /// The rows of all ranks together, of a vocabulary that is padded.
    padded: Option<u64>,
    /// Whether a type that is asked for is for this tensor too.
    castable: bool,
}

impl RuledTensor<'_> {
    /// Name, type and shape, for errors.
    fn describe(&self) -> String {
        format!(
            "{} ({} {:?})",
            self.name,
            self.stored.dtype.name(),
            self.stored.shape
        )
    }
}

impl<'a> Sharding<'a> {
    /// Applies the rules to all tensors of `checkpoint`, and checks them for every rank of the
    /// world.
    ///
    /// Where the configuration ties the head to the embedding, the head is an alias, unless the
    /// checkpoint has another one: only to find that out, both are read. Nothing else is.
    pub fn new(checkpoint: &'a Checkpoint, options: &ShardingOptions) -> Result<Sharding<'a>, RuleError> {
        let config = checkpoint.config();
        let mut rules = Rules::of(checkpoint, options)?;
        let tied = match options.part {
            ModelPart::Target => tied::tied(checkpoint, rules.table)?,
            // What a draft lacks is the target's.
            ModelPart::Draft(_) => None,
        };
        let stages = Stages::new(config, rules.table, options)?;
        let mut tensors = Vec::with_capacity(checkpoint.tensors().len());
        let mut uncovered = Vec::new();
        let mut left_out = 0;
        for (name, stored) in checkpoint.tensors() {
            if tied.as_ref().is_some_and(|tied| tied.alias == name) {
                continue;
            }
            let layer = name::layer(name);
            if !stages.is_meant(layer) {
                left_out += 1;
                continue;
            }
            match rules.rule(name).or_else(|| rules.rule_of_scale(stored)) {
                Some(rule) => tensors.push(rules.ruled(rule, name, layer, stored, &stages, tied.as_ref())?),
                None => uncovered.push(name.as_str()),
            }
        }
        rules.check_coverage(checkpoint, uncovered)?;
        if tensors.is_empty() && options.part == ModelPart::Draft(Draft::Mtp) {
            let layers = config.num_hidden_layers.unwrap_or(0);
            return Err(RuleError::NoFurtherLayers { layers });
        }
        rules.check_experts(&tensors)?;
        tensors.sort_by_cached_key(|tensor| (tensor.stored.file, tensor.stored.offset, tensor.stored.bytes));
        let slots = layout::slots(&tensors, config, rules.table, options)?;
        let options = options.clone();
        Ok(Sharding {
            tensors,
            slots,
            tied,
            stages,
            options,
            left_out,
        })
    }

    /// What a rank holds, in the order in which it is stored.
    pub fn held(&self, rank: Rank) -> impl Iterator<Item = Held<'_>> {
        let here = move |slot: &&Slot<'_>| self.stages.has(slot.stage, rank.pp);
        self.slots
            .iter()
            .filter(here)
            .filter_map(move |slot| self.hold(slot, rank))
    }

    /// Further names that a rank has, each with the tensor that it stands for.
    pub fn aliases(&self, rank: Rank) -> impl Iterator<Item = (&'static str, &'static str)> {
        let here = self
            .tied
            .iter()
            .filter(move |_| self.stages.has(Stage::Ends, rank.pp));
        here.map(|tied| (tied.alias, tied.of))
    }

    /// Boolean attributes of the model: of a draft, whether it has an embedding and a head of its own.
    pub fn attrs(&self) -> impl Iterator<Item = (&'static str, bool)> {
        let has = |module: &str| {
            self.tensors
                .iter()
                .any(|tensor| name::module(tensor.name) == module)
        };
        let (embedding, head) = (has("embed_tokens"), has("lm_head") || has("head"));
        let attrs = [("has_own_embed_tokens", embedding), ("has_own_lm_head", head)];
        let is_draft = self.options.part != ModelPart::Target;
        attrs.into_iter().filter(move |_| is_draft)
    }

    /// How many of the checkpoint's tensors belong to layers beyond the model's own, those that
    /// predict further tokens.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// The experts that a rank holds whole, of so many; none without expert parallelism.
    fn local_experts(&self, experts: u64, rank: Rank) -> Option<LocalExperts> {
        let placement = self.options.experts?;
        let tp = self.options.parallel.tensor;
        let (size, number) = (tp * self.options.parallel.data, rank.dp * tp + rank.tp);
        Some(local_experts(experts, size, number, placement).expect("the rank is one of the world"))
    }

    /// Whether a rank is the first of those that share slices of experts; or none do.
    fn has_slices_first(&self, rank: Rank) -> bool {
        self.options.experts.is_some() || (rank.dp, rank.tp) == (0, 0)
    }

    /// The part of a stored tensor that a rank of the right stage holds.
    fn shard(&self, tensor: &RuledTensor<'_>, rank: Rank) -> Shard {
        if tensor.expert == Some(Expert::Stacked)
            && let Some(local) = self.local_experts(tensor.stored.shape[0], rank)
        {
            return split::stacked_experts(&tensor.stored.shape, &local);
        }
        tensor.split.shard(tensor.stored, rank)
    }
}

/// The rules that count for a checkpoint.
struct Rules<'o> {
    /// What is known of its architecture.
    table: Option<&'static Table>,
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
    fn of(checkpoint: &'o Checkpoint, options: &'o ShardingOptions) -> Result<Rules<'o>, RuleError> {
        let config = checkpoint.config();
        let parallel = &options.parallel;
        let table = match options.part {
            ModelPart::Draft(Draft::Eagle) => Some(&EAGLE),
            _ => table(config),
        };
        let experts = options.experts.is_some() && parallel.tensor * parallel.data > 1;
        let vllm = options.layout == Layout::Vllm;
        let splits = parallel.tensor > 1 || parallel.pipeline > 1 || experts || vllm;
        let quantization = match Quantization::of(checkpoint, splits)? {
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

    fn ruled<'a>(
        &self,
        rule: Rule,
        name: &'a str,
        layer: Option<u64>,
        stored: &'a StoredTensor,
        stages: &Stages,
        tied: Option<&Tied>,
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
            false => stages.of(name, layer, rule, tied.is_some_and(|tied| tied.of == name)),
        };
        let quantization = self.quantization.as_ref();
        let castable = quantization.is_none_or(|found| found.may_be_cast(name, stored));
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

    fn check_coverage(&mut self, checkpoint: &Checkpoint, mut uncovered: Vec<&str>) -> Result<(), RuleError> {
        if let Some(plan) = self.options.tp_plan.as_ref().filter(|_| self.splits) {
            let used: Vec<usize> = checkpoint
                .tensors()
                .keys()
                .filter_map(|name| self.patterns.first(name))
                .collect();
            let patterns: Vec<String> = plan.unused(&used).map(str::to_owned).take(LISTED).collect();
            if !patterns.is_empty() {
                let (names, _) = generic_names(checkpoint);
                return Err(RuleError::UnusedPatterns { patterns, names });
            }
        }
        if uncovered.is_empty() {
            return Ok(());
        }
        let more = uncovered.len().saturating_sub(LISTED);
        uncovered.truncate(LISTED);
        Err(RuleError::Uncovered {
            architecture: checkpoint.config().architectures.join(","),
            tensors: uncovered.into_iter().map(str::to_owned).collect(),
            more,
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
                    stated: stated.max(experts),
                });
            }
            if experts < ranks {
                return Err(RuleError::TooFewExperts { experts, ranks });
            }
        }
        match none {
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

fn no_layout(config: &ModelConfig) -> RuleError {
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

/// Some of the checkpoint's names with `*` for numbers, those of matrices, and how many more there are.
fn generic_names(checkpoint: &Checkpoint) -> (Vec<String>, usize) {
    let matrices = checkpoint
        .tensors()
        .iter()
        .filter(|(_, stored)| stored.shape.len() > 1);
    let names: BTreeSet<String> = matrices.map(|(name, _)| name::generic(name)).collect();
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
