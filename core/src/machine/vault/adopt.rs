//! A new launcher and a server whose launcher is gone: asking for its holdings and its lead.

use super::inherit::{Follower, Inheritance, Inheriting};
use crate::machine::link::Link;
use crate::machine::{AskError, Exchange, Outgoing};
use crate::peer::{Facts, Peer};
use crate::time::{Now, Span};
use crate::wire::message::{self, Message};

/// See the module. The driver has made the connection already.
///
/// With the inheritance, the lead is had: ending the connection gives it up again and leaves the server
/// as it was. [`Vault::inheriting`](super::Vault::inheriting) goes on with it.
#[derive(Debug)]
pub struct Adopt<F> {
    link: Link<F>,
    taken: Inheriting<F>,
    until: Now,
    patience: Span,
    outcome: Option<Result<u32, AskError>>,
}

impl<F> Adopt<F> {
    /// Asks the server `peer`, as launcher `pid` of user `uid`, and waits `patience` for the whole
    /// answer.
    pub fn new(now: Now, pid: u32, peer: Peer, uid: u32, patience: Span) -> Adopt<F> {
        let mut link = Link::default();
        let outcome = if peer.is_trusted_by(uid) {
            link.ask(message::Adopt { pid }, None)
                .expect("this message fits a frame");
            None
        } else {
            Some(Err(AskError::RefusedPeer {
                theirs: peer.uid,
                ours: uid,
            }))
        };
        Adopt {
            link,
            taken: Inheriting::default(),
            until: now + patience,
            patience,
            outcome,
        }
    }

    /// When to give up.
    pub fn until(&self) -> Now {
        self.until
    }

    /// Whether nothing more is waited for.
    pub fn is_over(&mut self, now: Now) -> bool {
        if self.outcome.is_none() && now >= self.until {
            self.outcome = Some(Err(AskError::Timeout(self.patience)));
        }
        self.outcome.is_some()
    }

    /// What became of it.
    ///
    /// # Errors
    /// [`AskError::Failed`] with [`message::ErrorCode::NotAllowed`] where another launcher leads the server, and
    /// with [`message::ErrorCode::Busy`] where the server is about to end or has just started.
    pub fn finish(self) -> Result<Inheritance<F>, AskError> {
        match self.outcome {
            Some(Ok(pid)) => Ok(self.taken.finish(Some(Follower { pid, link: self.link }))),
            Some(Err(error)) => Err(error),
            None => Err(AskError::Broken("it was given up".to_owned())),
        }
    }
}

impl<F> Exchange<F> for Adopt<F> {
    fn outgoing(&self) -> Option<Outgoing<'_, F>> {
        self.link.outgoing()
    }

    fn wrote(&mut self, _now: Now, bytes: usize) {
        self.link.wrote(bytes);
    }

    fn receive(
        &mut self,
        _now: Now,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = (Facts, F)>,
        truncated: bool,
    ) {
        if let Err(error) = self.link.receive(bytes, descriptors, truncated) {
            self.outcome = Some(Err(AskError::Malformed(error.to_string())));
        }
        // What follows the last frame is for the vault.
        while self.outcome.is_none() {
            let frame = match self.link.next_frame() {
                Ok(None) => return,
                Ok(Some(frame)) => frame,
                Err(error) => {
                    self.outcome = Some(Err(AskError::Malformed(error.to_string())));
                    return;
                }
            };
            if let Ok(Message::Failure(failure)) = Message::decode(frame.kind, &frame.body) {
                self.outcome = Some(Err(AskError::of(failure)));
                return;
            }
            match self.taken.take(frame) {
                Ok(None) => {}
                Ok(Some(pid)) => self.outcome = Some(Ok(pid)),
                Err(error) => self.outcome = Some(Err(AskError::Malformed(error.to_string()))),
            }
        }
    }

    fn hangup(&mut self, _now: Now, why: &str) {
        // Also after the last frame: then there is no server to follow any more.
        if !matches!(self.outcome, Some(Err(_))) {
            self.outcome = Some(Err(AskError::Broken(why.to_owned())));
        }
    }
}
