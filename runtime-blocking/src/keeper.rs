//! Keeping the lease on what is mapped.

use crate::binding::Binding;
use crate::clock::Clock;
use crate::endpoint::Endpoint;
use crate::line::Line;
use crate::task::{Task, Turn};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use weightd_core::content::Generation;
use weightd_core::machine::{Client, Exchange, Outgoing, Renewal, Renewed, Step};
use weightd_core::peer::Facts;
use weightd_core::time::Now;

/// What becomes of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseEvent {
    /// The daemon was replaced, and the one that serves the same generation now counts it again.
    LeasedAgain {
        /// What is leased.
        generation: Generation,
    },
    /// The daemon is lost. What is mapped stays mapped and can be used for as long as the engine runs;
    /// but nobody counts it, a restart may have to load from disk, and a reload finds nothing.
    Lost {
        /// What was leased.
        generation: Generation,
        /// Why.
        why: String,
    },
}

type Listener = Box<dyn Fn(&LeaseEvent) + Send>;

/// What engine and keeper both know.
#[derive(Default)]
struct Shared {
    /// Set while the listener is locked, so that it hears of it exactly once.
    lost: OnceLock<LeaseEvent>,
    listener: Mutex<Option<Listener>>,
}

impl Shared {
    fn listener(&self) -> MutexGuard<'_, Option<Listener>> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the end of a lease, and leases the same generation again from whoever serves it then. It ends
/// when the daemon is lost, and gives the lease up when it is dropped.
pub struct Keeper {
    clock: Clock,
    endpoint: Endpoint,
    generation: Generation,
    uid: u32,
    line: Line,
    silence: Silence,
    renewal: Option<Renewal<OwnedFd>>,
    shared: Arc<Shared>,
}

impl Keeper {
    /// Of the lease that this connection is.
    pub(crate) fn new(binding: &Binding, generation: Generation, lease: OwnedFd) -> io::Result<Keeper> {
        let mut line = Line::new()?;
        line.open(lease)?;
        Ok(Keeper {
            clock: Clock::start(),
            endpoint: binding.endpoint.clone(),
            generation,
            uid: binding.options.uid,
            line,
            silence: Silence::default(),
            renewal: None,
            shared: Arc::default(),
        })
    }

    fn tell(&self, event: LeaseEvent) {
        let listener = self.shared.listener();
        match &event {
            LeaseEvent::LeasedAgain { generation } => {
                tracing::info!("generation {generation} is leased again, from the daemon that serves it now");
            }
            LeaseEvent::Lost { generation, why } => {
                tracing::warn!(
                    "daemon lost: generation {generation} stays mapped, but nobody counts it any more: {why}"
                );
                let _ = self.shared.lost.set(event.clone());
            }
        }
        if let Some(listener) = &*listener {
            listener(&event);
        }
    }
}

impl Task for Keeper {
    /// The daemon is lost.
    type Output = ();

    fn turn(&mut self) -> io::Result<Turn<Keeper>> {
        loop {
            let now = self.clock.now();
            let Some(renewal) = &mut self.renewal else {
                while !self.silence.ended && self.line.turn(now, &mut self.silence) {}
                if !self.silence.ended {
                    return Ok(Turn::Wait(None));
                }
                self.silence.ended = false;
                self.renewal = Some(Renewal::new(now, self.generation, self.uid));
                continue;
            };
            let until = match renewal.step(now) {
                Step::Connect => {
                    let result = self.endpoint.connect(&mut self.line);
                    renewal.connected(now, result);
                    continue;
                }
                Step::Io { until } => match self.line.turn(now, renewal.exchange()) {
                    true => continue,
                    false => self.line.until(until),
                },
                Step::Sleep { until } => {
                    // What it has to tell would end every wait at once.
                    drop(self.line.take());
                    until
                }
                Step::Next(Renewed::Leased) => {
                    self.renewal = None;
                    let generation = self.generation;
                    self.tell(LeaseEvent::LeasedAgain { generation });
                    continue;
                }
                Step::Next(Renewed::Lost { why }) => {
                    drop(self.line.take());
                    let generation = self.generation;
                    self.tell(LeaseEvent::Lost { generation, why });
                    return Ok(Turn::Done(()));
                }
            };
            return Ok(Turn::Wait(self.clock.until(Some(until))));
        }
    }
}

impl AsFd for Keeper {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.line.as_fd()
    }
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeper")
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

/// A lease is silent, so nothing that is said on it counts but its end.
#[derive(Debug, Default)]
struct Silence {
    ended: bool,
}

impl Exchange<OwnedFd> for Silence {
    fn outgoing(&self) -> Option<Outgoing<'_, OwnedFd>> {
        None
    }

    fn wrote(&mut self, _: Now, _: usize) {}

    fn receive(&mut self, _: Now, _: &[u8], _: impl IntoIterator<Item = (Facts, OwnedFd)>, _: bool) {}

    fn hangup(&mut self, _: Now, _: &str) {
        self.ended = true;
    }
}

/// The engine's hold on a generation. A runtime keeps it up in the background; dropping it gives it up. What
/// is mapped stays mapped, whatever happens to it.
pub struct Lease {
    shared: Arc<Shared>,
    generation: Generation,
    /// Ends the keeper.
    _kept: Box<dyn Send + Sync>,
}

impl Lease {
    /// Lets a runtime keep a lease up: `keep` runs the keeper in the background, until what it returns is
    /// dropped.
    pub fn kept<G: Send + Sync + 'static>(keeper: Keeper, keep: impl FnOnce(Keeper) -> G) -> Lease {
        Lease {
            shared: Arc::clone(&keeper.shared),
            generation: keeper.generation,
            _kept: Box::new(keep(keeper)),
        }
    }

    /// What is leased.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Whether the daemon is gone for good. The engine can serve on; see [`LeaseEvent::Lost`].
    pub fn is_lost(&self) -> bool {
        self.shared.lost.get().is_some()
    }

    /// Calls `listener`, from the runtime's background, with whatever becomes of the lease; at once, where it
    /// is lost already. It replaces the listener before.
    pub fn on_event(&self, listener: impl Fn(&LeaseEvent) + Send + 'static) {
        let mut slot = self.shared.listener();
        if let Some(lost) = self.shared.lost.get() {
            listener(lost);
        }
        *slot = Some(Box::new(listener));
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease")
            .field("generation", &self.generation)
            .field("is_lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}
