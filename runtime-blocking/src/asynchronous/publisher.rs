//! The publisher of an async engine.

use super::Runtime;
use super::driven::{Driven, keep};
use crate::binding::{BindError, Binding, EngineRank};
use crate::contents::{Contents, Filling};
use crate::options::LoaderOptions;
use crate::publishing::{PublishFailed, PublishStop, Published, Publishing};
use std::fmt;
use std::fmt::Display;
use std::marker::PhantomData;
use weightd_gpu::Device;

/// Hands weights that the engine made itself to a daemon that takes them (`weightd serve`), so that the next
/// engine maps them.
pub struct Publisher<R> {
    binding: Binding,
    device: Device,
    runtime: PhantomData<fn() -> R>,
}

impl<R: Runtime> Publisher<R> {
    /// For this rank of an engine. What was done to the weights is named by the `processing` of its keys. It
    /// makes the device ready, which can take a tenth of a second; it waits for nobody.
    ///
    /// # Errors
    /// What makes the cache unusable for this engine.
    pub fn new(options: &LoaderOptions, rank: &EngineRank) -> Result<Publisher<R>, BindError> {
        Ok(Publisher::with(Binding::new(options, rank)?, rank.device))
    }

    /// For a binding that there is, as a loader's.
    pub fn with(binding: Binding, device: Device) -> Publisher<R> {
        Publisher {
            binding,
            device,
            runtime: PhantomData,
        }
    }

    /// As [`crate::Publisher::publish`].
    ///
    /// # Errors
    /// See [`PublishFailed`].
    pub async fn publish<E: Display>(
        &self,
        contents: Contents,
        fill: impl FnOnce(&Filling) -> Result<(), E> + Send + 'static,
    ) -> Result<Published, PublishFailed> {
        let mut publishing = Driven::<R, _>::new(Publishing::new(&self.binding, self.device, contents)?)?;
        let mut fill = Some(fill);
        loop {
            match publishing.run().await? {
                PublishStop::Fill(filling) => {
                    let fill = fill.take().expect("a publication is filled once");
                    let work = move || match fill(&filling) {
                        Ok(()) => Ok(filling),
                        Err(error) => Err(error.to_string()),
                    };
                    publishing.task().filled(R::unblock(work).await?);
                }
                PublishStop::Over(handed) => return Ok(handed?.kept(keep::<R>)),
            }
        }
    }
}

impl<R> Clone for Publisher<R> {
    fn clone(&self) -> Publisher<R> {
        Publisher {
            binding: self.binding.clone(),
            ..*self
        }
    }
}

impl<R> fmt::Debug for Publisher<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Publisher").field(&self.binding).finish()
    }
}
