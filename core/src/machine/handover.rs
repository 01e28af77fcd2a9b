//! The publishing side of a channel to a vault: a loader hands over what it loaded.

use super::link::Link;
use super::{Exchange, Outgoing};
use crate::content::Generation;
use crate::peer::Facts;
use crate::text::cut;
use crate::time::{Now, Span};
use crate::wire::Frame;
use crate::wire::message::{DaemonId, Digest, LoadFailed, Loaded, MAX_WORDS, Message, Progress, Publish};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// What became of a publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandoverEvent {
    /// The vault holds it.
    Published {
        /// The daemon.
        daemon: DaemonId,
        /// Its generation.
        generation: Generation,
    },
    /// The vault does not take it.
    Refused {
        /// The daemon.
        daemon: DaemonId,
        /// Why, in one line.
        why: String,
    },
    /// The vault is gone, or broke the protocol: nothing that was not published will be.
    Gone {
        /// Why, in one line.
        why: String,
    },
}

/// How long the vault may take to read or to answer before it counts as gone.
const ANSWERS_WITHIN: Span = Span::secs(30);

/// See the module. One connection, which the driver has made already.
#[derive(Debug)]
pub struct Handover<F> {
    link: Link<F>,
    waiting: BTreeMap<u32, DaemonId>,
    events: VecDeque<HandoverEvent>,
    gone: bool,
    /// Since when something is waited for and nothing moves.
    quiet_since: Option<Now>,
}

impl<F> Default for Handover<F> {
    fn default() -> Self {
        Handover {
            link: Link::default(),
            waiting: BTreeMap::new(),
            events: VecDeque::new(),
            gone: false,
            quiet_since: None,
        }
    }
}

impl<F> Handover<F> {
    /// Hands over content: the descriptors of its manifest and then of its regions.
    pub fn publish(&mut self, publication: Publish, descriptors: Vec<F>) {
        let daemon = publication.daemon;
        match self.link.ask(publication, Some(Arc::new(descriptors))) {
            Ok(request) => drop(self.waiting.insert(request, daemon)),
            Err(error) => {
                let why = error.to_string();
                self.events.push_back(HandoverEvent::Refused { daemon, why });
            }
        }
    }

    /// Says how far the loading of a daemon's region is.
    pub fn progress(&mut self, progress: Progress) {
        self.say(progress);
    }

    /// Says the digest of a daemon's checkpoint.
    pub fn digest(&mut self, digest: Digest) {
        self.say(digest);
    }

    /// Says that a daemon's weights were read, and how.
    pub fn loaded(&mut self, loaded: Loaded) {
        self.say(Loaded {
            checkpoint: cut(&loaded.checkpoint, MAX_WORDS).to_owned(),
            path: cut(&loaded.path, MAX_WORDS).to_owned(),
            ..loaded
        });
    }

    /// Says that loading failed.
    pub fn failed(&mut self, message: impl Into<String>) {
        let message = cut(&message.into(), MAX_WORDS).to_owned();
        self.say(LoadFailed { message });
    }

    /// Queues a message that has no answer.
    fn say(&mut self, message: impl Into<Message>) {
        self.link.ask(message, None).expect("these messages fit a frame");
    }

    /// Whether the vault is gone: nothing can be said any more.
    pub fn is_gone(&self) -> bool {
        self.gone
    }

    /// Whether everything was sent and answered.
    pub fn is_settled(&self) -> bool {
        self.gone || (self.link.is_flushed() && self.waiting.is_empty())
    }

    /// Until when to wait for the vault; `None` when there is nothing to wait for. A vault that let the
    /// moment pass is gone.
    pub fn due(&mut self, now: Now) -> Option<Now> {
        if self.is_settled() {
            self.quiet_since = None;
            return None;
        }
        let due = *self.quiet_since.get_or_insert(now) + ANSWERS_WITHIN;
        if now < due {
            return Some(due);
        }
        self.end(format!("the launcher did not answer within {ANSWERS_WITHIN}"));
        None
    }

    /// What has become known since the last call.
    pub fn poll(&mut self) -> Option<HandoverEvent> {
        self.events.pop_front()
    }

    fn answered(&mut self, frame: &Frame<F>) {
        let message = Message::decode(frame.kind, &frame.body);
        let Some(daemon) = self.waiting.remove(&frame.request) else {
            return self.end(match message {
                Ok(Message::Failure(failure)) => failure.why(),
                _ => "the launcher answered what was not asked".to_owned(),
            });
        };
        self.events.push_back(match message {
            Ok(Message::Published(published)) => HandoverEvent::Published {
                daemon,
                generation: published.generation,
            },
            Ok(Message::Failure(failure)) => HandoverEvent::Refused {
                daemon,
                why: failure.why(),
            },
            Ok(other) => {
                let why = format!("the launcher answered with a {} message", other.name());
                HandoverEvent::Refused { daemon, why }
            }
            Err(error) => HandoverEvent::Refused {
                daemon,
                why: error.to_string(),
            },
        });
    }

    fn end(&mut self, why: String) {
        if !self.gone {
            self.gone = true;
            self.link.close();
            self.events.push_back(HandoverEvent::Gone { why });
        }
    }
}

impl<F> Exchange<F> for Handover<F> {
    fn outgoing(&self) -> Option<Outgoing<'_, F>> {
        if self.gone { None } else { self.link.outgoing() }
    }

    fn wrote(&mut self, _now: Now, bytes: usize) {
        self.link.wrote(bytes);
        if bytes > 0 {
            self.quiet_since = None;
        }
    }

    fn receive(
        &mut self,
        _now: Now,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = (Facts, F)>,
        truncated: bool,
    ) {
        if self.gone {
            return;
        }
        self.quiet_since = None;
        if let Err(error) = self.link.receive(bytes, descriptors, truncated) {
            return self.end(error.to_string());
        }
        while !self.gone {
            match self.link.next_frame() {
                Ok(None) => return,
                Err(error) => self.end(error.to_string()),
                Ok(Some(frame)) => self.answered(&frame),
            }
        }
    }

    fn hangup(&mut self, _now: Now, why: &str) {
        self.end(why.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest() -> Digest {
        Digest {
            daemon: 0,
            digest: [1; 32],
        }
    }

    #[test]
    fn a_vault_that_reads_nothing_for_30_s_is_gone() {
        let mut publish: Handover<u32> = Handover::default();
        assert_eq!(publish.due(Now(0)), None, "nothing is waited for");
        publish.digest(digest());
        let start = Now(5_000_000);
        let due = start + ANSWERS_WITHIN;
        assert_eq!(publish.due(start), Some(due));
        // Whatever is read starts the wait anew.
        let later = start + Span::secs(20);
        publish.wrote(later, 1);
        assert_eq!(publish.due(later), Some(later + ANSWERS_WITHIN));
        assert_eq!(publish.due(later + ANSWERS_WITHIN), None);
        assert!(matches!(publish.poll(), Some(HandoverEvent::Gone { .. })));
        assert!(publish.is_gone() && publish.is_settled());
    }

    #[test]
    fn a_wait_that_ended_well_does_not_count_for_the_next() {
        let mut publish: Handover<u32> = Handover::default();
        publish.digest(digest());
        publish.due(Now(0));
        let bytes = publish.outgoing().map_or(0, |outgoing| outgoing.bytes.len());
        publish.wrote(Now(1), bytes);
        assert_eq!(publish.due(Now(2)), None);
        publish.digest(digest());
        let much_later = Now(0) + Span::secs(1000);
        assert_eq!(publish.due(much_later), Some(much_later + ANSWERS_WITHIN));
    }
}
