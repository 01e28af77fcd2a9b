//! Looking after the names in the socket directory, which a cleaner may remove.

use super::Launcher;
use crate::error::CliError;
use crate::node;
use crate::preload::names::{NotPutBack, PutBack};
use std::time::{Duration, Instant};
use tracing::warn;

/// How often they are looked at.
const EVERY: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Names {
    look_at: Instant,
    /// Which could not be put back when that was tried last, and why.
    complaint: Option<String>,
}

impl Names {
    pub fn new(now: Instant) -> Names {
        Names {
            look_at: now + EVERY,
            complaint: None,
        }
    }

    /// Lets the next look be now.
    pub fn look_now(&mut self, now: Instant) {
        self.look_at = now;
    }

    /// When to look next.
    pub fn look_at(&self) -> Instant {
        self.look_at
    }

    /// Whether none waits to be put back.
    pub fn are_there(&self) -> bool {
        self.complaint.is_none()
    }
}

impl Launcher {
    /// Puts names back that somebody removed, with a new server behind all of them, since the one before has
    /// listeners that nobody finds any more. Engines lose their leases with it, as when it dies, and find the
    /// same generations.
    ///
    /// True where any was put back: it has no server yet.
    ///
    /// # Errors
    /// Where a name is another's by now: nobody finds us any more.
    pub(super) fn look_after_names(&mut self, now: Instant) -> Result<bool, CliError> {
        if now < self.names.look_at {
            return Ok(false);
        }
        self.names.look_at = now + EVERY;
        let Some(removed) = self.daemons.removed(&self.setup.dir) else {
            self.names.complaint = None;
            return Ok(false);
        };
        let (place, vault) = (&self.setup.told.place, self.driver.machine_mut());
        let make_dir = || node::create_dir(place).map(drop);
        let mut is_given = false;
        let put_back = self
            .daemons
            .put_back(&self.setup.dir, self.serving, make_dir, |ends| {
                is_given = true;
                match ends {
                    PutBack::Daemon(daemon, ends) => vault.replace_ends(daemon, ends),
                    PutBack::Control(ends) => vault.replace_control(ends),
                }
            });
        if is_given {
            if let Some(store) = &mut self.store {
                store.ends_replaced();
            }
            self.announces = false;
            self.replace_server();
        }
        let dir = self.setup.dir.display();
        match put_back {
            Ok(()) => {
                warn!(
                    "somebody removed or replaced {removed}, which is put back, with a new server; nothing is loaded \
                     again: exclude {dir} from cleaning (a line `x {dir}` in a file of /etc/tmpfiles.d)"
                );
                self.names.complaint = None;
            }
            Err(NotPutBack::Yet(why)) => {
                let complaint =
                    format!("somebody removed or replaced {removed}, which cannot be put back yet: {why}");
                if self.names.complaint.as_ref() != Some(&complaint) {
                    warn!("{complaint}; trying again every {} s", EVERY.as_secs());
                    self.names.complaint = Some(complaint);
                }
            }
            Err(NotPutBack::Ever(why)) => {
                return Err(CliError::Failure(format!(
                    "somebody removed or replaced {removed} while it was in use, which cannot be put back: {why}"
                )));
            }
        }
        Ok(is_given)
    }

    /// Whether a name is gone, so that what went by it could not but fail: the next look is now, unless the last one
    /// could not put it back.
    pub(super) fn is_a_name_gone(&mut self) -> bool {
        let is_gone = self.daemons.removed(&self.setup.dir).is_some();
        if is_gone && self.names.are_there() {
            self.names.look_now(Instant::now());
        }
        is_gone
    }
}
