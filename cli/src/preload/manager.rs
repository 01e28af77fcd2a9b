//! The service manager that started the launcher (systemd), where one did: readiness, watchdog, and the
//! descriptors that it keeps. The protocol is that of sd_notify(3), sd_listen_fds(3) and
//! sd_watchdog_enabled(3).

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};
use tracing::{debug, warn};
use weightd_core::peer::Facts;
use weightd_socket::inherited;
use weightd_socket::message::SendError;
use weightd_socket::notify::Notifier;

/// What a manager tells a process through its environment.
const VARIABLES: [&str; 8] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "FDSTORE",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "LISTEN_PID",
    "LISTEN_PIDFDID",
];
/// More descriptors than any launcher has, so more are none of ours.
const MOST_DESCRIPTORS: usize = 65_536;

/// Descriptors that the manager kept, by the names that they were given to it with.
pub type Kept = Vec<(String, Facts, OwnedFd)>;

/// See the module.
#[derive(Debug)]
pub struct Manager {
    notifier: Notifier,
    watchdog: Option<Watchdog>,
    /// How many descriptors it keeps; `None` where it does not say (systemd before version 254).
    store: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Watchdog {
    every: Duration,
    due: Instant,
}

impl Manager {
    /// The manager that our environment names.
    pub fn from_env() -> Option<Manager> {
        let notifier = Notifier::new(&env::var_os("NOTIFY_SOCKET")?)?;
        let for_us = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        let micros = number("WATCHDOG_USEC").filter(|micros| for_us && *micros > 0);
        let watchdog = micros.map(|micros| Watchdog {
            every: Duration::from_micros(micros / 2),
            due: Instant::now(),
        });
        Some(Manager {
            notifier,
            watchdog,
            store: number("FDSTORE").map(|most| usize::try_from(most).unwrap_or(usize::MAX)),
        })
    }

    /// How many descriptors it says that it keeps.
    pub fn store(&self) -> Option<usize> {
        self.store
    }

    /// Says something, and gives copies of descriptors with it.
    pub fn say(&self, text: &str, descriptors: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        self.notifier.send(text, descriptors)
    }

    /// Says what nothing depends on here.
    pub fn tell(&self, text: &str) {
        if let Err(error) = self.say(text, &[]) {
            warn!("cannot tell the service manager {text:?}: {error}");
        }
    }

    /// What is returned hangs up when the manager has dealt with all that was said before.
    pub fn barrier(&self) -> Result<OwnedFd, SendError> {
        let (ours, theirs) = io::pipe().map_err(SendError::Io)?;
        self.say("BARRIER=1", &[theirs.as_fd()])?;
        Ok(ours.into())
    }

    /// Says that all is well, when that is due and so.
    pub fn watchdog(&mut self, now: Instant, all_is_well: bool) {
        if let Some(watchdog) = &mut self.watchdog
            && all_is_well
            && watchdog.due <= now
        {
            watchdog.due = now + watchdog.every;
            if let Err(error) = self.notifier.send("WATCHDOG=1", &[]) {
                debug!("cannot tell the service manager that all is well: {error}");
            }
        }
    }

    /// When the watchdog is due next; `None` where it is due already and waits for all to be well.
    pub fn wake_at(&self, now: Instant) -> Option<Instant> {
        self.watchdog
            .map(|watchdog| watchdog.due)
            .filter(|due| *due > now)
    }
}

/// Takes the descriptors that the manager kept for this process. Call it before anything is opened.
pub fn kept() -> Kept {
    let ours = number("LISTEN_PID") == Some(u64::from(std::process::id()));
    let count = number("LISTEN_FDS").filter(|_| ours).unwrap_or(0);
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(MOST_DESCRIPTORS);
    if count == 0 {
        return Vec::new();
    }
    let names = env::var_os("LISTEN_FDNAMES").unwrap_or_default();
    let names = names.to_string_lossy();
    let mut names = names.split(':').map(str::to_owned);
    let names = (0..count).map(|_| names.next().unwrap_or_default());
    inherited::take(names).unwrap_or_else(|error| {
        warn!("cannot take what the service manager kept: {error}");
        Vec::new()
    })
}

/// Keeps from a child what is meant for us alone.
pub fn hide_from(command: &mut Command) {
    for variable in VARIABLES {
        command.env_remove(variable);
    }
}

fn number(variable: &str) -> Option<u64> {
    let value: OsString = env::var_os(variable)?;
    value.to_str()?.parse().ok()
}
