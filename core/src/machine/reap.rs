//! Letting descriptors go without waiting for it.
//!
//! The last close of a large region can take a second, so descriptors leave the machine as
//! [`Output::Discard`](super::Output::Discard) and are closed elsewhere. A descriptor that a queued
//! reply still needs leaves once that reply is gone.

use crate::peer::Facts;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Names a descriptor that is being closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiscardId(pub u64);

/// The descriptors of one thing (a content, a lock with its listener), shared with the replies
/// that are sending them.
pub(super) type Bundle<F> = Arc<Vec<F>>;

/// Descriptors on their way out. `T` says what waits for a bundle to be closed.
#[derive(Debug)]
pub(super) struct Reaper<F, T> {
    next_id: u64,
    /// Still needed by a queued reply.
    shared: Vec<(Bundle<F>, Option<T>)>,
    /// To be handed out by `poll`.
    ready: VecDeque<(DiscardId, F)>,
    /// Handed out, not reported closed; the number is an index into `waiting`.
    closing: BTreeMap<DiscardId, u64>,
    next_batch: u64,
    waiting: BTreeMap<u64, (usize, Option<T>)>,
    done: Vec<T>,
}

impl<F, T> Default for Reaper<F, T> {
    fn default() -> Self {
        Reaper {
            next_id: 0,
            shared: Vec::new(),
            ready: VecDeque::new(),
            closing: BTreeMap::new(),
            next_batch: 0,
            waiting: BTreeMap::new(),
            done: Vec::new(),
        }
    }
}

impl<F, T> Reaper<F, T> {
    /// Lets `bundle` go; `then` comes back from [`closed`](Reaper::closed) when all of it is closed.
    pub fn bury(&mut self, bundle: Bundle<F>, then: Option<T>) {
        self.shared.push((bundle, then));
        self.sweep();
    }

    /// Lets received descriptors go.
    pub fn bury_received(&mut self, descriptors: impl IntoIterator<Item = (Facts, F)>) {
        let descriptors = descriptors.into_iter();
        self.bury_all(descriptors.map(|(_, descriptor)| descriptor).collect());
    }

    /// Lets descriptors go that nobody waits for.
    pub fn bury_all(&mut self, descriptors: Vec<F>) {
        if !descriptors.is_empty() {
            self.bury(Arc::new(descriptors), None);
        }
    }

    /// Looks again for bundles that no reply needs any more. Call after replies are gone.
    pub fn sweep(&mut self) {
        for (bundle, then) in std::mem::take(&mut self.shared) {
            match Arc::try_unwrap(bundle) {
                Err(bundle) => self.shared.push((bundle, then)),
                Ok(descriptors) if descriptors.is_empty() => self.done.extend(then),
                Ok(descriptors) => {
                    self.waiting.insert(self.next_batch, (descriptors.len(), then));
                    for descriptor in descriptors {
                        let id = DiscardId(self.next_id);
                        self.next_id += 1;
                        self.closing.insert(id, self.next_batch);
                        self.ready.push_back((id, descriptor));
                    }
                    self.next_batch += 1;
                }
            }
        }
    }

    /// The next descriptor to hand out.
    pub fn next_discard(&mut self) -> Option<(DiscardId, F)> {
        self.ready.pop_front()
    }

    /// The driver has closed it.
    ///
    /// # Panics
    /// When `id` was never handed out, or was reported before: a bug in the driver.
    pub fn discarded(&mut self, id: DiscardId) {
        let batch = self
            .closing
            .remove(&id)
            .expect("a driver reports each discarded descriptor once");
        let (left, _) = self
            .waiting
            .get_mut(&batch)
            .expect("a batch lasts as long as its descriptors");
        *left -= 1;
        if *left == 0
            && let Some((_, then)) = self.waiting.remove(&batch)
        {
            self.done.extend(then);
        }
    }

    /// What waited for bundles that are closed now.
    pub fn closed(&mut self) -> Vec<T> {
        std::mem::take(&mut self.done)
    }
}
