//! How the engine comes by its model: from the cache, or from disk with the reason.

use crate::llama::Generator;
use crate::{cache, weights};
use anyhow::Result;
use candle_core::{DType, Device};
use candle_transformers::models::llama::Config;
use std::path::Path;
use std::time::Duration;
use weightd_blocking::{Lease, Loaded, LoaderOptions};

/// What a model is made of.
#[derive(Debug)]
pub struct Plan<'a> {
    pub model: &'a Path,
    pub config: &'a Config,
    pub dtype: DType,
    pub device: &'a Device,
}

/// A model that can generate.
#[derive(Debug)]
pub struct Started {
    pub generator: Generator,
    /// Where the weights came from, and why from there.
    pub path: String,
    /// The daemon counts this engine for as long as this is held.
    pub lease: Option<Lease>,
}

impl Plan<'_> {
    /// With the example's own loader, and no cache.
    pub fn load_from_disk(&self) -> Result<Started> {
        Ok(Started {
            generator: self.read()?,
            path: "loaded from disk".to_owned(),
            lease: None,
        })
    }

    /// With the weights of the cache, or, where that cannot serve, with the example's own loader.
    pub fn load(&self, options: &LoaderOptions) -> Result<Started> {
        let loader = cache::loader(self.model, self.device, options)?;
        let loaded = loader.load(
            |weights| {
                let build = |weights| Generator::new(self.config, weights);
                let model = cache::model(weights, self.dtype, self.device, build);
                // With all of its causes.
                model.map_err(|error| format!("{error:#}"))
            },
            |_because| self.read(),
        )?;
        if let Some(lease) = loaded.lease() {
            // The engine serves on, whatever becomes of its lease; its operator wants to know.
            lease.on_event(|event| eprintln!("{event}"));
        }
        let path = path(&loaded);
        let (generator, lease) = loaded.into_parts();
        Ok(Started {
            generator,
            path,
            lease,
        })
    }

    fn read(&self) -> Result<Generator> {
        let weights = weights::from_disk(self.model, self.dtype, self.device)?;
        Generator::new(self.config, weights)
    }
}

fn path<M>(loaded: &Loaded<M>) -> String {
    match loaded {
        Loaded::Mapped {
            generation, timing, ..
        } => format!(
            "mapped from the cache, generation {generation}, in {} (ask {}, decode {}, map {})",
            milliseconds(timing.total()),
            milliseconds(timing.fetch),
            milliseconds(timing.decode),
            milliseconds(timing.map)
        ),
        Loaded::Copied {
            generation, released, ..
        } => {
            let daemon = if *released { "let go of" } else { "keeps" };
            format!("copied from the cache, generation {generation}; the daemon {daemon} its own")
        }
        Loaded::LoadedFromDisk { because, .. } => {
            format!("loaded from disk, since the cache could not serve: {because}")
        }
    }
}

fn milliseconds(duration: Duration) -> String {
    format!("{:.2} ms", duration.as_secs_f64() * 1e3)
}
