//! Reaching a daemon.

use crate::IoError;
use crate::credentials::{OverflowUid, our_uid, peer};
use crate::path::{PathError, check_length};
use rustix::fs::{FileType, lstat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, socketpair};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use weightd_core::peer::Peer;

/// What fails where a call of this module does.
const CONNECT: &str = "connect to";

/// Connects to the daemon at `path`, at once or not at all; the socket is non-blocking and
/// close-on-exec.
///
/// The file must be a socket and ours, and the process that listens on it must be of our uid, which
/// is asked of the connected socket: the file may change, the peer cannot.
pub fn connect(path: &Path) -> Result<(OwnedFd, Peer), ConnectError> {
    let ours = our_uid()?;
    check_length(path)?;
    check_file(path, ours)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(IoError::when(CONNECT, path))?;
    let address = SocketAddrUnix::new(path).map_err(IoError::when(CONNECT, path))?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address)).map_err(|errno| match errno {
        Errno::NOENT | Errno::CONNREFUSED => ConnectError::Absent {
            path: path.to_owned(),
        },
        Errno::AGAIN => ConnectError::Busy {
            path: path.to_owned(),
        },
        Errno::PROTOTYPE => refused(path, Refusal::NotASocket),
        errno => IoError::when(CONNECT, path)(errno).into(),
    })?;
    let peer = peer(&socket).map_err(IoError::when(CONNECT, path))?;
    if !peer.is_trusted_by(ours) {
        return Err(refused(path, Refusal::ForeignPeer { uid: peer.uid, ours }));
    }
    Ok((socket, peer))
}

/// Two ends of one connection, for a parent and its child; both non-blocking and close-on-exec.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

/// Why no daemon was reached.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No daemon serves there (yet, or any more).
    #[error("no daemon serves {}: start one, or wait until it is ready", path.display())]
    Absent {
        /// The socket.
        path: PathBuf,
    },
    /// Its backlog is full: it is alive, and does not get to accepting.
    #[error("daemon at {} has its queue of connections full: try again in a moment", path.display())]
    Busy {
        /// The socket.
        path: PathBuf,
    },
    /// What is there is not to be trusted, and will not be if asked again.
    #[error("refused {}: {why}", path.display())]
    Refused {
        /// The socket.
        path: PathBuf,
        /// The reason.
        why: Refusal,
    },
    /// The path does not fit an address.
    #[error(transparent)]
    Path(#[from] PathError),
    /// We are nobody in particular.
    #[error(transparent)]
    Uid(#[from] OverflowUid),
    /// A call failed.
    #[error(transparent)]
    Io(#[from] IoError),
}

/// What is wrong with a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The path is a symbolic link.
    #[error("it is a symbolic link, which could lead anywhere; name the socket itself")]
    Symlink,
    /// The path is no socket, or one of another type.
    #[error("it is not a stream socket; remove it, or name another path")]
    NotASocket,
    /// Another user owns the file.
    #[error("the file belongs to uid {uid} and we are uid {ours}; run both as one user")]
    ForeignFile {
        /// The file's owner.
        uid: u32,
        /// Our uid.
        ours: u32,
    },
    /// Another user's process listens.
    #[error("a process of uid {uid} listens there and we are uid {ours}; run both as one user")]
    ForeignPeer {
        /// The peer's uid, as far as our namespace can name it.
        uid: u32,
        /// Our uid.
        ours: u32,
    },
}

fn check_file(path: &Path, ours: u32) -> Result<(), ConnectError> {
    let stat = lstat(path).map_err(|errno| match errno {
        Errno::NOENT => ConnectError::Absent {
            path: path.to_owned(),
        },
        errno => IoError::when(CONNECT, path)(errno).into(),
    })?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Socket if stat.st_uid == ours => Ok(()),
        FileType::Socket => Err(refused(
            path,
            Refusal::ForeignFile {
                uid: stat.st_uid,
                ours,
            },
        )),
        FileType::Symlink => Err(refused(path, Refusal::Symlink)),
        _ => Err(refused(path, Refusal::NotASocket)),
    }
}

fn refused(path: &Path, why: Refusal) -> ConnectError {
    ConnectError::Refused {
        path: path.to_owned(),
        why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_no_descriptor_left_to_connect_with_is_told_what_to_do() {
        let error: ConnectError = IoError::when(CONNECT, Path::new("/a.sock"))(Errno::MFILE).into();
        let advice = "; raise the limit of open files (ulimit -n)";
        assert!(error.to_string().starts_with("cannot connect to /a.sock: "));
        assert!(error.to_string().ends_with(advice), "{error}");
    }
}
