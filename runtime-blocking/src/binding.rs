//! What ties one rank of an engine to its daemon.

use crate::digest;
use crate::endpoint::Endpoint;
use crate::options::{LoaderOptions, OptionsError};
use std::fmt;
use std::sync::{Arc, OnceLock};
use thiserror::Error;
use weightd_checkpoint::{Checkpoint, CheckpointError, KeyOptions, LoadOptions, Progress, Rank};
use weightd_core::content::{Key, Role};
use weightd_core::machine::AttachOptions;
use weightd_gpu::{Device, Opened};
use weightd_socket::credentials::{OverflowUid, our_uid};
use weightd_socket::path::PathError;

/// One rank of an engine: what it loads, and where.
#[derive(Clone, Debug)]
pub struct EngineRank {
    /// The device that it runs on.
    pub device: Device,
    /// Which of several ranks on one device it is, where daemons run with `--ranks-per-device`.
    pub slot: Option<u32>,
    /// Its place in the world.
    pub rank: Rank,
    /// What the weights are of.
    pub checkpoint: Arc<Checkpoint>,
    /// How they are spread and held, and what else ties them to this engine. An engine that publishes
    /// weights after working on them names that in [`processing`](KeyOptions::processing).
    pub keys: KeyOptions,
    /// Whether the engine moves experts between ranks while it serves (EPLB), which weights that are
    /// mapped read-only cannot follow.
    pub expert_load_balancing: bool,
}

/// Why an engine cannot use the cache at all, fallback or not.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BindError {
    /// The options do not fit together.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// There can be no such socket.
    #[error(transparent)]
    Path(#[from] PathError),
    /// This process has no usable user.
    #[error(transparent)]
    Uid(#[from] OverflowUid),
    /// The device cannot be used.
    #[error("unsupported platform: {0}")]
    UnsupportedPlatform(#[from] weightd_gpu::MemoryError),
    /// The quantization that was asked for is not the checkpoint's.
    #[error("unsupported quantization: {0}")]
    UnsupportedQuantization(CheckpointError),
    /// No key can be made of checkpoint and options.
    #[error(transparent)]
    Checkpoint(CheckpointError),
    /// Experts move between ranks.
    #[error(
        "expert load balancing (EPLB) moves weights between ranks, which cached weights cannot follow: turn it off, or load without the cache"
    )]
    ExpertLoadBalancing,
}

impl From<CheckpointError> for BindError {
    fn from(error: CheckpointError) -> BindError {
        use CheckpointError::*;
        match error {
            OnlineQuantization { .. } | OverrideOfNothing | OtherQuantization { .. } => {
                BindError::UnsupportedQuantization(error)
            }
            error => BindError::Checkpoint(error),
        }
    }
}

/// Computes the digest of the engine's checkpoint, or says why not.
type Digest = dyn Fn() -> Result<[u8; 32], String> + Send + Sync;

/// A rank of an engine and its daemon: where that is, what is asked of it, and how long.
#[derive(Clone)]
pub struct Binding {
    pub(crate) endpoint: Endpoint,
    pub(crate) options: AttachOptions,
    key: Key,
    digest: Arc<Digest>,
    /// Computed at most once.
    known: Arc<OnceLock<[u8; 32]>>,
    /// What the operator says that it is.
    stated: Option<[u8; 32]>,
    /// Keeps the device ready, where it is known.
    _opened: Option<Arc<Opened>>,
}

impl Binding {
    /// Of this rank, found as the options say. The key is taken now, from the files as they are, and the
    /// device is made ready.
    ///
    /// # Errors
    /// What makes the cache unusable for this engine, fallback or not.
    pub fn new(options: &LoaderOptions, rank: &EngineRank) -> Result<Binding, BindError> {
        options.check()?;
        if rank.expert_load_balancing {
            return Err(BindError::ExpertLoadBalancing);
        }
        let opened = rank.device.open()?;
        let (device, role) = (rank.device.uuid(), options.role());
        let key = rank
            .keys
            .key(&rank.checkpoint, rank.checkpoint.identity(), rank.rank)?;
        let endpoint = match &options.socket_path {
            Some(socket) => Endpoint::socket(socket)?,
            None => {
                let (dir, instance) = (options.socket_dir.as_deref(), options.instance.as_deref());
                Endpoint::of_device(dir, &device, rank.slot, instance, role)?
            }
        };
        let attach = AttachOptions {
            mode: options.mode,
            fallback: options.fallback,
            connect_timeout: options.connect_timeout()?,
            state_timeout: options.state_timeout()?,
            role,
            device: Some(device),
            ..AttachOptions::new(our_uid()?)
        };
        let checkpoint = Arc::clone(&rank.checkpoint);
        let digest = move || {
            let (how, progress) = (LoadOptions::default(), Progress::default());
            let digested = digest::digest(&checkpoint, &how, &progress);
            digested
                .map(|known| known.digest)
                .map_err(|error| error.to_string())
        };
        let mut binding = Binding::with(endpoint, attach, key, digest);
        binding.stated = options.stated_digest()?;
        binding._opened = Some(Arc::new(opened));
        Ok(binding)
    }

    /// One whose parts are known already. `digest` is asked for where daemon and engine do not have the
    /// very same files.
    pub fn with(
        endpoint: Endpoint,
        options: AttachOptions,
        key: Key,
        digest: impl Fn() -> Result<[u8; 32], String> + Send + Sync + 'static,
    ) -> Binding {
        Binding {
            endpoint,
            options,
            key,
            digest: Arc::new(digest),
            known: Arc::default(),
            stated: None,
            _opened: None,
        }
    }

    /// The key, with the digest of the checkpoint where that was computed.
    pub fn key(&self) -> Key {
        let mut key = self.key.clone();
        key.checkpoint.digest = key.checkpoint.digest.or(self.known.get().copied());
        key
    }

    /// The key of the weights that are wanted: that of the engine's own files, unless an operator says
    /// which digest they must have.
    pub(crate) fn wanted(&self) -> Key {
        let mut key = self.key();
        if self.stated.is_some() {
            // Whatever the engine's own files are: they match by nothing else.
            key.checkpoint.digest = self.stated;
            key.checkpoint.files = None;
        }
        key
    }

    /// The role that is loaded.
    pub fn role(&self) -> Role {
        self.options.role
    }

    /// The digest, computed unless it is known.
    pub(crate) fn digest(&self) -> Result<[u8; 32], String> {
        if let Some(digest) = self.known.get() {
            return Ok(*digest);
        }
        let digest = (self.digest)()?;
        Ok(*self.known.get_or_init(|| digest))
    }

    /// The options of a reload by an engine that has `current` mapped.
    pub(crate) fn reload(&self, current: Option<weightd_core::content::Generation>) -> AttachOptions {
        AttachOptions {
            is_reload: true,
            current,
            ..self.options.clone()
        }
    }
}

impl fmt::Debug for Binding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Binding")
            .field("endpoint", &self.endpoint)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
