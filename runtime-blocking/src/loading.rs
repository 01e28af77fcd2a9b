//! One load of an engine's weights, as a task.

use crate::binding::Binding;
use crate::dial::{Dial, Dialled};
use crate::import::{fault, import};
use crate::keeper::Keeper;
use crate::task::{Task, Turn, Work};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use weightd_core::content::Generation;
use weightd_core::machine::{Attach, AttachError, AttachOptions, AttachStep, Fault, Fetched, Outcome};
use weightd_gpu::Weights;

/// Fetches weights for a [`Binding`]; stops for the engine to build its model, and at the end.
#[derive(Debug)]
pub struct Loading {
    binding: Binding,
    dial: Dial<Attach<OwnedFd>>,
    weights: Option<Weights>,
    timing: Timing,
}

/// What a load stops for.
#[derive(Debug)]
pub enum Stop {
    /// The engine builds its model of the weights and reports [`built`](Loading::built).
    Build(Weights),
    /// The cache cannot serve: the engine drops the task and loads from disk.
    LoadFromDisk {
        /// Why.
        because: AttachError,
    },
    /// What the engine has mapped is what the daemon serves. The reload is over.
    Unchanged,
    /// The load is over.
    Over(Result<Fetch, AttachError>),
}

/// How a load from the cache ended well.
#[derive(Debug)]
pub enum Fetch {
    /// The daemon's memory is mapped.
    Mapped {
        /// What is mapped.
        generation: Generation,
        /// Keeps the lease for as long as it runs; absent where the daemon gave none.
        keeper: Option<Box<Keeper>>,
        /// What it took.
        timing: Timing,
    },
    /// Everything was cloned.
    Copied {
        /// What was cloned.
        generation: Generation,
        /// Whether the daemon said that it let go.
        released: bool,
        /// What it took.
        timing: Timing,
    },
}

/// The parts of an attach, from connect until every tensor is addressable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// Connecting, asking and receiving the descriptors.
    pub fetch: Duration,
    /// Reading and decoding the manifest.
    pub decode: Duration,
    /// Importing and mapping the regions.
    pub map: Duration,
}

impl Timing {
    /// All of it.
    pub fn total(&self) -> Duration {
        self.fetch + self.decode + self.map
    }
}

impl Loading {
    /// A first load.
    ///
    /// # Errors
    /// This process cannot wait.
    pub fn new(binding: &Binding) -> io::Result<Loading> {
        Loading::with(binding, binding.options.clone())
    }

    /// Loads what the daemon serves now, for an engine that has weights. In zero-copy mode `current` is
    /// what it has mapped, and finding that again changes nothing. In copy mode [`Stop::Build`] gives the
    /// daemon's memory, to be copied into the tensors that are there.
    ///
    /// # Errors
    /// This process cannot wait.
    pub fn reload(binding: &Binding, current: Option<Generation>) -> io::Result<Loading> {
        Loading::with(binding, binding.reload(current))
    }

    fn with(binding: &Binding, options: AttachOptions) -> io::Result<Loading> {
        let dial = Dial::new(&binding.endpoint, |_| Attach::new(options, binding.wanted()))?;
        Ok(Loading {
            binding: binding.clone(),
            dial,
            weights: None,
            timing: Timing::default(),
        })
    }

    /// Reports that the engine has its model, or why not; then it has dropped the weights.
    pub fn built(&mut self, result: Result<(), String>) {
        self.dial.machine.built(self.dial.now(), result);
    }

    fn import(&mut self, fetched: Fetched<OwnedFd>) -> Work<Loading> {
        self.timing.fetch = self.dial.connected_at().elapsed();
        let work = move || import(fetched);
        Work::new(work, |task: &mut Loading, imported| {
            let result = imported.map(|imported| {
                task.timing.decode = imported.decode;
                task.timing.map = imported.map;
                task.weights = Some(imported.weights);
            });
            task.dial.machine.imported(task.dial.now(), result);
        })
    }

    fn copy(&mut self) -> Work<Loading> {
        let mapped = self.weights.take();
        let work = move || match mapped {
            Some(mapped) => mapped.duplicate().map_err(fault),
            None => Err(Fault::Other("nothing was imported".to_owned())),
        };
        Work::new(work, |task: &mut Loading, copied| {
            let result = copied.map(|copy| task.weights = Some(copy));
            task.dial.machine.copied(task.dial.now(), result);
        })
    }

    fn over(&mut self, outcome: Outcome) -> Stop {
        let timing = self.timing;
        Stop::Over(Ok(match outcome {
            Outcome::Unchanged { .. } => return Stop::Unchanged,
            Outcome::Mapped { generation, leased } => {
                let lease = self.dial.hang_on().filter(|_| leased);
                let broke = self.dial.machine.lease_broke();
                let keeper = Keeper::new(&self.binding, generation, lease, broke);
                Fetch::Mapped {
                    generation,
                    keeper: keeper.map(Box::new),
                    timing,
                }
            }
            Outcome::Copied { generation, released } => Fetch::Copied {
                generation,
                released,
                timing,
            },
        }))
    }
}

impl Task for Loading {
    type Output = Stop;

    fn holds_memory(&self) -> bool {
        self.weights.is_some()
    }

    fn turn(&mut self) -> io::Result<Turn<Loading>> {
        let step = match self.dial.turn() {
            Dialled::Wait(timeout) => return Ok(Turn::Wait(timeout)),
            Dialled::Next(step) => step,
        };
        Ok(match step {
            AttachStep::Digest => {
                let binding = self.binding.clone();
                Turn::Work(Work::new(
                    move || binding.digest(),
                    |task: &mut Loading, digest| task.dial.machine.digested(task.dial.now(), digest),
                ))
            }
            AttachStep::Import(fetched) => Turn::Work(self.import(fetched)),
            AttachStep::Copy => Turn::Work(self.copy()),
            AttachStep::Build => match self.weights.take() {
                Some(weights) => Turn::Done(Stop::Build(weights)),
                None => {
                    self.built(Err("nothing was imported".to_owned()));
                    return self.turn();
                }
            },
            AttachStep::LoadFromDisk { because } => Turn::Done(Stop::LoadFromDisk { because }),
            AttachStep::Done(Ok(outcome)) => Turn::Done(self.over(outcome)),
            AttachStep::Done(Err(error)) => Turn::Done(Stop::Over(Err(error))),
        })
    }
}

impl AsFd for Loading {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dial.as_fd()
    }
}
