//! Leasing a generation once more, after the daemon that it was leased from is gone.
//!
//! A server that dies is replaced within moments, and serves the generations that it served. Who has one
//! of them mapped needs nothing but a new lease.

use super::ask::Ask;
use super::client::{Client, Inquiry, Step};
use super::{AttachError, ConnectFailure};
use crate::content::Generation;
use crate::peer::Peer;
use crate::time::{Now, Span};
use crate::wire::message::{ErrorCode, Message, Watch};

/// How long a daemon may take to be back.
pub const RENEWS_WITHIN: Span = Span::secs(5);
/// How long after that a daemon is looked for once more: a service manager may take its time.
const LATER: Span = Span::secs(10);
/// The pause between two tries.
const PAUSE: Span = Span::millis(100);
/// How long one answer may take.
const ANSWERS_WITHIN: Span = Span::secs(2);

/// How a renewal ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Renewed {
    /// The connection is the lease: keep it open for as long as the mapping.
    Leased,
    /// The daemon is lost. What is mapped stays mapped, and nobody counts it any more.
    Lost {
        /// Why.
        why: String,
        /// When to try once more, for as long as the mapping is kept; never, where another generation is
        /// served by now.
        again: Option<Now>,
    },
}

/// See the module.
#[derive(Debug)]
pub struct Renewal<F> {
    generation: Generation,
    uid: u32,
    until: Now,
    inquiry: Inquiry<F>,
}

impl<F> Renewal<F> {
    /// Leases `generation` again, as user `uid`, from a daemon that has [`RENEWS_WITHIN`] to come back.
    pub fn new(now: Now, generation: Generation, uid: u32) -> Renewal<F> {
        Renewal {
            generation,
            uid,
            until: now + RENEWS_WITHIN,
            inquiry: Inquiry::default(),
        }
    }
}

impl<F> Client<F> for Renewal<F> {
    type Next = Renewed;
    type Exchange = Inquiry<F>;

    fn step(&mut self, now: Now) -> Step<Renewed> {
        loop {
            let (why, again) = match self.inquiry.step(now).next() {
                Err(step) => return step,
                Ok(Ok(Message::Watching(_))) => return Step::Next(Renewed::Leased),
                Ok(Ok(other)) => (format!("it answered with a {} message", other.name()), None),
                Ok(Err(none)) => {
                    let error = AttachError::from(none);
                    let (back, next) = (may_be_back(&error), now + PAUSE);
                    if back && next < self.until {
                        self.inquiry.connect_at(next);
                        continue;
                    }
                    (error.to_string(), back.then_some(now + LATER))
                }
            };
            return Step::Next(Renewed::Lost { why, again });
        }
    }

    fn connected(&mut self, now: Now, result: Result<Peer, ConnectFailure>) {
        let watch = Watch {
            generation: Some(self.generation),
        };
        let ask = |peer| Ask::new(now, watch, peer, self.uid, ANSWERS_WITHIN);
        self.inquiry.connected(result.map(ask));
    }

    fn exchange(&mut self) -> &mut Inquiry<F> {
        &mut self.inquiry
    }
}

/// Whether the daemon is on its way, or has too much to do.
fn may_be_back(error: &AttachError) -> bool {
    match error {
        AttachError::Unavailable { .. }
        | AttachError::Local { .. }
        | AttachError::Broken { .. }
        | AttachError::Timeout { .. } => true,
        AttachError::Daemon { code, .. } => *code == ErrorCode::Busy,
        _ => false,
    }
}
