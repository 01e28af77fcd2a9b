//! Names that somebody removed while we use them: noticed, and put back.

use super::daemons::{Claim, Control, Daemons, NotLocked, lock, nobody_serves};
use crate::error::CliError;
use crate::owners::remove_stale_control;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use weightd_core::machine::Ends;
use weightd_core::wire::message::DaemonId;
use weightd_socket::dir::DirError;
use weightd_socket::listen::{ListenError, Pending};
use weightd_socket::lock::{Lock, LockError, read_owner};
use weightd_socket::seen::Seen;

/// How many removed files a message names.
const NAMED: usize = 3;

/// Ends of names that were put back.
#[derive(Debug)]
pub enum PutBack {
    Daemon(DaemonId, Ends<OwnedFd>),
    Control(Ends<OwnedFd>),
}

/// Why a name was not put back.
#[derive(Debug)]
pub enum NotPutBack {
    /// Nobody has it; what is in the way may pass.
    Yet(String),
    /// It is another's, or not to be trusted.
    Ever(String),
}

impl Daemons {
    /// What was removed or replaced, for a person; `None` where every name leads where it led.
    pub fn removed(&self, dir: &Path) -> Option<String> {
        if !self.dir.as_ref().is_some_and(Seen::is_there) {
            return Some(format!("the socket directory {}", dir.display()));
        }
        let claims = self.claims.iter().flat_map(Claim::removed);
        let mut removed: Vec<PathBuf> = self.control.removed().into_iter().chain(claims).collect();
        if removed.is_empty() && self.owners_are_stale {
            // It has another name, which is not known yet.
            removed.push(self.control.path.clone());
        }
        let names = removed.iter().take(NAMED).map(|path| path.display().to_string());
        let names = names.collect::<Vec<_>>().join(", ");
        match removed.len() {
            0 => None,
            more if more > NAMED => Some(format!("{names} and {} more", more - NAMED)),
            _ => Some(names),
        }
    }

    /// Makes the names again that were removed, in a directory that `make_dir` makes again, and `gives` their
    /// ends away one by one, also where a later one cannot be put back. Sockets are reached by them at once
    /// if they were `published`.
    pub fn put_back(
        &mut self,
        dir: &Path,
        published: bool,
        make_dir: impl FnOnce() -> Result<(), DirError>,
        mut give: impl FnMut(PutBack),
    ) -> Result<(), NotPutBack> {
        make_dir()?;
        self.owners_are_stale = true;
        if !self.control.removed().is_empty() {
            give(PutBack::Control(self.control.put_back(dir)?));
        }
        for (daemon, claim) in (0..).zip(&mut self.claims) {
            if !claim.removed().is_empty() {
                give(PutBack::Daemon(daemon, claim.put_back(dir, published)?));
            }
        }
        self.write_owners().map_err(yet)?;
        self.owners_are_stale = false;
        self.dir = Seen::at(dir);
        Ok(())
    }
}

impl Claim {
    fn removed(&self) -> Vec<PathBuf> {
        let socket = self.lock.socket();
        let is_there = match &self.pending {
            Some(pending) => pending.is_there(),
            None => self.seen.as_ref().is_some_and(Seen::is_there),
        };
        let lock = (!self.lock.still_ours()).then(|| self.lock.path().to_owned());
        lock.into_iter()
            .chain((!is_there).then(|| socket.to_owned()))
            .collect()
    }

    fn put_back(&mut self, dir: &Path, published: bool) -> Result<Ends<OwnedFd>, NotPutBack> {
        let socket = self.lock.socket().to_owned();
        if !self.lock.still_ours() {
            let taken = take(dir, &socket)?;
            // What is served there is our own, or of somebody who had the name for a while.
            self.lock = match self.seen.as_ref().is_some_and(Seen::is_there) {
                true => taken,
                false => nobody_serves(dir, taken).map_err(ever)?,
            };
            // Whatever comes in between now, the lock is not where it must be before this is done.
            self.seen = None;
        }
        // Before the next one is made: that has its temporary name.
        self.pending = None;
        let pending = Pending::bind(&self.lock)?;
        let lock = self.lock.as_fd().try_clone_to_owned().map_err(yet)?;
        let listener = pending.as_fd().try_clone_to_owned().map_err(yet)?;
        if published {
            pending.publish(&self.lock)?;
            self.seen = Seen::at(&socket);
        } else {
            self.pending = Some(pending);
        }
        Ok(Ends::new(lock, listener))
    }
}

impl Control {
    fn removed(&self) -> Vec<PathBuf> {
        let lock = self.lock.as_ref().filter(|lock| !lock.still_ours());
        let lock = lock.map(|lock| lock.path().to_owned());
        let is_there = self.seen.as_ref().is_some_and(Seen::is_there);
        lock.into_iter()
            .chain((!is_there).then(|| self.path.clone()))
            .collect()
    }

    /// Under another name: who has read the one before must not take this for the same.
    fn put_back(&mut self, dir: &Path) -> Result<Ends<OwnedFd>, NotPutBack> {
        let next = Control::bind(dir).map_err(yet)?;
        let ends = next.ends().map_err(yet)?;
        let before = std::mem::replace(self, next);
        let path = before.path.clone();
        drop(before);
        // A socket that had lost its lock.
        remove_stale_control(&path);
        Ok(ends)
    }
}

/// Takes the right to a name that nobody has, which had been ours.
fn take(dir: &Path, socket: &Path) -> Result<Lock, NotPutBack> {
    let stale = read_owner(socket);
    let taken = match Lock::acquire(socket) {
        Err(LockError::AlreadyOwned { .. }) => match lock(dir, socket)? {
            // It looked, and left.
            Ok((lock, _)) => lock,
            Err(orphan) => {
                return Err(NotPutBack::Ever(
                    orphan
                        .not_adopted(dir, "this launcher serves its own")
                        .to_string(),
                ));
            }
        },
        taken => taken?,
    };
    if let Some(stale) = stale {
        remove_stale_control(&dir.join(stale.control));
    }
    Ok(taken)
}

fn yet(error: impl std::fmt::Display) -> NotPutBack {
    NotPutBack::Yet(error.to_string())
}

fn ever(error: CliError) -> NotPutBack {
    NotPutBack::Ever(error.to_string())
}

impl From<DirError> for NotPutBack {
    /// What is there in the directory's place may go as it came: until then nothing is lost but the names.
    fn from(error: DirError) -> NotPutBack {
        match error {
            DirError::Uid(_) => NotPutBack::Ever(error.to_string()),
            error => yet(error),
        }
    }
}

impl From<LockError> for NotPutBack {
    fn from(error: LockError) -> NotPutBack {
        match error {
            // What is foreign was put in the lock file's place, in a directory that is ours.
            LockError::Io(_) | LockError::Replaced { .. } | LockError::Foreign { .. } => yet(error),
            LockError::AlreadyOwned { .. } | LockError::Uid(_) => NotPutBack::Ever(error.to_string()),
        }
    }
}

impl From<NotLocked> for NotPutBack {
    fn from(error: NotLocked) -> NotPutBack {
        match error {
            NotLocked::Lock(error) => error.into(),
            NotLocked::Led(why) => NotPutBack::Ever(why),
        }
    }
}

impl From<ListenError> for NotPutBack {
    fn from(error: ListenError) -> NotPutBack {
        match error {
            ListenError::Io(_) | ListenError::LockLost { .. } => yet(error),
            ListenError::Path(_) | ListenError::OtherLock { .. } => NotPutBack::Ever(error.to_string()),
        }
    }
}
