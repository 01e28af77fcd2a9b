//! The publishing side of a channel to a vault: a loader hands over what it loaded.

use super::link::Link;
use super::{Exchange, Outgoing};
use crate::content::Generation;
use crate::peer::Facts;
use crate::time::Now;
use crate::wire::Frame;
use crate::wire::message::{DaemonId, Digest, LoadFailed, Message, Progress, Publish as Publication};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// What became of a publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublishEvent {
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

/// The longest reason for a failed load, in characters.
const MAX_REASON: usize = 4096;

/// See the module. One connection, which the driver has made already.
#[derive(Debug)]
pub struct Publish<F> {
    link: Link<F>,
    waiting: BTreeMap<u32, DaemonId>,
    events: VecDeque<PublishEvent>,
    gone: bool,
}

impl<F> Default for Publish<F> {
    fn default() -> Self {
        Publish {
            link: Link::default(),
            waiting: BTreeMap::new(),
            events: VecDeque::new(),
            gone: false,
        }
    }
}

impl<F> Publish<F> {
    /// Hands over content: the descriptors of its manifest and then of its regions.
    pub fn publish(&mut self, publication: Publication, descriptors: Vec<F>) {
        let daemon = publication.daemon;
        match self.link.ask(publication, Some(Arc::new(descriptors))) {
            Ok(request) => drop(self.waiting.insert(request, daemon)),
            Err(error) => {
                let why = error.to_string();
                self.events.push_back(PublishEvent::Refused { daemon, why });
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

    /// Says that loading failed.
    pub fn failed(&mut self, message: impl Into<String>) {
        let message = message.into().chars().take(MAX_REASON).collect();
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

    /// What has become known since the last call.
    pub fn poll(&mut self) -> Option<PublishEvent> {
        self.events.pop_front()
    }

    fn answered(&mut self, frame: &Frame<F>) {
        let message = Message::decode(frame.kind, &frame.body);
        let Some(daemon) = self.waiting.remove(&frame.request) else {
            return self.end(match message {
                Ok(Message::Failure(failure)) => failure.message,
                _ => "the launcher answered what was not asked".to_owned(),
            });
        };
        self.events.push_back(match message {
            Ok(Message::Published(published)) => PublishEvent::Published {
                daemon,
                generation: published.generation,
            },
            Ok(Message::Failure(failure)) => PublishEvent::Refused {
                daemon,
                why: failure.message,
            },
            Ok(other) => {
                let why = format!("the launcher answered with a {} message", other.name());
                PublishEvent::Refused { daemon, why }
            }
            Err(error) => PublishEvent::Refused {
                daemon,
                why: error.to_string(),
            },
        });
    }

    fn end(&mut self, why: String) {
        if !self.gone {
            self.gone = true;
            self.link.close();
            self.events.push_back(PublishEvent::Gone { why });
        }
    }
}

impl<F> Exchange<F> for Publish<F> {
    fn outgoing(&self) -> Option<Outgoing<'_, F>> {
        if self.gone { None } else { self.link.outgoing() }
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
        if self.gone {
            return;
        }
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
