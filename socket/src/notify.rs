//! Telling a service manager something: datagrams to the socket that it names, as in sd_notify(3).

use crate::message::{SendError, send};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Where a service manager listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notifier {
    address: OsString,
}

impl Notifier {
    /// The address is that of `NOTIFY_SOCKET`: an absolute path, or `@` and an abstract name; `None` for
    /// any other.
    pub fn new(address: &OsStr) -> Option<Notifier> {
        let known = matches!(address.as_bytes(), [b'/' | b'@', _, ..]);
        known.then(|| Notifier {
            address: address.to_owned(),
        })
    }

    /// Says `text`, lines of `NAME=VALUE`, and gives copies of at most
    /// [`MAX_DESCRIPTORS`](crate::message::MAX_DESCRIPTORS) descriptors with it: all of it, or nothing.
    /// Never waits.
    ///
    /// # Errors
    /// [`SendError::WouldBlock`] where the manager's queue is full.
    pub fn send(&self, text: &str, descriptors: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        // Connected anew each time: a manager that starts again makes another socket of that name.
        let io = |errno: rustix::io::Errno| SendError::Io(io::Error::from(errno));
        let address = match self.address.as_bytes() {
            [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name),
            _ => SocketAddrUnix::new(Path::new(&self.address)),
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None).map_err(io)?;
        connect(&socket, &address.map_err(io)?).map_err(io)?;
        send(&socket, text.as_bytes(), descriptors).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::receive;
    use std::os::fd::AsFd;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    fn arrives(manager: &UnixDatagram, address: &OsStr) {
        let temp = tempfile::tempfile().unwrap();
        let notifier = Notifier::new(address).unwrap();
        notifier.send("READY=1", &[temp.as_fd()]).unwrap();
        let (mut buffer, mut descriptors) = ([0; 64], Vec::new());
        let received = receive(manager, &mut buffer, &mut descriptors).unwrap();
        assert_eq!(&buffer[..received.bytes], b"READY=1");
        assert_eq!(descriptors.len(), 1);
    }

    #[test]
    fn a_path_and_an_abstract_name_are_reached_with_descriptors() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("notify");
        arrives(&UnixDatagram::bind(&path).unwrap(), path.as_os_str());
        let name = format!("weightd-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let manager = UnixDatagram::bind_addr(&address).unwrap();
        arrives(&manager, OsStr::new(&format!("@{name}")));
    }

    #[test]
    fn no_manager_and_a_full_queue_are_errors_and_other_addresses_are_none() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("notify");
        let notifier = Notifier::new(path.as_os_str()).unwrap();
        assert!(notifier.send("READY=1", &[]).is_err());
        let _manager = UnixDatagram::bind(&path).unwrap();
        let full = (0..100_000).find_map(|_| notifier.send("WATCHDOG=1", &[]).err());
        assert!(matches!(full, Some(SendError::WouldBlock)), "{full:?}");
        for address in ["", "/", "@", "relative", "vsock:2:1234"] {
            assert_eq!(Notifier::new(OsStr::new(address)), None, "{address:?}");
        }
    }
}
