//! Binding a name that one holds the [`Lock`] of, and accepting on it.

use crate::IoError;
use crate::credentials::peer;
use crate::facts::facts;
use crate::lock::Lock;
use crate::path::{PathError, check_length};
use crate::seen::Seen;
use rustix::fs::{Mode, chmod, rename, unlink};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, getsockname, listen,
    socket_with,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use weightd_core::peer::{FileKind, Peer};

/// Connections that wait to be accepted; the kernel lowers it to `net.core.somaxconn`. Large,
/// since engines queue here while a dead server is replaced.
const BACKLOG: i32 = 4096;

/// A listening socket that nobody can find yet: private to its owner (mode 0600), and bound to a
/// temporary name, which goes when this is dropped.
#[derive(Debug)]
pub struct Pending {
    listener: OwnedFd,
    temporary: Temporary,
    /// Its file, under the temporary name.
    seen: Option<Seen>,
    socket: PathBuf,
}

impl Pending {
    /// Binds and listens next to the socket that `lock` is the right to, as `SOCKET` with
    /// extension `tmp`: no longer than the final name, and a left-over of a dead owner is ours to
    /// replace.
    pub fn bind(lock: &Lock) -> Result<Pending, ListenError> {
        let socket = lock.socket().to_owned();
        check_length(&socket)?;
        let path = temporary_path(&socket);
        check_length(&path)?;
        owned(lock)?;
        remove_if_there(&path)?;
        let address = SocketAddrUnix::new(&path).map_err(IoError::when("use the address", &path))?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(IoError::when("make a socket for", &path))?;
        bind(&listener, &address).map_err(IoError::when("bind", &path))?;
        let temporary = Temporary {
            path: Some(path.clone()),
        };
        // Before it listens, so that nobody else can have connected.
        chmod(&path, Mode::RUSR | Mode::WUSR).map_err(IoError::when("make private", &path))?;
        listen(&listener, BACKLOG).map_err(IoError::when("listen on", &path))?;
        Ok(Pending {
            listener,
            temporary,
            seen: Seen::at(&path),
            socket,
        })
    }

    /// Whether the temporary name still leads to it: if not, it cannot get its final one.
    pub fn is_there(&self) -> bool {
        self.seen.as_ref().is_some_and(Seen::is_there)
    }

    /// Gives the socket its final name in one step, in place of a stale one.
    ///
    /// # Errors
    /// Where `lock` is the right to another name, or was lost.
    pub fn publish(self, lock: &Lock) -> Result<OwnedFd, ListenError> {
        if lock.socket() != self.socket {
            return Err(ListenError::OtherLock {
                socket: self.socket,
                lock: lock.socket().to_owned(),
            });
        }
        owned(lock)?;
        self.temporary.rename(&self.socket)?;
        Ok(self.listener)
    }
}

impl AsFd for Pending {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Removes the socket that `lock` is the right to, if there is one, also one that has not got its name yet. Connections
/// that were made go on; those in the backlog too, until the listener is closed.
///
/// # Errors
/// Where the lock was lost: what is there now may be another's.
pub fn remove(lock: &Lock) -> Result<(), ListenError> {
    owned(lock)?;
    remove_if_there(lock.socket())?;
    Ok(remove_if_there(&temporary_path(lock.socket()))?)
}

/// Where a socket is before it has its name.
fn temporary_path(socket: &Path) -> PathBuf {
    socket.with_extension("tmp")
}

/// Whether this is a listening socket that [`Pending`] made for `socket`. That the file at that path leads
/// to it still, only a connection shows.
pub fn was_bound_for(listener: impl AsFd, socket: &Path) -> bool {
    let address = getsockname(&listener).and_then(SocketAddrUnix::try_from);
    // A socket keeps the address that it was bound to, also after its file was renamed.
    let bound = address.as_ref().map(SocketAddrUnix::path_bytes);
    facts(&listener).file == FileKind::Listener
        && bound == Ok(Some(temporary_path(socket).as_os_str().as_bytes()))
}

/// The next connection, non-blocking and close-on-exec, and who made it; `None` where none waits.
///
/// Whether the peer is trusted is for the caller to decide ([`Peer::is_trusted_by`]), who may want
/// to answer a stranger before closing.
pub fn accept(listener: impl AsFd) -> Result<Option<(OwnedFd, Peer)>, AcceptError> {
    loop {
        match accept_with(&listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => {
                let peer = peer(&socket).map_err(AcceptError::Io)?;
                return Ok(Some((socket, peer)));
            }
            Err(Errno::AGAIN) => return Ok(None),
            // A peer that left while it queued, or a signal: the next may be there.
            Err(Errno::CONNABORTED | Errno::INTR) => continue,
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                return Err(AcceptError::Exhausted);
            }
            Err(errno) => return Err(AcceptError::Io(errno.into())),
        }
    }
}

/// Why a socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The path does not fit an address.
    #[error(transparent)]
    Path(#[from] PathError),
    /// The lock file was removed: another daemon may own the name by now.
    #[error("lost the right to {}: its lock file was removed or replaced by somebody; exclude the directory from cleaning, then start again", socket.display())]
    LockLost {
        /// The socket.
        socket: PathBuf,
    },
    /// The lock is for another socket.
    #[error("socket {} cannot be published under the lock of {}", socket.display(), lock.display())]
    OtherLock {
        /// The socket.
        socket: PathBuf,
        /// The socket that the lock is the right to.
        lock: PathBuf,
    },
    /// A call failed.
    #[error(transparent)]
    Io(#[from] IoError),
}

impl ListenError {
    /// Whether that is since a name is gone that was there.
    pub fn is_name_gone(&self) -> bool {
        match self {
            ListenError::LockLost { .. } => true,
            ListenError::Io(error) => error.source.kind() == io::ErrorKind::NotFound,
            ListenError::Path(_) | ListenError::OtherLock { .. } => false,
        }
    }
}

/// Why no connection was accepted.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// The connection stays queued: close something, or stop asking for a while.
    #[error(
        "no descriptor or memory is left for a new connection: raise the limit of open files (ulimit -n)"
    )]
    Exhausted,
    /// A call failed.
    #[error("cannot accept a connection: {0}")]
    Io(#[source] io::Error),
}

fn owned(lock: &Lock) -> Result<(), ListenError> {
    if lock.still_ours() {
        return Ok(());
    }
    Err(ListenError::LockLost {
        socket: lock.socket().to_owned(),
    })
}

fn remove_if_there(path: &Path) -> Result<(), IoError> {
    match unlink(path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(IoError::when("remove", path)(errno)),
    }
}

#[derive(Debug)]
struct Temporary {
    path: Option<PathBuf>,
}

impl Temporary {
    fn rename(mut self, to: &Path) -> Result<(), IoError> {
        if let Some(path) = &self.path {
            rename(path, to).map_err(IoError::when("give its name to", to))?;
        }
        self.path = None;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // Nobody is left to tell; the next owner of the lock removes what stays.
            let _ = unlink(path);
        }
    }
}
