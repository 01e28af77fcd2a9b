//! Unix sockets between processes of one user, over which descriptors travel.
//!
//! A daemon is known by a path. From the outside in:
//!
//! * [`dir`]: the directory that sockets lie in, checked before it is used.
//! * [`path`]: the name of a daemon's socket, derived from what it serves.
//! * [`lock`]: who owns that name; held for life, and handed on like any descriptor.
//! * [`listen`]: binding under that name in one atomic step, and accepting.
//! * [`seen`]: whether a name still leads where it led.
//! * [`connect`]: reaching a daemon, which is checked as it checks its client.
//! * [`message`]: bytes and descriptors, one way and the other.
//! * [`facts`]: what a received descriptor is, asked of the kernel.
//! * [`credentials`]: who we are and who the peer is.
//! * [`notify`]: telling a service manager something, and giving it descriptors.
//! * [`inherited`]: taking descriptors that a service manager gave this process.
//!
//! No function here waits: sockets are non-blocking, and what would block is an error of its own.
//! Nothing here knows a message's meaning, a time-out or a retry.
//!
//! Linux only.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod connect;
pub mod credentials;
pub mod dir;
pub mod facts;
pub mod inherited;
pub mod listen;
pub mod lock;
pub mod message;
pub mod notify;
pub mod path;
pub mod seen;

/// An operating system call on a path failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} {}: {source}{}", path.display(), advice(source))]
pub struct IoError {
    /// What was tried, as a verb: `open`, `bind`.
    pub doing: &'static str,
    /// On which file.
    pub path: std::path::PathBuf,
    /// What the operating system said.
    pub source: std::io::Error,
}

/// What to do about a call that found no descriptor left, to follow what it said; empty for any other failure.
pub fn out_of_descriptors(error: &std::io::Error) -> &'static str {
    match rustix::io::Errno::from_io_error(error) {
        Some(rustix::io::Errno::MFILE) => "; raise the limit of open files (ulimit -n)",
        Some(rustix::io::Errno::NFILE) => "; raise the limit of open files of the machine (fs.file-max)",
        _ => "",
    }
}

/// The same for any failure of a call on a path.
fn advice(error: &std::io::Error) -> &'static str {
    use rustix::io::Errno;
    match Errno::from_io_error(error) {
        Some(Errno::ISDIR | Errno::NOTEMPTY) => "; remove it",
        Some(Errno::ACCESS | Errno::PERM) => {
            "; give this user the right to it, or to its directory (chmod 0700)"
        }
        Some(Errno::ROFS) => "; choose another --socket-dir",
        Some(Errno::NOSPC | Errno::DQUOT) => "; make room there",
        _ => out_of_descriptors(error),
    }
}

impl IoError {
    /// For `map_err`: wraps what a call on `path` returned.
    fn when<E: Into<std::io::Error>>(
        doing: &'static str,
        path: &std::path::Path,
    ) -> impl FnOnce(E) -> IoError {
        move |source| IoError {
            doing,
            path: path.to_owned(),
            source: source.into(),
        }
    }
}
