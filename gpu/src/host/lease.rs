//! Whether somebody has a file open for writing.

#![allow(unsafe_code)] // A call that no crate wraps.

use libc::{EAGAIN, F_RDLCK, F_SETLEASE, F_UNLCK, SIGURG, c_int, fcntl};
use std::os::fd::{AsFd, AsRawFd};

/// Of linux/fcntl.h: which signal tells of what a lease is in the way of.
const F_SETSIG: c_int = 10;

/// Whether any process has a file open for writing at this moment, or mapped so that it can. Asked by a read
/// lease (fcntl(2), "Leases"), which is not given while there is one, and given back at once.
///
/// `None` where nobody can tell: a file of another user, unless this process may take leases on any
/// (`CAP_LEASE`), or a file system that has no leases.
pub fn is_open_for_writing(fd: impl AsFd) -> Option<bool> {
    let fd = fd.as_fd().as_raw_fd();
    // Should somebody open it for writing while we have the lease, the kernel says so by a signal: not by its
    // usual one, which ends a process.
    control(fd, F_SETSIG, SIGURG).then_some(())?;
    if control(fd, F_SETLEASE, F_RDLCK) {
        control(fd, F_SETLEASE, F_UNLCK);
        return Some(false);
    }
    let errno = std::io::Error::last_os_error().raw_os_error()?;
    (errno == EAGAIN).then_some(true)
}

fn control(fd: c_int, command: c_int, argument: c_int) -> bool {
    // SAFETY: these commands take a number and touch no memory of this process.
    unsafe { fcntl(fd, command, argument) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn writers_are_told_from_readers_and_the_lease_is_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "bytes").unwrap();
        let ours = File::open(&path).unwrap();
        if is_open_for_writing(&ours).is_none() {
            eprintln!("not tested: no leases here");
            return;
        }
        assert_eq!(is_open_for_writing(&ours), Some(false));
        let reader = File::open(&path).unwrap();
        assert_eq!(is_open_for_writing(&ours), Some(false), "another reader");
        let writer = File::options().write(true).open(&path).unwrap();
        assert_eq!(is_open_for_writing(&ours), Some(true));
        drop((writer, reader));
        assert_eq!(is_open_for_writing(&ours), Some(false));
    }
}
