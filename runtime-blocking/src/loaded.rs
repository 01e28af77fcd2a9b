//! How an engine's load ends.

use crate::keeper::{Keeper, Lease};
use crate::line::advised;
use crate::loading::{Fetch, Timing};
use std::error::Error;
use std::io;
use weightd_core::content::Generation;
use weightd_core::machine::AttachError;

/// An engine's model, and the path that its weights took.
#[derive(Debug)]
pub enum Loaded<M> {
    /// The weights are the daemon's memory, mapped read-only.
    Mapped {
        /// What the engine built.
        model: M,
        /// What is mapped.
        generation: Generation,
        /// Keep it for as long as the model. Absent where the daemon gave none, since too many are open, or this
        /// process cannot keep it; the log says which.
        lease: Option<Lease>,
        /// What it took.
        timing: Timing,
    },
    /// The weights were cloned into the engine's own memory.
    Copied {
        /// What the engine built.
        model: M,
        /// What was cloned.
        generation: Generation,
        /// Whether the daemon said that it let go of its own.
        released: bool,
        /// What it took, without the copy.
        timing: Timing,
    },
    /// The cache could not serve.
    LoadedFromDisk {
        /// What the engine loaded itself.
        model: M,
        /// Why.
        because: AttachError,
    },
}

impl<M> Loaded<M> {
    /// The model; a lease ends.
    pub fn into_model(self) -> M {
        match self {
            Loaded::Mapped { model, .. }
            | Loaded::Copied { model, .. }
            | Loaded::LoadedFromDisk { model, .. } => model,
        }
    }

    /// The model, and the hold on what it is made of, where there is one.
    pub fn into_parts(self) -> (M, Option<Lease>) {
        match self {
            Loaded::Mapped { model, lease, .. } => (model, lease),
            Loaded::Copied { model, .. } | Loaded::LoadedFromDisk { model, .. } => (model, None),
        }
    }

    /// The model.
    pub fn model(&self) -> &M {
        match self {
            Loaded::Mapped { model, .. }
            | Loaded::Copied { model, .. }
            | Loaded::LoadedFromDisk { model, .. } => model,
        }
    }

    /// What of the cache it is.
    pub fn generation(&self) -> Option<Generation> {
        match self {
            Loaded::Mapped { generation, .. } | Loaded::Copied { generation, .. } => Some(*generation),
            Loaded::LoadedFromDisk { .. } => None,
        }
    }

    /// The hold on what is mapped, where there is one.
    pub fn lease(&self) -> Option<&Lease> {
        match self {
            Loaded::Mapped { lease, .. } => lease.as_ref(),
            Loaded::Copied { .. } | Loaded::LoadedFromDisk { .. } => None,
        }
    }

    /// What the cache took.
    pub fn timing(&self) -> Option<Timing> {
        match self {
            Loaded::Mapped { timing, .. } | Loaded::Copied { timing, .. } => Some(*timing),
            Loaded::LoadedFromDisk { .. } => None,
        }
    }

    /// Why the cache could not serve.
    pub fn because(&self) -> Option<&AttachError> {
        match self {
            Loaded::LoadedFromDisk { because, .. } => Some(because),
            Loaded::Mapped { .. } | Loaded::Copied { .. } => None,
        }
    }
}

/// Why there is no model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The cache cannot serve, and there is nothing to fall back on.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The cache cannot serve, and the engine's own loader failed too.
    #[error("loading from disk failed: {source}; that was tried since the cache could not serve: {because}")]
    Disk {
        /// Why the cache could not serve.
        because: AttachError,
        /// What the engine's loader said.
        source: Box<dyn Error + Send + Sync>,
    },
}

impl From<io::Error> for LoadError {
    /// This process cannot wait, for example since it has no descriptor left.
    fn from(error: io::Error) -> LoadError {
        let why = advised(&error);
        LoadError::Attach(AttachError::Local { why })
    }
}

/// What came of asking the cache.
#[derive(Debug)]
pub enum Fetched<M> {
    /// A model of its weights; none, where the engine has what the daemon serves.
    Loaded(Option<Loaded<M>>),
    /// The engine has to load from disk.
    LoadFromDisk {
        /// Why.
        because: AttachError,
    },
}

impl<M> Fetched<M> {
    /// What to do where this process could not even ask.
    pub(crate) fn or_local(
        result: Result<Fetched<M>, LoadError>,
        fallback: bool,
    ) -> Result<Fetched<M>, LoadError> {
        match result {
            Err(LoadError::Attach(because @ AttachError::Local { .. })) if fallback => {
                Ok(Fetched::LoadFromDisk { because })
            }
            result => result,
        }
    }

    /// A model that was built of the cache's weights. `keep` has the runtime keep the lease up.
    pub fn built(model: M, fetch: Fetch, keep: impl FnOnce(Keeper) -> Lease) -> Fetched<M> {
        Fetched::Loaded(Some(match fetch {
            Fetch::Mapped {
                generation,
                keeper,
                timing,
            } => Loaded::Mapped {
                model,
                generation,
                lease: keeper.map(|keeper| keep(*keeper)),
                timing,
            },
            Fetch::Copied {
                generation,
                released,
                timing,
            } => Loaded::Copied {
                model,
                generation,
                released,
                timing,
            },
        }))
    }

    /// For a load that may go to disk. It blocks there.
    ///
    /// # Errors
    /// What `from_disk` says.
    pub fn or_from_disk<D: Into<Box<dyn Error + Send + Sync>>>(
        self,
        from_disk: impl FnOnce(&AttachError) -> Result<M, D>,
    ) -> Result<Loaded<M>, LoadError> {
        let because = match self {
            Fetched::Loaded(loaded) => return Ok(loaded.expect("only a reload finds what the engine has")),
            Fetched::LoadFromDisk { because } => because,
        };
        tracing::warn!("loading from disk: {because}");
        match from_disk(&because) {
            Ok(model) => Ok(Loaded::LoadedFromDisk { model, because }),
            Err(error) => Err(LoadError::Disk {
                because,
                source: error.into(),
            }),
        }
    }

    /// For a load that may not.
    ///
    /// # Errors
    /// Why the cache could not serve.
    pub fn or_error(self) -> Result<Option<Loaded<M>>, LoadError> {
        match self {
            Fetched::Loaded(loaded) => Ok(loaded),
            Fetched::LoadFromDisk { because } => Err(because.into()),
        }
    }
}
