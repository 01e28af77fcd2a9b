//! What a launcher is told by its command line.

use crate::args::{LauncherArgs, ModelArgs, ParallelArgs};
use std::path::PathBuf;
use weightd_core::wire::message::Replace;

/// See the module.
#[derive(Clone, Debug)]
pub struct Setup {
    pub source: Source,
    pub told: LauncherArgs,
    /// The socket directory.
    pub dir: PathBuf,
    /// What its children log.
    pub log: String,
}

/// Where weights come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A loader reads them.
    Checkpoint {
        model: Box<ModelArgs>,
        /// Whether they get checksums.
        checksums: bool,
    },
    /// Clients publish them, for the ranks of this world.
    Publishers {
        parallel: Box<ParallelArgs>,
        replace: Replace,
    },
}

impl Setup {
    /// What is loaded, where anything is.
    pub fn model(&self) -> Option<&ModelArgs> {
        match &self.source {
            Source::Checkpoint { model, .. } => Some(model),
            Source::Publishers { .. } => None,
        }
    }

    /// Whether what is loaded gets checksums.
    pub fn wants_checksums(&self) -> bool {
        matches!(self.source, Source::Checkpoint { checksums: true, .. })
    }

    /// How weights are spread over ranks and nodes.
    pub fn parallel(&self) -> &ParallelArgs {
        match &self.source {
            Source::Checkpoint { model, .. } => &model.sharding.parallel,
            Source::Publishers { parallel, .. } => parallel,
        }
    }

    /// What daemons say of publications: nothing, where they take none.
    pub fn replace(&self) -> Option<Replace> {
        match &self.source {
            Source::Checkpoint { .. } => None,
            Source::Publishers { replace, .. } => Some(*replace),
        }
    }
}
