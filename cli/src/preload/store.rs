//! Copies of all that the launcher holds, kept by the service manager while no process of ours lives.

use super::manager::{Kept, Manager};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
use tracing::warn;
use weightd_blocking::driver::{Driver, Watch};
use weightd_core::machine::{Inheritance, MAX_DESCRIPTION, Vault, inventory_names, is_end_name};
use weightd_core::peer::Facts;
use weightd_socket::message::SendError;

/// The name of a description, before its number: the one with the highest holds.
const DESCRIPTION: &str = "description-";
/// How long to wait for a manager that does not get to it before that is said.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long until what a manager did not take is offered again.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// What the manager keeps of ours.
#[derive(Debug)]
pub struct Store {
    manager: Manager,
    names: BTreeSet<String>,
    next_description: u64,
    /// The locks and listeners that it has may be others than those of these names by now.
    ends_are_stale: bool,
    /// What it was given, and whether it is due to be given again.
    given: Option<u64>,
    retry_at: Option<Instant>,
    barriers: Vec<(Watch, OwnedFd, u64)>,
    /// It has no room, which was said.
    is_full: bool,
}

impl Store {
    /// The store of a manager that kept what has these names.
    pub fn new(manager: Manager, kept: &Kept) -> Store {
        let names: BTreeSet<String> = kept.iter().map(|(name, ..)| name.clone()).collect();
        let next_description = names.iter().filter_map(|name| description_number(name)).max();
        Store {
            manager,
            names,
            next_description: next_description.map_or(0, |number| number.saturating_add(1)),
            ends_are_stale: false,
            given: None,
            retry_at: None,
            barriers: Vec::new(),
            is_full: false,
        }
    }

    pub fn manager(&mut self) -> &mut Manager {
        &mut self.manager
    }

    /// Whether what is kept is sure to come back when the unit is started again, so that names must stay
    /// for it.
    pub fn lasts(&self) -> bool {
        !self.is_full && self.manager.store().is_some_and(|most| most > 0)
    }

    /// Gives the manager what the vault holds, where that has changed, and takes back what it does not
    /// hold any more. A release waits until that is done.
    pub fn keep(&mut self, driver: &mut Driver<Vault<OwnedFd>>, now: Instant) -> io::Result<()> {
        let revision = driver.machine().revision();
        if self.manager.store() == Some(0)
            || self.given == Some(revision)
            || self.retry_at.is_some_and(|at| at > now)
        {
            return Ok(());
        }
        if self.given.is_none() {
            // Before the first copy is out: nothing older is kept.
            driver.machine_mut().kept_elsewhere(revision);
        }
        self.retry_at = None;
        match self.give(driver.machine()) {
            Ok(barrier) => {
                let watch = driver.watch(&barrier)?;
                self.barriers.push((watch, barrier, revision));
                self.given = Some(revision);
            }
            Err(error) => {
                self.given.get_or_insert(u64::MAX);
                warn!(
                    "the service manager does not take what is to be kept: {error}; offering it again in 1 s"
                );
                self.retry_at = Some(now + AGAIN_AFTER);
            }
        }
        Ok(())
    }

    /// Locks and listeners are other ones from now on, under the same names.
    pub fn ends_replaced(&mut self) {
        self.ends_are_stale = true;
    }

    /// Takes note of what the manager has done.
    pub fn done(&mut self, driver: &mut Driver<Vault<OwnedFd>>, watched: &[Watch]) -> io::Result<()> {
        for (watch, barrier, revision) in self
            .barriers
            .extract_if(.., |(watch, ..)| watched.contains(watch))
        {
            driver.unwatch(watch, barrier)?;
            driver.machine_mut().kept_elsewhere(revision);
        }
        Ok(())
    }

    /// When to look again, whatever happens.
    pub fn wake_at(&self, now: Instant) -> Option<Instant> {
        self.retry_at.into_iter().chain(self.manager.wake_at(now)).min()
    }

    /// Takes everything back, and waits until that is done: locks are free then.
    pub fn clear(&mut self) {
        let cleared = self.remove(|_| true).and_then(|()| self.manager.barrier());
        let done = cleared.and_then(|barrier| hangs_up(&barrier).map_err(SendError::Io));
        match done {
            Ok(true) => {}
            Ok(false) => warn!("the service manager has not let go what it kept within 2 s"),
            Err(error) => warn!("the service manager keeps descriptors that are of no use: {error}"),
        }
    }

    fn give(&mut self, vault: &Vault<OwnedFd>) -> Result<OwnedFd, SendError> {
        let inventory = vault.inventory();
        let count = inventory.descriptors.len() + 1;
        if let Some(most) = self.manager.store()
            && count > most
        {
            if !self.is_full {
                warn!(
                    "the service manager keeps at most {most} descriptors and there are {count}, so a restart loads \
                     anew: raise FileDescriptorStoreMax="
                );
            }
            self.is_full = true;
            self.remove(|_| true)?;
            return self.manager.barrier();
        }
        if self.ends_are_stale {
            // It would keep both. Until it has the others, nobody could go on with what it has.
            self.remove(is_end_name)?;
            self.ends_are_stale = false;
        }
        for (name, descriptor) in &inventory.descriptors {
            if !self.names.contains(name) {
                self.add(name, descriptor.as_fd())?;
            }
        }
        // The new description, and only then without the old one: at every moment there is one.
        let description = format!("{DESCRIPTION}{}", self.next_description);
        let sealed = weightd_gpu::sealed(&inventory.description);
        let sealed = sealed.map_err(|error| SendError::Io(io::Error::other(error)))?;
        self.add(&description, sealed.as_fd())?;
        self.next_description += 1;
        let wanted: BTreeSet<&String> = inventory.descriptors.iter().map(|(name, _)| name).collect();
        self.remove(|name| name != description && !wanted.contains(&name.to_owned()))?;
        self.manager.barrier()
    }

    fn add(&mut self, name: &str, descriptor: std::os::fd::BorrowedFd<'_>) -> Result<(), SendError> {
        // Not polled: what a device says of itself is no reason to let it go.
        let text = format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}");
        patiently(|| self.manager.say(&text, &[descriptor]))?;
        self.names.insert(name.to_owned());
        Ok(())
    }

    fn remove(&mut self, which: impl Fn(&str) -> bool) -> Result<(), SendError> {
        let names: Vec<String> = self.names.iter().filter(|name| which(name)).cloned().collect();
        for name in names {
            if !name.is_empty() {
                let text = format!("FDSTOREREMOVE=1\nFDNAME={name}");
                patiently(|| self.manager.say(&text, &[]))?;
            }
            self.names.remove(&name);
        }
        Ok(())
    }
}

/// Reads back what was kept. The error says what is wrong with it, in a few words.
pub fn read(kept: Kept) -> Result<Inheritance<OwnedFd>, String> {
    let newest = kept.iter().max_by_key(|(name, ..)| description_number(name));
    let (.., description) = newest
        .filter(|(name, ..)| description_number(name).is_some())
        .ok_or("its description is missing")?;
    let description = weightd_gpu::read_sealed(description, MAX_DESCRIPTION as u64)
        .map_err(|error| format!("its description cannot be read: {error}"))?;
    let names =
        inventory_names(&description).map_err(|error| format!("its description is broken: {error}"))?;
    let mut kept: std::collections::BTreeMap<String, (Facts, OwnedFd)> = kept
        .into_iter()
        .map(|(name, facts, descriptor)| (name, (facts, descriptor)))
        .collect();
    let mut descriptors = Vec::with_capacity(names.len());
    for name in names {
        let descriptor = kept
            .remove(&name)
            .ok_or_else(|| format!("descriptor {name} is missing"))?;
        descriptors.push(descriptor);
    }
    Inheritance::from_inventory(&description, descriptors).map_err(|error| error.to_string())
}

fn description_number(name: &str) -> Option<u64> {
    name.strip_prefix(DESCRIPTION)?.parse().ok()
}

/// Says it again for a while where the manager's queue is full.
fn patiently(mut say: impl FnMut() -> Result<(), SendError>) -> Result<(), SendError> {
    let until = Instant::now() + PATIENCE;
    loop {
        match say() {
            Err(SendError::WouldBlock | SendError::TooManyInFlight) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(5));
            }
            result => return result,
        }
    }
}

/// Whether the other side is closed within a while.
fn hangs_up(barrier: &OwnedFd) -> io::Result<bool> {
    let patience = Timespec::try_from(PATIENCE).map_err(io::Error::other)?;
    let mut polled = [PollFd::new(barrier, PollFlags::empty())];
    Ok(poll(&mut polled, Some(&patience))? > 0)
}
