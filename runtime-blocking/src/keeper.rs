//! Keeping the lease on what is mapped.

use crate::binding::Binding;
use crate::clock::Clock;
use crate::endpoint::Endpoint;
use crate::line::{Line, advised};
use crate::task::{Task, Turn};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weightd_core::content::Generation;
use weightd_core::machine::{Client, Exchange, Outgoing, Renewal, Renewed, Step};
use weightd_core::peer::Facts;
use weightd_core::time::Now;

/// What becomes of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseEvent {
    /// The daemon was replaced, and the one that serves the same generation now counts it again.
    LeasedAgain {
        /// What is leased.
        generation: Generation,
    },
    /// The daemon is lost. What is mapped stays mapped and can be used for as long as the engine runs; but
    /// nobody counts it, a restart may have to load from disk, and a reload may find nothing. Where a daemon
    /// with the same generation comes back after all, it is leased again.
    Lost {
        /// What was leased.
        generation: Generation,
        /// Why.
        why: String,
    },
}

impl fmt::Display for LeaseEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LeaseEvent::LeasedAgain { generation } => {
                write!(
                    f,
                    "generation {generation} is leased again, from the daemon that serves it now"
                )
            }
            LeaseEvent::Lost { generation, why } => write!(
                f,
                "daemon lost: generation {generation} stays mapped, but nobody counts it any more: {why}"
            ),
        }
    }
}

type Listener = Arc<dyn Fn(&LeaseEvent) + Send + Sync>;

/// What engine and keeper both know.
#[derive(Default)]
struct Shared {
    told: Mutex<Told>,
}

#[derive(Default)]
struct Told {
    /// What was said last, where that is a loss.
    lost: Option<LeaseEvent>,
    listener: Option<Listener>,
}

impl Shared {
    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the end of a lease, and leases the same generation again from whoever serves it then. It ends when
/// another generation is served, and gives the lease up when it is dropped.
pub struct Keeper {
    clock: Clock,
    endpoint: Endpoint,
    generation: Generation,
    uid: u32,
    line: Line,
    silence: Silence,
    renewal: Option<Renewal<OwnedFd>>,
    /// A daemon that was lost is not looked for before this moment.
    rests_until: Now,
    shared: Arc<Shared>,
}

impl Keeper {
    /// Of the lease that this connection is, or of one that is yet to be had since the connection `broke`; none,
    /// where the daemon gave none. Nothing about a lease fails a load, so where it cannot be kept it is given up.
    pub(crate) fn new(
        binding: &Binding,
        generation: Generation,
        lease: Option<OwnedFd>,
        broke: bool,
    ) -> Option<Keeper> {
        if lease.is_none() && !broke {
            tracing::warn!("generation {generation} is mapped without a lease: the daemon gave none");
            return None;
        }
        let silence = Silence {
            ended: lease.is_none(),
        };
        let line = Line::new().and_then(|mut line| {
            lease.map_or(Ok(()), |lease| line.open(lease))?;
            Ok(line)
        });
        let line = line
            .inspect_err(|error| {
                tracing::warn!(
                    "the lease of generation {generation} cannot be kept: {}",
                    advised(error)
                )
            })
            .ok()?;
        Some(Keeper {
            clock: Clock::start(),
            endpoint: binding.endpoint.clone(),
            generation,
            uid: binding.options.uid,
            line,
            silence,
            renewal: None,
            rests_until: Now(0),
            shared: Arc::default(),
        })
    }

    /// The runtime cannot wait for it any more.
    pub(crate) fn give_up(&self, error: &io::Error) {
        let generation = self.generation;
        let why = format!("its runtime cannot wait for it: {}", advised(error));
        self.tell(LeaseEvent::Lost { generation, why });
    }

    fn tell(&self, event: LeaseEvent) {
        let mut told = self.shared.told();
        let is_lost = matches!(event, LeaseEvent::Lost { .. });
        if is_lost && told.lost.is_some() {
            return;
        }
        told.lost = is_lost.then(|| event.clone());
        let listener = told.listener.clone();
        // A listener may ask the lease something.
        drop(told);
        match is_lost {
            true => tracing::warn!("{event}"),
            false => tracing::info!("{event}"),
        }
        if let Some(listener) = listener {
            // The lease is kept up whatever its listener does.
            let heard = catch_unwind(AssertUnwindSafe(|| listener(&event)));
            if heard.is_err() {
                tracing::error!("a listener of a lease panicked; the lease is kept up");
            }
        }
    }
}

impl Task for Keeper {
    /// The generation is served no more.
    type Output = ();

    fn turn(&mut self) -> io::Result<Turn<Keeper>> {
        loop {
            let now = self.clock.now();
            let Some(renewal) = &mut self.renewal else {
                if !self.silence.ended {
                    let moved = self.line.turn(now, &mut self.silence);
                    // Whoever says things on it without end must not keep others from their turn.
                    if !self.silence.ended {
                        return Ok(Turn::Wait(moved.then_some(Duration::ZERO)));
                    }
                }
                if now < self.rests_until {
                    return Ok(Turn::Wait(self.clock.until(Some(self.rests_until))));
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
                Step::Next(Renewed::Lost { why, again }) => {
                    drop(self.line.take());
                    let generation = self.generation;
                    self.tell(LeaseEvent::Lost { generation, why });
                    let Some(again) = again else {
                        return Ok(Turn::Done(()));
                    };
                    self.renewal = None;
                    self.silence.ended = true;
                    self.rests_until = again;
                    continue;
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

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
    pub(crate) fn kept<G: Send + Sync + 'static>(keeper: Keeper, keep: impl FnOnce(Keeper) -> G) -> Lease {
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

    /// Whether the daemon is gone. The engine can serve on; see [`LeaseEvent::Lost`].
    pub fn is_lost(&self) -> bool {
        self.shared.told().lost.is_some()
    }

    /// Calls `listener`, from the runtime's background, with whatever becomes of the lease; at once, where it
    /// is lost already. It replaces the listener before.
    pub fn on_event(&self, listener: impl Fn(&LeaseEvent) + Send + Sync + 'static) {
        let listener: Listener = Arc::new(listener);
        let mut told = self.shared.told();
        told.listener = Some(Arc::clone(&listener));
        let lost = told.lost.clone();
        drop(told);
        if let Some(lost) = lost {
            listener(&lost);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("generation", &self.generation)
            .field("is_lost", &self.is_lost())
            .finish_non_exhaustive()
    }
}
