//! The publisher of a synchronous engine.

use crate::binding::{BindError, Binding, EngineRank};
use crate::contents::{Contents, Filling};
use crate::loader::keep;
use crate::options::LoaderOptions;
use crate::publishing::{PublishFailed, PublishStop, Published, Publishing};
use crate::task::run;
use std::fmt::Display;
use weightd_gpu::Device;

/// Hands weights that the engine made itself to a daemon that takes them (`weightd serve`), so that the next
/// engine maps them. It blocks.
#[derive(Clone, Debug)]
pub struct Publisher {
    binding: Binding,
    device: Device,
}

impl Publisher {
    /// For this rank of an engine. What was done to the weights is named by the `processing` of its keys.
    ///
    /// # Errors
    /// What makes the cache unusable for this engine.
    pub fn new(options: &LoaderOptions, rank: &EngineRank) -> Result<Publisher, BindError> {
        Ok(Publisher::with(Binding::new(options, rank)?, rank.device))
    }

    /// For a binding that there is, as a loader's.
    pub fn with(binding: Binding, device: Device) -> Publisher {
        Publisher { binding, device }
    }

    /// Publishes `contents`, as one step: engines find what the daemon held before, or all of this. `fill`
    /// copies the engine's tensors, once there is memory for all of them; until then the engine keeps its
    /// own. Where the device cannot hold old and new content at once, the daemon's operator has said which
    /// one stays (`weightd serve --replace`).
    ///
    /// # Errors
    /// See [`PublishFailed`].
    pub fn publish<E: Display>(
        &self,
        contents: Contents,
        fill: impl FnOnce(&Filling) -> Result<(), E>,
    ) -> Result<Published, PublishFailed> {
        let mut publishing = Publishing::new(&self.binding, self.device, contents)?;
        let mut fill = Some(fill);
        loop {
            match run(&mut publishing)? {
                PublishStop::Fill(filling) => {
                    let fill = fill.take().expect("a publication is filled once");
                    let filled = fill(&filling).map_err(|error| error.to_string());
                    publishing.filled(filled.map(|()| filling));
                }
                PublishStop::Over(handed) => return Ok(handed?.kept(keep)),
            }
        }
    }
}
