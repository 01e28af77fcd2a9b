//! Leasing a generation once more, after the daemon that it was leased from is gone.
//!
//! A server that dies is replaced within moments, and serves the generations that it served. Who has one
//! of them mapped needs nothing but a new lease.

use super::ask::{Ask, AskError};
use super::{ConnectFailure, Exchange, Outgoing};
use crate::content::Generation;
use crate::peer::{Facts, Peer};
use crate::time::{Now, Span};
use crate::wire::message::{ErrorCode, Message, Watch};

/// How long a daemon may take to be back.
pub const RENEWS_WITHIN: Span = Span::secs(5);
/// The pause between two tries.
const PAUSE: Span = Span::millis(100);
/// How long one answer may take.
const ANSWERS_WITHIN: Span = Span::secs(2);

/// What the driver shall do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RenewalStep {
    /// Drop the connection, if there is one, make a new one, and report [`Renewal::connected`].
    Connect,
    /// Wait until the connection is readable or has room, or until the moment.
    Io {
        /// When to call [`Renewal::step`] again, whatever happens.
        until: Now,
    },
    /// Wait.
    Sleep {
        /// Until this moment.
        until: Now,
    },
    /// The connection is the lease: keep it open for as long as the mapping.
    Leased,
    /// The daemon is lost. What is mapped stays mapped, and nobody counts it any more.
    Lost {
        /// Why.
        why: String,
    },
}

#[derive(Debug)]
enum State<F> {
    Connecting,
    Asking(Box<Ask<F>>),
    Pausing(Now),
    Over(RenewalStep),
}

/// See the module.
#[derive(Debug)]
pub struct Renewal<F> {
    generation: Generation,
    uid: u32,
    until: Now,
    state: State<F>,
}

impl<F> Renewal<F> {
    /// Leases `generation` again, as user `uid`, from a daemon that has [`RENEWS_WITHIN`] to come back.
    pub fn new(now: Now, generation: Generation, uid: u32) -> Renewal<F> {
        Renewal {
            generation,
            uid,
            until: now + RENEWS_WITHIN,
            state: State::Connecting,
        }
    }

    /// What to do next; to be called again after each input, and when its time has come.
    pub fn step(&mut self, now: Now) -> RenewalStep {
        let answer = match &mut self.state {
            State::Asking(ask) => ask.answer(now),
            _ => None,
        };
        match answer {
            Some(Ok(Message::Watching(_))) => self.state = State::Over(RenewalStep::Leased),
            Some(Ok(other)) => self.lose(format!("it answered with a {} message", other.name())),
            Some(Err(error)) => self.failed(now, error),
            None => {}
        }
        if let State::Pausing(until) = self.state
            && now >= until
        {
            self.state = State::Connecting;
        }
        match &self.state {
            State::Connecting => RenewalStep::Connect,
            State::Asking(ask) => RenewalStep::Io { until: ask.until() },
            State::Pausing(until) => RenewalStep::Sleep { until: *until },
            State::Over(step) => step.clone(),
        }
    }

    /// Reports how connecting ended: with the peer, or not.
    pub fn connected(&mut self, now: Now, result: Result<Peer, ConnectFailure>) {
        match result {
            Ok(peer) => {
                let watch = Watch {
                    generation: Some(self.generation),
                };
                let ask = Ask::new(now, watch, peer, self.uid, ANSWERS_WITHIN);
                self.state = State::Asking(Box::new(ask));
            }
            Err(ConnectFailure::Refused(why)) => self.lose(why),
            Err(ConnectFailure::Absent(why) | ConnectFailure::Other(why)) => self.again(now, why),
            Err(ConnectFailure::Busy) => self.again(now, "too many engines ask at once".to_owned()),
        }
    }

    fn failed(&mut self, now: Now, error: AskError) {
        let why = error.to_string();
        match error {
            // It is on its way, or has too much to do.
            AskError::Broken(_) | AskError::Timeout(_) => self.again(now, why),
            AskError::Failed {
                code: ErrorCode::Busy,
                ..
            } => self.again(now, why),
            AskError::Failed { .. } | AskError::RefusedPeer { .. } | AskError::Malformed(_) => self.lose(why),
        }
    }

    fn again(&mut self, now: Now, why: String) {
        match now + PAUSE < self.until {
            true => self.state = State::Pausing(now + PAUSE),
            false => self.lose(why),
        }
    }

    fn lose(&mut self, why: String) {
        self.state = State::Over(RenewalStep::Lost { why });
    }
}

impl<F> Exchange<F> for Renewal<F> {
    fn outgoing(&self) -> Option<Outgoing<'_, F>> {
        match &self.state {
            State::Asking(ask) => ask.outgoing(),
            _ => None,
        }
    }

    fn wrote(&mut self, now: Now, bytes: usize) {
        if let State::Asking(ask) = &mut self.state {
            ask.wrote(now, bytes);
        }
    }

    fn receive(
        &mut self,
        now: Now,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = (Facts, F)>,
        truncated: bool,
    ) {
        if let State::Asking(ask) = &mut self.state {
            ask.receive(now, bytes, descriptors, truncated);
        }
    }

    fn hangup(&mut self, now: Now, why: &str) {
        if let State::Asking(ask) = &mut self.state {
            ask.hangup(now, why);
        }
    }
}
