//! The command line of an engine.

use clap::Args;
use std::error::Error;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::Arc;
use weightd_blocking::{EngineRank, LoaderOptions};
use weightd_checkpoint::{Checkpoint, HubCache, KeyOptions, Rank, ShardingOptions};
use weightd_gpu::Device;

/// What an engine is told.
#[derive(Clone, Debug, Args)]
pub struct Engine {
    /// The directory of the checkpoint, or the id of a repository that the Hugging Face cache holds.
    #[arg(long)]
    pub model: PathBuf,

    /// How to load, as vLLM's --model-loader-extra-config takes it.
    #[arg(long, value_name = "JSON", default_value = "{}")]
    pub loader_config: LoaderOptions,
}

impl Engine {
    /// Its only rank, on host memory: the one that `weightd preload --device cpu` serves. `processing` says
    /// what the engine does to its weights after loading; `stored` is nothing.
    ///
    /// # Errors
    /// A checkpoint that cannot be opened.
    pub fn rank(&self, processing: &str) -> Result<EngineRank, Box<dyn Error>> {
        let keys = KeyOptions {
            processing: processing.to_owned(),
            ..KeyOptions::new(ShardingOptions::default())
        };
        let model = HubCache::from_env().find(&self.model, &keys.revision)?;
        Ok(EngineRank {
            device: Device::host(0),
            slot: None,
            rank: Rank::default(),
            checkpoint: Arc::new(Checkpoint::open(&model.dir)?),
            keys,
            expert_load_balancing: false,
        })
    }
}

/// Shows what weightd says: which path a load took, and what becomes of a lease. In colours on a terminal alone.
pub fn log_to_stderr() {
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
}
