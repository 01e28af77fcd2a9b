//! One daemon: what it serves, who leases it.

use super::super::ConnId;
use super::super::reap::Bundle;
use crate::content::Generation;
use crate::wire::message::{ContentInfo, DaemonInfo, Holds};
use std::collections::BTreeMap;

/// Content that is being served.
#[derive(Debug)]
pub(super) struct Served<F> {
    pub generation: Generation,
    pub info: ContentInfo,
    /// The manifest, then the regions.
    pub descriptors: Bundle<F>,
}

#[derive(Debug)]
pub(super) enum Slot<F> {
    Content(Served<F>),
    /// Content follows; until it is here, who connects waits in this listener's backlog.
    Awaited(F),
    Without(Holds),
}

#[derive(Debug)]
pub(super) struct Daemon<F> {
    pub info: DaemonInfo,
    /// Held, not used: the lock lives as long as its last descriptor.
    pub lock: F,
    pub slot: Slot<F>,
    /// Bytes and open leases of every generation that has any.
    leases: BTreeMap<Generation, (u64, u32)>,
    pub watches: u32,
    /// The request that tells the vault of an import that failed, until it is answered.
    pub reported: Option<u32>,
    pub served: u64,
    pub reloads: u64,
}

impl<F> Daemon<F> {
    pub fn new(info: DaemonInfo, slot: Slot<F>, lock: F) -> Daemon<F> {
        Daemon {
            info,
            lock,
            slot,
            leases: BTreeMap::new(),
            watches: 0,
            reported: None,
            served: 0,
            reloads: 0,
        }
    }

    pub fn holds(&self) -> Holds {
        match &self.slot {
            Slot::Content(served) => Holds::Content(served.generation),
            Slot::Awaited(_) => Holds::Empty,
            Slot::Without(holds) => *holds,
        }
    }

    pub fn content(&self) -> Option<&Served<F>> {
        match &self.slot {
            Slot::Content(served) => Some(served),
            Slot::Awaited(_) | Slot::Without(_) => None,
        }
    }

    /// Leases the current generation; false when another is meant.
    pub fn lease(&mut self, generation: Generation) -> bool {
        let bytes = match &self.slot {
            Slot::Content(served) if served.generation == generation => served.info.bytes(),
            _ => return false,
        };
        self.leases.entry(generation).or_insert((bytes, 0)).1 += 1;
        true
    }

    pub fn unlease(&mut self, generation: Generation) {
        if let Some((_, count)) = self.leases.get_mut(&generation) {
            *count -= 1;
            if *count == 0 {
                self.leases.remove(&generation);
            }
        }
    }

    pub fn open_leases(&self) -> u32 {
        self.leases.values().map(|(_, count)| count).sum()
    }

    pub fn leased_bytes(&self) -> u64 {
        self.leases
            .values()
            .fold(0, |sum, (bytes, _)| sum.saturating_add(*bytes))
    }
}

/// A release under way: answered when the vault has let go and our own descriptors are closed.
#[derive(Debug, Default)]
pub(super) struct PendingRelease {
    /// Who asked, with their request ids.
    pub waiters: Vec<(ConnId, u32)>,
    pub closed_here: bool,
    /// The request that the vault has not answered yet.
    pub asked_vault: Option<u32>,
}
