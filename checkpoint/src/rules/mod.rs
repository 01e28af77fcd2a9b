//! Sharding rules: which part of which stored tensor a rank holds, and by which names.
//!
//! Sharding is data. A table lists, for each architecture, name patterns and what becomes of the
//! tensors they cover, in the terms of the tensor parallel plans of Hugging Face transformers
//! ([`Rule`]); a user can pass such a plan instead ([`TpPlan`]). Which pipeline stage a tensor is on,
//! and which expert it belongs to, follows from its name. A [`Layout`] says how the parts are put
//! together and named.
//!
//! With one rank and the checkpoint's layout every tensor is whole and no table is asked, so that any
//! architecture is served as it is stored.

mod applied;
mod error;
mod held;
mod layout;
mod methods;
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
pub use tp_plan::{TpPlan, TpPlanError, TpPlanFault};

use crate::{Checkpoint, Shard, StoredTensor};
use applied::Rules;
use layout::Slot;
use name::Expert;
use rule::Rule;
use split::Split;
use stage::{Stage, Stages};
use tied::Tied;
use weightd_core::plan::experts::{LocalExperts, local_experts};

/// The number of these rules. Whoever changes what any rank holds of any checkpoint adds one, so that
/// weights that were split by other rules never pass for the same.
pub(crate) const RULES: u32 = 1;

/// The rules of a checkpoint, applied: what every rank holds. Everything was checked, so giving a
/// rank its part cannot fail.
#[derive(Debug)]
pub struct Sharding<'a> {
    checkpoint: &'a Checkpoint,
    tensors: Vec<RuledTensor<'a>>,
    slots: Vec<Slot<'a>>,
    /// With the stage of the one that is stored.
    tied: Option<(Tied, Stage)>,
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
    /// checkpoint has another one: only to find that out, and after everything else was checked, both
    /// are read. Nothing else is.
    ///
    /// # Errors
    /// Whatever cannot be split, held or named as asked; see [`RuleError`].
    pub fn new(checkpoint: &'a Checkpoint, options: &ShardingOptions) -> Result<Sharding<'a>, RuleError> {
        let mut rules = Rules::of(checkpoint, options)?;
        let stages = Stages::new(checkpoint.config(), rules.table, options)?;
        let ruled = rules.apply(checkpoint, &stages);
        let (mut tensors, left_out) =
            ruled.map_err(|error| with_size_that_works(error, checkpoint, options))?;
        // What a draft lacks is the target's.
        let is_target = options.part == ModelPart::Target;
        let tied = tied::by_config(checkpoint, rules.table).filter(|_| is_target);
        let tied = match tied {
            Some(tied) if tied::is_one(checkpoint, &tied)? => Some(tie(&mut tensors, tied)),
            _ => None,
        };
        let slots = layout::slots(&tensors, checkpoint.config(), rules.table, options)?;
        Ok(Sharding {
            checkpoint,
            tensors,
            slots,
            tied,
            stages,
            options: options.clone(),
            left_out,
        })
    }

    /// The checkpoint that is split.
    pub fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// What a rank holds, in the order in which it is stored.
    ///
    /// # Panics
    /// When the rank is outside the world.
    pub fn held(&self, rank: Rank) -> impl Iterator<Item = Held<'_>> {
        assert!(
            self.options.has(rank),
            "{rank:?} is outside {:?}",
            self.options.parallel
        );
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
            .filter(move |(_, stage)| self.stages.has(*stage, rank.pp));
        here.map(|(tied, _)| (tied.alias, tied.of))
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
            && let Some(&experts) = tensor.stored.shape.first()
            && let Some(local) = self.local_experts(experts, rank)
        {
            return split::stacked_experts(&tensor.stored.shape, &local);
        }
        tensor.split.shard(tensor.stored, rank)
    }
}

/// Takes the alias out of the tensors, and puts what it stands for where both belong.
fn tie(tensors: &mut Vec<RuledTensor<'_>>, tied: Tied) -> (Tied, Stage) {
    tensors.retain(|tensor| tensor.name != tied.alias);
    let mut stage = Stage::Ends;
    if let Some(of) = tensors.iter_mut().find(|tensor| tensor.name == tied.of) {
        // On every stage already, perhaps.
        if of.stage != Stage::Every {
            of.stage = Stage::Ends;
        }
        stage = of.stage;
    }
    (tied, stage)
}

/// Puts into the error the largest smaller size that cuts nothing, of this tensor or another.
fn with_size_that_works(
    mut error: RuleError,
    checkpoint: &Checkpoint,
    options: &ShardingOptions,
) -> RuleError {
    if let RuleError::CutsUnit { ranks, .. } = &mut error {
        let works = |tensor: &u32| {
            let mut smaller = options.clone();
            smaller.parallel.tensor = *tensor;
            let stages = |rules: &Rules<'_>| Stages::new(checkpoint.config(), rules.table, &smaller);
            let applied = Rules::of(checkpoint, &smaller).and_then(|mut rules| {
                let stages = stages(&rules)?;
                rules.apply(checkpoint, &stages).map(drop)
            });
            applied.is_ok()
        };
        let found = (1..options.parallel.tensor).rev().find(works);
        *ranks = found.map_or(*ranks, u64::from);
    }
    error
}
