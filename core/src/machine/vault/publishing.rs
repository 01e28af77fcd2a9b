//! Content that comes in: from a loader, and, where clients may publish, from them by way of the server.

use super::{Content, Holding, Vault, VaultEvent};
use crate::content::{Comparison, Difference, Generation, MAX_KEY};
use crate::machine::descriptors::taken;
use crate::machine::{ConnId, Origin, check_descriptors};
use crate::peer::Facts;
use crate::time::Now;
use crate::wire::message::{ErrorCode, Expects, Publish, Published};
use std::sync::Arc;

impl<F> Vault<F> {
    /// Stores what was published, says so, and hands it to the server. Whatever becomes of the answer, from
    /// then on it is held.
    pub(super) fn publish(
        &mut self,
        now: Now,
        (id, origin): (ConnId, Origin),
        request: u32,
        publish: Publish,
        descriptors: &mut Vec<(Facts, F)>,
    ) {
        let checked = check_descriptors(&publish.content, descriptors.iter().map(|(facts, _)| facts));
        let daemon = publish.daemon;
        let refusal = match (self.holdings.get(&daemon), checked) {
            (None, _) => Some((ErrorCode::Malformed, format!("there is no daemon {daemon}"))),
            (_, Err(error)) => Some((ErrorCode::BadDescriptors, error.to_string())),
            // It came in a frame, but others would have to carry it with more.
            (Some(_), Ok(())) if !publish.key.fits() => {
                let why = format!("the key takes more than {MAX_KEY} bytes: shorten what `extra` says");
                Some((ErrorCode::Malformed, why))
            }
            (Some(holding), Ok(())) => not_from_clients(holding, &publish)
                .filter(|_| origin == Origin::Server)
                .map(|why| (ErrorCode::NotAllowed, why.to_owned()))
                .or_else(|| conflict(holding, &publish).map(|why| (ErrorCode::Conflict, why))),
        };
        if let Some((code, why)) = refusal {
            return self.refuse(id, request, code, &why);
        }
        let generation = Generation {
            epoch: self.epoch,
            number: self.next_number,
        };
        self.next_number += 1;
        let (tensors, bytes) = (publish.content.tensors, publish.content.bytes());
        let mut replaced = None;
        if let Some(holding) = self.holdings.get_mut(&daemon) {
            let known = holding.info.key.checkpoint.digest;
            let same = holding.info.key.compare(&publish.key) == Comparison::Same;
            holding.info.key = publish.key;
            // A digest that came before the content is still that of the same files.
            if same && holding.info.key.checkpoint.digest.is_none() {
                holding.info.key.checkpoint.digest = known;
            }
            holding.mirrored = false;
            let content = Content {
                generation,
                lives_with: publish.content.is_legacy().then_some(id),
                info: publish.content,
                descriptors: Arc::new(taken(descriptors)),
            };
            if let Ok(old) = std::mem::replace(&mut holding.content, Ok(content)) {
                replaced = Some(old.generation);
                self.reaper.bury(old.descriptors, None);
            }
        }
        self.was_armed = false;
        self.revision += 1;
        self.reply(id, request, Published { daemon, generation });
        self.event(match origin {
            Origin::Server => VaultEvent::Published {
                daemon,
                generation,
                replaced,
                tensors,
                bytes,
            },
            _ => VaultEvent::Stored { daemon, generation },
        });
        self.arm(now, daemon);
    }
}

/// Why no client may publish this.
fn not_from_clients<F>(holding: &Holding<F>, publish: &Publish) -> Option<&'static str> {
    if holding.is_the_loaders() {
        Some("this daemon takes its content from its launcher only: publish to one of `weightd serve`")
    } else if publish.content.is_legacy() {
        Some("memory of a legacy CUDA IPC handle goes with its publisher: publish memory with descriptors")
    } else {
        None
    }
}

/// Why this publish may not replace what the holding has.
fn conflict<F>(holding: &Holding<F>, publish: &Publish) -> Option<String> {
    if publish.generation.is_some() {
        return Some("only the vault names generations".to_owned());
    }
    let ours = &holding.info.key;
    let fields = match ours.compare(&publish.key) {
        // What is published for a daemon's place decides the rest of its key.
        _ if !holding.is_the_loaders() => ours.misplaced(&publish.key),
        Comparison::Different(fields) => fields,
        Comparison::Same | Comparison::Unknown => Vec::new(),
    };
    if !fields.is_empty() {
        return Some(format!(
            "the content's key differs from the daemon's in {}",
            Difference::list(&ours.differences(&publish.key, &fields))
        ));
    }
    let current = holding.content.as_ref().ok().map(|content| content.generation);
    match (publish.expects, current) {
        (Expects::Empty, None) => None,
        (Expects::Generation(expected), Some(current)) if expected == current => None,
        (_, Some(current)) => Some(format!("generation {current} was published meanwhile")),
        (_, None) => Some("the content that this was to replace is gone".to_owned()),
    }
}
