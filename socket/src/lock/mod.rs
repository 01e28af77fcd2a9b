//! Who owns the name of a socket.

mod owner;

pub use owner::{Owner, read_owner};

use crate::IoError;
use crate::credentials::{OverflowUid, our_uid};
use rustix::fs::{CWD, FileType, FlockOperation, Mode, OFlags, Stat, flock, fstat, ftruncate, lstat, openat};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// How often the lock file may be replaced under us before we give up.
const ATTEMPTS: usize = 16;

/// The exclusive right to a socket's path: a `flock` on `SOCKET.lock`.
///
/// The right belongs to an open file description, not to a process. A copy of the descriptor,
/// also one sent to another process, is the same right, which ends when the last copy is closed,
/// and so never outlives the processes that hold it. It is taken over with [`Lock::adopt`].
///
/// A child that is being spawned holds such a copy too until it executes, so that a name may stay
/// taken for a moment after the last copy that one knows of was closed.
///
/// The file stays when the right ends; its presence means nothing.
#[derive(Debug)]
pub struct Lock {
    file: OwnedFd,
    path: PathBuf,
    socket: PathBuf,
}

impl Lock {
    /// Takes the right to `socket`, at once or not at all. What an earlier owner wrote is erased.
    ///
    /// # Errors
    /// [`LockError::AlreadyOwned`] where another description holds it.
    pub fn acquire(socket: &Path) -> Result<Lock, LockError> {
        let path = lock_path(socket);
        for _ in 0..ATTEMPTS {
            let file = open(&path)?;
            match Lock::adopt(file, socket) {
                Ok(lock) => {
                    ftruncate(&lock.file, 0).map_err(IoError::when("empty the lock file", &path))?;
                    return Ok(lock);
                }
                // Its last owner, or a cleaner of temporary files, unlinked what we had opened.
                Err(LockError::Replaced { .. }) => continue,
                Err(error) => return Err(error),
            }
        }
        Err(LockError::Replaced { path })
    }

    /// Takes over a descriptor of the lock file that another process sent. Nothing is trusted: it
    /// must be the file at `SOCKET.lock`, and hold the lock or be able to.
    ///
    /// # Errors
    /// [`LockError::Replaced`] where it is not the file at that path (any more).
    pub fn adopt(file: OwnedFd, socket: &Path) -> Result<Lock, LockError> {
        let ours = our_uid()?;
        let path = lock_path(socket);
        let stat = fstat(&file).map_err(IoError::when("inspect the lock file", &path))?;
        check(&path, &stat, ours)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let owner = owner::read(&file);
                return Err(LockError::AlreadyOwned {
                    socket: socket.to_owned(),
                    owner,
                });
            }
            Err(errno) => return Err(IoError::when("lock", &path)(errno).into()),
        }
        let lock = Lock {
            file,
            path,
            socket: socket.to_owned(),
        };
        if lock.still_ours() {
            Ok(lock)
        } else {
            Err(LockError::Replaced { path: lock.path })
        }
    }

    /// The socket whose name this is the right to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The lock file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the path still leads to the locked file. If not, somebody removed it, and the next
    /// comer will own the name.
    pub fn still_ours(&self) -> bool {
        standing(&self.file, &self.socket) == Standing::Ours
    }

    /// Says who owns the name, for whoever finds it taken.
    pub fn write_owner(&self, owner: &Owner) -> Result<(), LockError> {
        owner::write(&self.file, owner).map_err(IoError::when("write to the lock file", &self.path))?;
        Ok(())
    }

    /// Gives the right up for good and unlinks the lock file with it; for a name that is not used
    /// again. Copies of the descriptor are worth nothing from then on.
    pub fn remove(self) -> Result<(), LockError> {
        if !self.still_ours() {
            return Err(LockError::Replaced { path: self.path });
        }
        rustix::fs::unlink(&self.path).map_err(IoError::when("remove the lock file", &self.path))?;
        Ok(())
    }
}

/// What lies where a lock file lay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// That file.
    Ours,
    /// Another one: the name is another's.
    Replaced,
    /// None, so that nobody else has the name.
    Removed,
    /// It cannot be told.
    Unknown,
}

/// What lies at `SOCKET.lock`, whose lock `lock` was or is.
pub fn standing(lock: impl AsFd, socket: &Path) -> Standing {
    match (fstat(lock), lstat(lock_path(socket))) {
        (Ok(held), Ok(named)) => match (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino) {
            true => Standing::Ours,
            false => Standing::Replaced,
        },
        (Ok(_), Err(Errno::NOENT | Errno::NOTDIR)) => Standing::Removed,
        _ => Standing::Unknown,
    }
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl From<Lock> for OwnedFd {
    fn from(lock: Lock) -> OwnedFd {
        lock.file
    }
}

/// Why a name is not ours.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another daemon, alive, has it.
    #[error(
        "a daemon already owns {}{}: stop it first, or choose another --instance",
        socket.display(),
        owner.as_ref().map(|owner| format!(" (launcher pid {})", owner.pid)).unwrap_or_default()
    )]
    AlreadyOwned {
        /// The socket.
        socket: PathBuf,
        /// What the owner wrote, where that can be read; absent in the moment before it did.
        owner: Option<Owner>,
    },
    /// The lock file was removed or replaced.
    #[error("lock file {} was removed or replaced by somebody: exclude the directory from cleaning, then start again", path.display())]
    Replaced {
        /// The lock file.
        path: PathBuf,
    },
    /// What lies at the lock file's path was not made by us.
    #[error("lock file {} is {what}", path.display())]
    Foreign {
        /// The lock file.
        path: PathBuf,
        /// What it is instead, and what to do about it.
        what: String,
    },
    /// We are nobody in particular.
    #[error(transparent)]
    Uid(#[from] OverflowUid),
    /// A call failed.
    #[error(transparent)]
    Io(#[from] IoError),
}

fn lock_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    path.into()
}

fn open(path: &Path) -> Result<OwnedFd, LockError> {
    // Non-blocking, since a FIFO in its place would make the opening wait.
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let foreign = |what: &str| LockError::Foreign {
        path: path.to_owned(),
        what: what.to_owned(),
    };
    match openat(CWD, path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => Ok(file),
        Err(Errno::LOOP) => Err(foreign("a symbolic link: remove it")),
        Err(Errno::ISDIR | Errno::NXIO | Errno::NODEV) => Err(foreign("not a regular file: remove it")),
        Err(errno) => Err(IoError::when("open the lock file", path)(errno).into()),
    }
}

fn check(path: &Path, stat: &Stat, ours: u32) -> Result<(), LockError> {
    let foreign = |what| {
        Err(LockError::Foreign {
            path: path.to_owned(),
            what,
        })
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return foreign("not a regular file: remove it".to_owned());
    }
    if stat.st_uid != ours {
        return foreign(format!("of uid {} and we are uid {ours}: remove it", stat.st_uid));
    }
    // Its content will be overwritten, which must not befall a file that was linked here.
    if stat.st_nlink > 1 {
        return foreign("also known by another name: remove that (`find -samefile` finds it)".to_owned());
    }
    Ok(())
}
