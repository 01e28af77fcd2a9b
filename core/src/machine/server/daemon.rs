//! One daemon: what it serves, who leases it.

use super::super::ConnId;
use super::super::reap::Bundle;
use super::publishing::Publication;
use super::tally::Tally;
use crate::content::Generation;
use crate::machine::Ends;
use crate::wire::message::{ContentInfo, DaemonId, DaemonInfo, Define, Expects, Holds, Leased, Publish};
use std::collections::BTreeMap;
use std::sync::Arc;

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
    /// Content follows; until it is here, who connects waits in the listener's backlog.
    Awaited,
    Without(Holds),
}

#[derive(Debug)]
pub(super) struct Daemon<F> {
    pub info: DaemonInfo,
    pub ends: Ends<F>,
    pub slot: Slot<F>,
    /// Bytes and open leases of every generation that has any.
    leases: BTreeMap<Generation, (u64, u32)>,
    /// The request that tells the vault of an import that failed, until it is answered.
    pub reported: Option<u32>,
    /// What a client publishes, until that is answered.
    pub publication: Option<Publication>,
    pub served: u64,
    pub reloads: u64,
    pub tally: Tally,
}

impl<F> Daemon<F> {
    pub fn new(info: DaemonInfo, slot: Slot<F>, ends: Ends<F>) -> Daemon<F> {
        Daemon {
            info,
            ends,
            slot,
            leases: BTreeMap::new(),
            reported: None,
            publication: None,
            served: 0,
            reloads: 0,
            tally: Tally::default(),
        }
    }

    pub fn holds(&self) -> Holds {
        match &self.slot {
            Slot::Content(served) => Holds::Content(served.generation),
            Slot::Awaited => Holds::Empty,
            Slot::Without(holds) => *holds,
        }
    }

    pub fn content(&self) -> Option<&Served<F>> {
        match &self.slot {
            Slot::Content(served) => Some(served),
            Slot::Awaited | Slot::Without(_) => None,
        }
    }

    /// What defines it for another: a server, or the next launcher.
    pub fn define(&self, daemon: DaemonId) -> Define {
        Define {
            daemon,
            info: self.info.clone(),
            holds: self.holds(),
        }
    }

    /// What hands its content to another.
    pub fn publish(&self, daemon: DaemonId) -> Option<(Publish, Bundle<F>)> {
        let served = self.content()?;
        let publish = Publish {
            daemon,
            generation: Some(served.generation),
            expects: Expects::Empty,
            key: self.info.key.clone(),
            content: served.info.clone(),
        };
        Some((publish, Arc::clone(&served.descriptors)))
    }

    /// Whether this generation is the current one.
    pub fn serves(&self, generation: Generation) -> bool {
        self.content()
            .is_some_and(|served| served.generation == generation)
    }

    /// Leases the current generation.
    pub fn lease(&mut self) {
        if let Slot::Content(served) = &self.slot {
            let lease = self.leases.entry(served.generation);
            lease.or_insert((served.info.bytes(), 0)).1 += 1;
        }
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

    /// The generations with open leases, oldest first.
    pub fn leased(&self) -> impl DoubleEndedIterator<Item = Leased> + ExactSizeIterator {
        self.leases.iter().map(|(&generation, &(bytes, leases))| Leased {
            generation,
            bytes,
            leases,
        })
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
