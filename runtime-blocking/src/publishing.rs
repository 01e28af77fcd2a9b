//! One publication of an engine's weights, as a task.

use crate::binding::Binding;
use crate::contents::{Contents, ContentsError, Filling};
use crate::dial::{Dial, Dialled};
use crate::import::fault;
use crate::keeper::{Keeper, Lease};
use crate::line::advised;
use crate::task::{Task, Turn, Work};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use weightd_core::content::Generation;
use weightd_core::machine::{Fault, Filled, Publish, PublishError, PublishStep};
use weightd_core::wire::message::ContentInfo;
use weightd_gpu::{Device, Mapping, Weights};

/// Publishes weights for a [`Binding`]; stops for the engine to fill the memory, and at the end.
#[derive(Debug)]
pub struct Publishing {
    binding: Binding,
    device: Device,
    contents: Arc<Contents>,
    dial: Dial<Publish<OwnedFd>>,
    /// Memory that the engine shall fill.
    empty: Option<Box<Filling>>,
    /// What the engine has filled, or why not.
    full: Option<Result<Box<Filling>, String>>,
    /// What was filled, as everybody will map it.
    weights: Option<Weights>,
}

/// What a publication stops for.
#[derive(Debug)]
pub enum PublishStop {
    /// The engine copies its tensors and reports [`filled`](Publishing::filled).
    Fill(Box<Filling>),
    /// The publication is over.
    Over(Result<Box<Handed>, PublishError>),
}

/// What is published, without its runtime.
#[derive(Debug)]
pub struct Handed {
    /// The engine's own mapping of it.
    pub weights: Weights,
    /// The generation that it got.
    pub generation: Generation,
    /// Keeps the lease for as long as it runs; absent where the daemon gave none.
    pub keeper: Option<Box<Keeper>>,
}

/// Weights that were published. The engine goes on with them, as everybody maps them: read-only.
#[derive(Debug)]
pub struct Published {
    /// The daemon's memory, mapped.
    pub weights: Weights,
    /// The generation that it got.
    pub generation: Generation,
    /// Keep it for as long as the weights. Absent where the daemon gave none.
    pub lease: Option<Lease>,
}

/// Why nothing was published. What the daemon held it holds on, unless it was started with `--replace
/// drop-first` and made room; after [`PublishError::Unknown`] it may hold what was to be published.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishFailed {
    /// The contents are none.
    #[error(transparent)]
    Contents(#[from] ContentsError),
    /// Daemon, device or engine.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// This process cannot wait.
    #[error("cannot wait for the daemon: {}", advised(.0))]
    Io(#[from] io::Error),
}

impl Handed {
    /// Has a runtime keep the lease up.
    pub fn kept(self, keep: impl FnOnce(Keeper) -> Lease) -> Published {
        Published {
            weights: self.weights,
            generation: self.generation,
            lease: self.keeper.map(|keeper| keep(*keeper)),
        }
    }
}

impl Publishing {
    /// Publishes `contents` on `device` under the binding's key.
    ///
    /// # Errors
    /// Contents that no manifest can hold, before anybody is asked.
    pub fn new(binding: &Binding, device: Device, contents: Contents) -> Result<Publishing, PublishFailed> {
        contents.manifest(&device, contents.bytes())?;
        let publish = |_| Publish::new(&binding.options, binding.key());
        Ok(Publishing {
            dial: Dial::new(&binding.endpoint, publish)?,
            binding: binding.clone(),
            device,
            contents: Arc::new(contents),
            empty: None,
            full: None,
            weights: None,
        })
    }

    /// Reports that the memory is filled, or why not; then it was dropped.
    pub fn filled(&mut self, result: Result<Box<Filling>, String>) {
        self.full = Some(result.and_then(|filling| {
            // What nobody wrote is no weight.
            let unfilled = filling.unfilled();
            match unfilled.is_empty() {
                true => Ok(filling),
                false => Err(unwritten(&unfilled)),
            }
        }));
    }

    fn allocate(&self) -> Work<Publishing> {
        let (device, contents) = (self.device, Arc::clone(&self.contents));
        let wanted = contents.bytes();
        let work = move || {
            // A region takes at least a page.
            let region = device.allocate(wanted.max(1)).map_err(|error| {
                let free = device.room_for(wanted);
                (fault(error), free)
            })?;
            let manifest = contents.manifest(&device, region.bytes());
            let manifest = manifest.map_err(|error| (Fault::Malformed(error.to_string()), None))?;
            Ok(Box::new(Filling::new(manifest, region)))
        };
        Work::new(
            work,
            move |task: &mut Publishing, result: Result<_, (Fault, Option<u64>)>| {
                let now = task.dial.now();
                match result {
                    Ok(filling) => task.empty = Some(filling),
                    Err((Fault::OutOfMemory(why), free)) => task.dial.machine.no_room(now, wanted, free, why),
                    Err((fault, _)) => task.dial.machine.filled(now, Err(fault)),
                }
            },
        )
    }

    fn export(&mut self, filling: Box<Filling>) -> Work<Publishing> {
        let work = move || export(*filling);
        Work::new(work, |task: &mut Publishing, exported| {
            let filled = exported.map(|(filled, weights)| {
                task.weights = Some(weights);
                filled
            });
            task.dial.machine.filled(task.dial.now(), filled);
        })
    }

    fn over(&mut self, result: Result<weightd_core::machine::Published, PublishError>) -> PublishStop {
        PublishStop::Over(result.map(|published| {
            let generation = published.generation;
            let lease = self.dial.hang_on().filter(|_| published.leased);
            let broke = self.dial.machine.lease_broke();
            let keeper = Keeper::new(&self.binding, generation, lease, broke);
            let weights = self.weights.take().expect("what was published was mapped before");
            Box::new(Handed {
                weights: weights.with_generation(generation),
                generation,
                keeper: keeper.map(Box::new),
            })
        }))
    }
}

impl Task for Publishing {
    type Output = PublishStop;

    fn holds_memory(&self) -> bool {
        self.weights.is_some() || self.empty.is_some() || self.full.is_some()
    }

    fn turn(&mut self) -> io::Result<Turn<Publishing>> {
        if let Some(filling) = self.empty.take() {
            return Ok(Turn::Done(PublishStop::Fill(filling)));
        }
        match self.full.take() {
            Some(Ok(filling)) => return Ok(Turn::Work(self.export(filling))),
            Some(Err(why)) => self.dial.machine.filled(self.dial.now(), Err(Fault::Other(why))),
            None => {}
        }
        Ok(match self.dial.turn() {
            Dialled::Wait(timeout) => Turn::Wait(timeout),
            Dialled::Next(PublishStep::Digest) => {
                let binding = self.binding.clone();
                Turn::Work(Work::new(
                    move || binding.digest(),
                    |task: &mut Publishing, digest| task.dial.machine.digested(task.dial.now(), digest),
                ))
            }
            Dialled::Next(PublishStep::Fill) => Turn::Work(self.allocate()),
            Dialled::Next(PublishStep::Done(result)) => Turn::Done(self.over(result)),
        })
    }
}

impl AsFd for Publishing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dial.as_fd()
    }
}

/// Says that these were not filled, of many the first.
fn unwritten(names: &[String]) -> String {
    const NAMED: usize = 8;
    let named = names.iter().take(NAMED).map(String::as_str);
    let more = match names.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!(
        "not all bytes were written of {}{more}",
        named.collect::<Vec<_>>().join(", ")
    )
}

/// Fixes what was filled, and maps it as everybody else will.
fn export(filling: Filling) -> Result<(Filled<OwnedFd>, Weights), Fault> {
    let Filling { manifest, region, .. } = filling;
    let device = region.device();
    let encoded = manifest.encode();
    let sealed = weightd_gpu::sealed(&encoded).map_err(fault)?;
    let export = region.export().map_err(fault)?;
    let content = ContentInfo::of(&manifest, encoded.len());
    let ours = export.try_clone().map_err(fault)?;
    let mapping = Mapping::import(ours.handle, ours.fd, ours.bytes, device).map_err(fault)?;
    let weights = Weights::new(manifest, vec![mapping]);
    let weights = weights.map_err(|error| Fault::Malformed(error.to_string()))?;
    let descriptors = vec![sealed, export.fd];
    Ok((Filled { content, descriptors }, weights))
}
