//! Machines that make their own connection, and make it anew when that helps.

use super::ask::{Ask, AskError};
use super::{AttachError, ConnectFailure, Exchange, Outgoing};
use crate::peer::{Facts, Peer};
use crate::time::Now;
use crate::wire::Message;
use crate::wire::message::ErrorCode;

/// A machine with one connection at a time, which its driver makes when the machine asks for it.
pub trait Client<F> {
    /// What it asks for beyond that.
    type Next;
    /// Who speaks on the connection.
    type Exchange: Exchange<F>;

    /// What to do next; to be called again after each input, and when its time has come.
    fn step(&mut self, now: Now) -> Step<Self::Next>;

    /// Reports how connecting ended: with the peer, or not.
    fn connected(&mut self, now: Now, result: Result<Peer, ConnectFailure>);

    /// Who speaks on the connection that was made last.
    fn exchange(&mut self) -> &mut Self::Exchange;
}

/// What the driver of a [`Client`] shall do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step<T> {
    /// Drop the connection, if there is one, make a new one, and report [`Client::connected`].
    Connect,
    /// Wait until the connection is readable or has room for what there is to send, or until the moment.
    Io {
        /// When to call [`Client::step`] again, whatever happens.
        until: Now,
    },
    /// Wait.
    Sleep {
        /// Until this moment.
        until: Now,
    },
    /// Something that this machine alone asks for.
    Next(T),
}

impl<T> Step<T> {
    /// What this machine alone asks for, or else the same step of any other.
    pub(super) fn next<U>(self) -> Result<T, Step<U>> {
        Err(match self {
            Step::Next(next) => return Ok(next),
            Step::Connect => Step::Connect,
            Step::Io { until } => Step::Io { until },
            Step::Sleep { until } => Step::Sleep { until },
        })
    }
}

/// One question after another, each on a connection of its own.
#[derive(Debug)]
pub struct Inquiry<F>(State<F>);

#[derive(Debug)]
enum State<F> {
    Connecting,
    Unconnected(ConnectFailure),
    Asking(Box<Ask<F>>),
    Sleeping(Now),
    /// An answer was given, and nothing said since.
    Resting,
}

/// Why a question has no answer.
#[derive(Clone, Debug)]
pub(super) enum NoAnswer {
    /// It was not asked.
    Unconnected(ConnectFailure),
    /// It was asked, or would have been.
    Asked {
        error: AskError,
        /// Whether all of it had left.
        sent: bool,
    },
}

impl NoAnswer {
    /// Whether what was asked for may have been done all the same; why that is not known.
    pub fn leaves_open(&self) -> Option<String> {
        let NoAnswer::Asked { error, sent: true } = self else {
            return None;
        };
        match error {
            AskError::Failed { code, why } => {
                let open = [ErrorCode::InDoubt, ErrorCode::Timeout, ErrorCode::Internal];
                open.contains(code).then(|| why.clone())
            }
            AskError::RefusedPeer { .. } => None,
            AskError::Malformed(_) | AskError::Broken(_) | AskError::Timeout(_) => Some(error.to_string()),
        }
    }
}

impl From<NoAnswer> for AttachError {
    fn from(none: NoAnswer) -> AttachError {
        match none {
            NoAnswer::Unconnected(failure) => failure.into(),
            NoAnswer::Asked { error, .. } => error.into(),
        }
    }
}

impl<F> Default for Inquiry<F> {
    /// One that begins with connecting.
    fn default() -> Self {
        Inquiry(State::Connecting)
    }
}

impl<F> Inquiry<F> {
    /// What to do next: at last, to deal with an answer.
    ///
    /// # Panics
    /// When an answer was given and nothing said since: a bug of this crate.
    pub(super) fn step(&mut self, now: Now) -> Step<Result<Message, NoAnswer>> {
        let answer = match &mut self.0 {
            State::Sleeping(until) if now < *until => return Step::Sleep { until: *until },
            State::Connecting | State::Sleeping(_) => {
                self.0 = State::Connecting;
                return Step::Connect;
            }
            State::Unconnected(failure) => Err(NoAnswer::Unconnected(failure.clone())),
            State::Asking(ask) => match ask.answer(now) {
                None => return Step::Io { until: ask.until() },
                Some(answer) => {
                    let sent = ask.is_sent();
                    answer.map_err(|error| NoAnswer::Asked { error, sent })
                }
            },
            State::Resting => panic!("an answer was given, and what follows was not said"),
        };
        self.0 = State::Resting;
        Step::Next(answer)
    }

    /// How connecting ended: with what is asked there, or not.
    pub(super) fn connected(&mut self, result: Result<Ask<F>, ConnectFailure>) {
        self.0 = match result {
            Ok(ask) => State::Asking(Box::new(ask)),
            Err(failure) => State::Unconnected(failure),
        };
    }

    /// Makes a new connection, at this moment or later.
    pub(super) fn connect_at(&mut self, at: Now) {
        self.0 = State::Sleeping(at);
    }
}

impl<F> Exchange<F> for Inquiry<F> {
    fn outgoing(&self) -> Option<Outgoing<'_, F>> {
        match &self.0 {
            State::Asking(ask) => ask.outgoing(),
            _ => None,
        }
    }

    fn wrote(&mut self, now: Now, bytes: usize) {
        if let State::Asking(ask) = &mut self.0 {
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
        if let State::Asking(ask) = &mut self.0 {
            ask.receive(now, bytes, descriptors, truncated);
        }
    }

    fn hangup(&mut self, now: Now, why: &str) {
        if let State::Asking(ask) = &mut self.0 {
            ask.hangup(now, why);
        }
    }
}
