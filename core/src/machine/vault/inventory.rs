//! Copies of all that a vault holds, for whoever keeps them while no process of ours lives: a
//! description in bytes, and the descriptors by name.
//!
//! The description consists of the frames that arm a server. Read back, it is believed as little as a
//! peer is.

use super::Vault;
use super::inherit::{InheritError, Inheritance, Inheriting};
use crate::content::Generation;
use crate::peer::Facts;
use crate::wire::message::{Adopted, Define, Message, Publish};
use crate::wire::{Decoder, Frame, HEADER_BYTES, Header};

/// The longest description that is read, in bytes: more than a frame for each of a thousand daemons
/// and contents.
pub const MAX_DESCRIPTION: usize = 8 << 20;

const END_NAMES: [&str; 2] = ["lock", "listener"];

/// What to keep. See the module.
#[derive(Debug)]
pub struct Inventory<'a, F> {
    /// The description.
    pub description: Vec<u8>,
    /// The descriptors. A name is made of letters, digits and dashes, and stands for the same file as
    /// long as it stays in the inventory; but for those of [ends](is_end_name) that were
    /// [replaced](Vault::replace_ends), which keep their names.
    pub descriptors: Vec<(String, &'a F)>,
}

impl<F> Vault<F> {
    /// All that the vault holds now; worth keeping again when [`revision`](Vault::revision) has changed.
    pub fn inventory(&self) -> Inventory<'_, F> {
        let mut kept = Inventory {
            description: Vec::new(),
            descriptors: Vec::new(),
        };
        for (&daemon, holding) in &self.holdings {
            let define = holding.define(daemon);
            let descriptors = [holding.ends.lock(), holding.ends.listener()];
            kept.add(end_names(&define), define.into(), descriptors.into_iter());
        }
        for (&daemon, holding) in &self.holdings {
            if let (Some((publish, _)), Ok(content)) = (holding.publish(daemon), &holding.content) {
                let names = content_names(&publish, content.descriptors.len());
                kept.add(names, publish.into(), content.descriptors.iter());
            }
        }
        kept.add(Vec::new(), Adopted { pid: 0 }.into(), [].into_iter());
        kept
    }
}

impl<'a, F> Inventory<'a, F> {
    fn add(&mut self, names: Vec<String>, message: Message, descriptors: impl Iterator<Item = &'a F>) {
        let frame = message.frame(0, names.len());
        self.description
            .extend(frame.expect("what came in a frame fits one"));
        self.descriptors.extend(names.into_iter().zip(descriptors));
    }
}

/// The names of the descriptors that belong to a description, in the order in which
/// [`Inheritance::from_inventory`] takes them.
pub fn inventory_names(description: &[u8]) -> Result<Vec<String>, InheritError> {
    let mut names = Vec::new();
    for frame in frames(description)? {
        match Message::decode(frame.kind, frame.body)? {
            Message::Define(define) => names.extend(end_names(&define)),
            Message::Publish(publish) => names.extend(content_names(&publish, frame.descriptors)),
            _ => {}
        }
    }
    Ok(names)
}

impl<F> Inheritance<F> {
    /// Reads back what [`Vault::inventory`] made: the description, and the descriptors that
    /// [`inventory_names`] names. No server comes along, and so no control socket.
    pub fn from_inventory(
        description: &[u8],
        descriptors: impl IntoIterator<Item = (Facts, F)>,
    ) -> Result<Inheritance<F>, InheritError> {
        let mut descriptors = descriptors.into_iter();
        let mut taken = Inheriting::default();
        let mut complete = false;
        for frame in frames(description)? {
            if complete {
                return Err(InheritError::CutOff);
            }
            let mut decoder = Decoder::default();
            decoder.push(frame.bytes, descriptors.by_ref().take(frame.descriptors), false)?;
            let whole: Frame<F> = decoder.next_frame()?.ok_or(InheritError::CutOff)?;
            complete = taken.take(whole)?.is_some();
        }
        if complete {
            Ok(taken.finish(None))
        } else {
            Err(InheritError::CutOff)
        }
    }
}

struct Described<'a> {
    kind: u16,
    body: &'a [u8],
    /// With the header.
    bytes: &'a [u8],
    descriptors: usize,
}

/// Cuts a description into frames.
fn frames(mut description: &[u8]) -> Result<Vec<Described<'_>>, InheritError> {
    if description.len() > MAX_DESCRIPTION {
        return Err(InheritError::CutOff);
    }
    let mut frames = Vec::new();
    while !description.is_empty() {
        let header = Header::decode(description)?.ok_or(InheritError::CutOff)?;
        let (bytes, rest) = description
            .split_at_checked(HEADER_BYTES + header.body)
            .ok_or(InheritError::CutOff)?;
        frames.push(Described {
            kind: header.kind,
            body: &bytes[HEADER_BYTES..],
            bytes,
            descriptors: header.descriptors,
        });
        description = rest;
    }
    Ok(frames)
}

fn end_names(define: &Define) -> Vec<String> {
    END_NAMES
        .map(|end| format!("daemon{}-{end}", define.daemon))
        .into()
}

/// Whether this is the name of a daemon's lock or listener.
pub fn is_end_name(name: &str) -> bool {
    let number_and_end = name.strip_prefix("daemon").and_then(|rest| rest.split_once('-'));
    number_and_end.is_some_and(|(_, end)| END_NAMES.contains(&end))
}

/// A generation names its content in all vaults, and one content only.
fn content_names(publish: &Publish, descriptors: usize) -> Vec<String> {
    let Generation { epoch, number } = publish.generation.unwrap_or(Generation { epoch: 0, number: 0 });
    let name = |index: usize| format!("content{epoch:016x}-{number}-{index}");
    (0..descriptors).map(name).collect()
}
