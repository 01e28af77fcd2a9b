//! One question to a daemon or a server, and its answer.

use super::link::Link;
use super::reap::Bundle;
use super::{Exchange, Outgoing};
use crate::peer::{Facts, Peer};
use crate::time::{Now, Span};
use crate::wire::message::{ErrorCode, Failure, Message, MessageError};
use thiserror::Error;

/// Why a question got no answer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AskError {
    /// Whoever listens there is not ours.
    #[error("the daemon runs as user {theirs}, this process as {ours}: run both as one user")]
    RefusedPeer {
        /// The daemon's user.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// The daemon answered with a failure.
    #[error("{why}")]
    Failed {
        /// The cause.
        code: ErrorCode,
        /// What the daemon says.
        why: String,
    },
    /// The answer is none of this protocol.
    #[error("the answer is malformed: {0}; use the same weightd release on both sides")]
    Malformed(String),
    /// The connection ended first.
    #[error("the connection broke: {0}; see the daemon's log")]
    Broken(String),
    /// No answer came in time.
    #[error("no answer within {0}; see the daemon's log")]
    Timeout(Span),
}

impl AskError {
    pub(super) fn of(failure: Failure) -> AskError {
        AskError::Failed {
            code: ErrorCode::from_number(failure.code),
            why: failure.why(),
        }
    }
}

/// See the module. The driver has made the connection already.
#[derive(Debug)]
pub struct Ask<F> {
    link: Link<F>,
    until: Now,
    patience: Span,
    /// All of the question has left.
    sent: bool,
    answer: Option<Result<Message, AskError>>,
}

impl<F> Ask<F> {
    /// Asks `question` of `peer`, as user `uid`, and waits `patience` for the answer.
    pub fn new(now: Now, question: impl Into<Message>, peer: Peer, uid: u32, patience: Span) -> Ask<F> {
        Ask::with(now, question, None, peer, uid, patience)
    }

    /// The same of a question that owns descriptors.
    pub(super) fn with(
        now: Now,
        question: impl Into<Message>,
        descriptors: Option<Bundle<F>>,
        peer: Peer,
        uid: u32,
        patience: Span,
    ) -> Ask<F> {
        let mut link = Link::default();
        let refusal = if peer.is_trusted_by(uid) {
            let malformed = |error: MessageError| AskError::Malformed(error.to_string());
            link.ask(question, descriptors).map_err(malformed).err()
        } else {
            Some(AskError::RefusedPeer {
                theirs: peer.uid,
                ours: uid,
            })
        };
        let answer = refusal.map(Err);
        Ask {
            link,
            until: now + patience,
            patience,
            sent: false,
            answer,
        }
    }

    /// Whether all of the question has left, so that it may be acted upon.
    pub(super) fn is_sent(&self) -> bool {
        self.sent
    }

    /// When to give up.
    pub fn until(&self) -> Now {
        self.until
    }

    /// The answer, once there is one.
    pub fn answer(&mut self, now: Now) -> Option<Result<Message, AskError>> {
        if self.answer.is_none() && now >= self.until {
            self.answer = Some(Err(AskError::Timeout(self.patience)));
        }
        self.answer.take()
    }
}

impl<F> Exchange<F> for Ask<F> {
    fn outgoing(&self) -> Option<Outgoing<'_, F>> {
        self.link.outgoing()
    }

    fn wrote(&mut self, _now: Now, bytes: usize) {
        self.sent |= self.link.wrote(bytes);
    }

    fn receive(
        &mut self,
        _now: Now,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = (Facts, F)>,
        truncated: bool,
    ) {
        let received = self.link.receive(bytes, descriptors, truncated);
        let answer = match received.and_then(|()| self.link.next_frame()) {
            Ok(None) => return,
            Err(error) => Err(AskError::Malformed(error.to_string())),
            Ok(Some(frame)) => match Message::decode(frame.kind, &frame.body) {
                Ok(Message::Failure(failure)) => Err(AskError::of(failure)),
                Ok(message) => Ok(message),
                Err(error) => Err(AskError::Malformed(error.to_string())),
            },
        };
        // The first thing that is said is the answer.
        self.answer.get_or_insert(answer);
    }

    fn hangup(&mut self, _now: Now, why: &str) {
        self.answer
            .get_or_insert_with(|| Err(AskError::Broken(why.to_owned())));
    }
}
