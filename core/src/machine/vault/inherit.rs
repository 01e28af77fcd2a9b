//! What a vault starts with when it does not start with nothing: the holdings of a launcher that is
//! gone, from the server that outlived it or from whoever kept copies.
//!
//! Both come as the frames that arm a server, each with its descriptors, and both are checked alike.

use super::Content;
use crate::content::{Comparison, Generation};
use crate::machine::descriptors::check_ends;
use crate::machine::link::Link;
use crate::machine::{DescriptorError, Ends, check_descriptors};
use crate::peer::{Facts, FileKind};
use crate::wire::message::{DaemonId, DaemonInfo, Define, Holds, Message, MessageError, Publish};
use crate::wire::{Frame, FrameError};
use std::sync::Arc;
use thiserror::Error;

/// The holdings of a launcher that is gone.
#[derive(Debug)]
pub struct Inheritance<F> {
    /// The control socket's lock and listener; absent where no server came along.
    pub control: Option<Ends<F>>,
    /// The daemons, by their numbers.
    pub daemons: Vec<Inherited<F>>,
    /// The server that came along.
    pub server: Option<Follower<F>>,
}

/// One daemon of an [`Inheritance`].
#[derive(Debug)]
pub struct Inherited<F> {
    /// What it is.
    pub info: DaemonInfo,
    /// Its lock and listener.
    pub ends: Ends<F>,
    pub(super) content: Result<Content<F>, Holds>,
}

/// A server that follows whoever has this.
#[derive(Debug)]
pub struct Follower<F> {
    /// Its process, as it says.
    pub pid: u32,
    /// The connection, as far as it was read.
    pub(in crate::machine) link: Link<F>,
}

/// Why frames and descriptors are no inheritance.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InheritError {
    /// Framing is broken, or descriptors are missing or left over.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A body does not decode.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// The descriptors of a content are not what is said of them.
    #[error("daemon {daemon}: {error}")]
    Content {
        /// The daemon.
        daemon: DaemonId,
        /// What is wrong.
        error: DescriptorError,
    },
    /// No lock and listener where these belong.
    #[error("a {name} message came with {found:?} instead of a lock and a listener")]
    Ends {
        /// The message's name.
        name: &'static str,
        /// What came.
        found: Vec<FileKind>,
    },
    /// A message that does not belong there.
    #[error("a {name} message is out of place")]
    OutOfPlace {
        /// The message's name.
        name: &'static str,
    },
    /// The end came before all that was announced.
    #[error("the content of daemon {daemon} was announced and did not come")]
    Missing {
        /// The daemon.
        daemon: DaemonId,
    },
    /// Bytes that end in the middle of a frame, or before the last one.
    #[error("it is cut off")]
    CutOff,
}

impl<F> Inherited<F> {
    /// What it holds.
    pub fn holds(&self) -> Holds {
        match &self.content {
            Ok(content) => Holds::Content(content.generation),
            Err(holds) => *holds,
        }
    }
}

impl<F> Inheritance<F> {
    /// Whether this is what a launcher wants that would serve `wanted`: the same daemons, each with the
    /// same key; where clients publish, the key is theirs, and its placement counts alone. `Different`
    /// names what differs: fields of the key, and beside them `daemons` (their number), `socket`,
    /// `global_rank`, `device_uuid`, `no_release` and `publish`.
    pub fn compare(&self, wanted: &[DaemonInfo]) -> Comparison {
        let mut fields: Vec<String> = Vec::new();
        let mut unknown = false;
        if wanted.len() != self.daemons.len() {
            fields.push("daemons".to_owned());
        }
        for (wanted, Inherited { info, .. }) in wanted.iter().zip(&self.daemons) {
            let differs = [
                ("socket", wanted.socket != info.socket),
                ("global_rank", wanted.global_rank != info.global_rank),
                ("device_uuid", wanted.device_uuid != info.device_uuid),
                ("no_release", wanted.no_release != info.no_release),
                ("publish", wanted.publish != info.publish),
            ];
            let differs = differs.into_iter().filter(|(_, differs)| *differs);
            fields.extend(differs.map(|(name, _)| name.to_owned()));
            if wanted.publish.or(info.publish).is_some() {
                fields.extend(wanted.key.misplaced(&info.key));
                continue;
            }
            match wanted.key.compare(&info.key) {
                Comparison::Same => {}
                Comparison::Unknown => unknown = true,
                Comparison::Different(names) => fields.extend(names),
            }
        }
        let mut seen = std::collections::BTreeSet::new();
        fields.retain(|field| seen.insert(field.clone()));
        match (fields.is_empty(), unknown) {
            (false, _) => Comparison::Different(fields),
            (true, true) => Comparison::Unknown,
            (true, false) => Comparison::Same,
        }
    }
}

/// Takes the frames of an inheritance, one after another.
#[derive(Debug)]
pub(super) struct Inheriting<F> {
    control: Option<Ends<F>>,
    daemons: Vec<Inherited<F>>,
}

impl<F> Default for Inheriting<F> {
    fn default() -> Self {
        Inheriting {
            control: None,
            daemons: Vec::new(),
        }
    }
}

impl<F> Inheriting<F> {
    /// Takes a frame that is no failure; returns the server's process when that was the last.
    pub fn take(&mut self, frame: Frame<F>) -> Result<Option<u32>, InheritError> {
        let Frame {
            kind,
            body,
            descriptors,
            ..
        } = frame;
        match Message::decode(kind, &body)? {
            Message::Control(_) if self.control.is_none() => {
                self.control = Some(ends("Control", descriptors)?);
            }
            Message::Define(define) => self.define(define, ends("Define", descriptors)?)?,
            Message::Publish(publish) => self.content(publish, descriptors)?,
            Message::Adopted(adopted) if descriptors.is_empty() => {
                self.complete()?;
                return Ok(Some(adopted.pid));
            }
            other => return Err(InheritError::OutOfPlace { name: other.name() }),
        }
        Ok(None)
    }

    /// What was taken.
    pub fn finish(self, server: Option<Follower<F>>) -> Inheritance<F> {
        Inheritance {
            control: self.control,
            daemons: self.daemons,
            server,
        }
    }

    fn define(&mut self, define: Define, ends: Ends<F>) -> Result<(), InheritError> {
        // They are numbered from 0, and come in that order.
        if define.daemon as usize != self.daemons.len() {
            return Err(InheritError::OutOfPlace { name: "Define" });
        }
        self.daemons.push(Inherited {
            info: define.info,
            ends,
            content: Err(define.holds),
        });
        Ok(())
    }

    fn content(&mut self, publish: Publish, descriptors: Vec<(Facts, F)>) -> Result<(), InheritError> {
        let out_of_place = InheritError::OutOfPlace { name: "Publish" };
        let Some(daemon) = self.daemons.get_mut(publish.daemon as usize) else {
            return Err(out_of_place);
        };
        let generation = match (&daemon.content, publish.generation) {
            (Err(Holds::Content(announced)), Some(generation)) if *announced == generation => generation,
            _ => return Err(out_of_place),
        };
        check_descriptors(&publish.content, descriptors.iter().map(|(facts, _)| facts)).map_err(|error| {
            InheritError::Content {
                daemon: publish.daemon,
                error,
            }
        })?;
        daemon.info.key = publish.key;
        daemon.content = Ok(Content {
            generation,
            info: publish.content,
            descriptors: Arc::new(
                descriptors
                    .into_iter()
                    .map(|(_, descriptor)| descriptor)
                    .collect(),
            ),
            lives_with: None,
        });
        Ok(())
    }

    fn complete(&mut self) -> Result<(), InheritError> {
        if self.daemons.is_empty() {
            return Err(InheritError::OutOfPlace { name: "Adopted" });
        }
        for (number, daemon) in (0..).zip(&mut self.daemons) {
            match &daemon.content {
                Err(Holds::Content(_)) => return Err(InheritError::Missing { daemon: number }),
                Ok(content) if content.info.is_legacy() => {
                    // Its publisher is gone, and the memory with it.
                    let generation: Generation = content.generation;
                    daemon.content = Err(Holds::Lost(generation));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn ends<F>(name: &'static str, descriptors: Vec<(Facts, F)>) -> Result<Ends<F>, InheritError> {
    check_ends(descriptors).map_err(|(found, _)| InheritError::Ends { name, found })
}
