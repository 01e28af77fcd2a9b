//! The models that a node serves: the target and, with speculative decoding, its draft.

use crate::args::ModelArgs;
use crate::error::CliError;
use crate::node::{self, LocalRank};
use crate::speculative::{self, Speculative};
use std::path::{Path, PathBuf};
use tracing::info;
use weightd_checkpoint::{Checkpoint, HubCache, KeyOptions, NodePlan, Rank, Sharding};
use weightd_core::content::{CheckpointId, Key, Role};
use weightd_core::wire::message::DaemonId;

/// One model, and who on this node holds it.
#[derive(Clone, Debug)]
pub struct Model {
    pub role: Role,
    /// The directory of its checkpoint.
    pub path: PathBuf,
    pub keys: KeyOptions,
    /// This node's ranks that hold it, each as a daemon of its own.
    pub members: Vec<(DaemonId, LocalRank)>,
}

/// The same with directories in the place of repository ids: the snapshots that the cache holds now. Loaders
/// are told this, so that they take the same however often a branch moves.
pub fn located(args: &ModelArgs) -> Result<ModelArgs, CliError> {
    let mut located = args.clone();
    let cache = args.weights.download_dir.as_deref();
    let find = |model: &Path, revision: &str| directory(model, revision, cache);
    located.model = find(&args.model, &args.weights.revision)?;
    if let Some(config) = &mut located.weights.speculative_config {
        *config = speculative::located(config, find)?;
    }
    Ok(located)
}

/// The directory that a model is in: itself, or the snapshot of a repository in the cache.
pub fn directory(model: &Path, revision: &str, cache: Option<&Path>) -> Result<PathBuf, CliError> {
    let cache = cache.map_or_else(HubCache::from_env, HubCache::at);
    let found = cache.find(model, revision).map_err(CliError::failure)?;
    if let Some((repository, revision)) = &found.repository {
        info!("{repository} at {revision} is {}", found.dir.display());
    }
    Ok(found.dir)
}

/// What is said of speculative decoding.
pub fn speculative(args: &ModelArgs) -> Result<Option<Speculative>, CliError> {
    let tp = args.sharding.parallel.tensor_parallel_size;
    let config = args.weights.speculative_config.as_deref();
    config.map(|config| Speculative::parse(config, tp)).transpose()
}

/// The models of this node. Daemons count the ranks of the target, then those of the draft.
pub fn models(args: &ModelArgs, ranks: &[LocalRank]) -> Result<Vec<Model>, CliError> {
    let keys = node::key_options(args, &node::sharding(&args.sharding)?);
    let speculative = speculative(args)?;
    let target = Model {
        role: Role::Target,
        path: args.model.clone(),
        keys: keys.clone(),
        members: (0..).zip(ranks.iter().copied()).collect(),
    };
    let Some(Speculative::Drafted(draft)) = speculative else {
        return Ok(vec![target]);
    };
    // Engines draft where they have the target's output, on the last stage.
    let last = keys.sharding.parallel.pipeline.saturating_sub(1);
    let ranks_of_draft = ranks
        .iter()
        .copied()
        .filter(|rank| rank.placement.pp_rank == last);
    let mut keys_of_draft = keys.of_draft(draft.kind, draft.quantization);
    if draft.model.is_some() {
        keys_of_draft.revision = draft.revision;
    }
    let draft = Model {
        role: Role::Draft,
        path: draft.model.unwrap_or_else(|| args.model.clone()),
        keys: keys_of_draft,
        members: (ranks.len() as DaemonId..).zip(ranks_of_draft).collect(),
    };
    Ok(vec![target, draft])
}

impl Model {
    /// Opens the checkpoint.
    pub fn open(&self) -> Result<Checkpoint, CliError> {
        Checkpoint::open(&self.path).map_err(|error| self.failure(error))
    }

    /// The rules of the checkpoint, applied.
    pub fn sharding<'a>(&self, checkpoint: &'a Checkpoint) -> Result<Sharding<'a>, CliError> {
        Sharding::new(checkpoint, &self.keys.sharding).map_err(|error| self.failure(error))
    }

    /// Plans what of the checkpoint goes to the members.
    pub fn plan(&self, sharding: &Sharding<'_>) -> Result<NodePlan, CliError> {
        let ranks: Vec<_> = self.members.iter().map(|(_, rank)| *rank).collect();
        node::plan(sharding, &ranks).map_err(|error| self.failure(error))
    }

    /// The key of one rank's content.
    pub fn key(
        &self,
        checkpoint: &Checkpoint,
        identity: &CheckpointId,
        rank: &LocalRank,
    ) -> Result<Key, CliError> {
        self.keys
            .key(checkpoint, identity.clone(), Rank::of(&rank.placement))
            .map_err(|error| self.failure(error))
    }

    /// The same without the members that `wanted` does not name.
    pub fn with_only(mut self, wanted: impl Fn(DaemonId) -> bool) -> Model {
        self.members.retain(|(daemon, _)| wanted(*daemon));
        self
    }

    /// An error of this model.
    pub fn failure(&self, error: impl std::fmt::Display) -> CliError {
        match self.role {
            Role::Target => CliError::failure(error),
            Role::Draft => CliError::Failure(format!("draft: {error}")),
        }
    }
}
