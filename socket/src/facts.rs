//! What a received descriptor is.

use rustix::fs::{AtFlags, FileType, SealFlags, StatxFlags, fcntl_get_seals, statx};
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use std::os::fd::{AsFd, BorrowedFd};
use weightd_core::peer::{Facts, FileKind};

/// With all of these, neither the bytes nor the size of a memfd can ever change, nor can that
/// (fcntl(2), "File sealing").
const SEALED: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Asks the kernel, never the sender, and never waits: also not for a file system that its sender
/// runs. Whatever cannot be asked is [`FileKind::Other`].
pub fn facts(descriptor: impl AsFd) -> Facts {
    let descriptor = descriptor.as_fd();
    // What is known suffices: to be exact about a file of FUSE, the kernel would ask its server.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let Ok(stat) = statx(descriptor, c"", flags, StatxFlags::TYPE | StatxFlags::SIZE) else {
        return Facts {
            file: FileKind::Other,
            size: 0,
        };
    };
    let kind = FileType::from_raw_mode(stat.stx_mode.into());
    let file = match kind {
        // Only shared memory can be asked for its seals.
        FileType::RegularFile => match fcntl_get_seals(descriptor) {
            Ok(seals) => FileKind::Memory {
                sealed: seals.contains(SEALED),
            },
            Err(_) => FileKind::Other,
        },
        FileType::CharacterDevice => FileKind::CharDevice {
            major: stat.stx_rdev_major,
        },
        FileType::Socket if listens(descriptor) => FileKind::Listener,
        _ => FileKind::Other,
    };
    let size = if kind == FileType::RegularFile {
        stat.stx_size
    } else {
        0
    };
    Facts { file, size }
}

fn listens(socket: BorrowedFd<'_>) -> bool {
    socket_domain(socket) == Ok(AddressFamily::UNIX)
        && socket_type(socket) == Ok(SocketType::STREAM)
        && socket_acceptconn(socket) == Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};
    use std::fs::File;
    use std::os::fd::OwnedFd;

    fn memory(seals: SealFlags) -> OwnedFd {
        let memory = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&memory, 4097).unwrap();
        fcntl_add_seals(&memory, seals).unwrap();
        memory
    }

    #[test]
    fn memory_is_sealed_only_with_every_seal() {
        let facts = |seals| facts(memory(seals));
        assert_eq!(
            facts(SEALED),
            Facts {
                file: FileKind::Memory { sealed: true },
                size: 4097
            }
        );
        for missing in [
            SealFlags::WRITE,
            SealFlags::SHRINK,
            SealFlags::GROW,
            SealFlags::SEAL,
        ] {
            assert_eq!(
                facts(SEALED - missing).file,
                FileKind::Memory { sealed: false },
                "{missing:?}"
            );
        }
        let future = SEALED.difference(SealFlags::WRITE).union(SealFlags::FUTURE_WRITE);
        assert_eq!(facts(future).file, FileKind::Memory { sealed: false });
    }

    #[test]
    fn a_file_that_cannot_be_sealed_is_no_memory_and_one_on_tmpfs_is_not_sealed() {
        let plain = File::open("/proc/self/status").unwrap();
        assert_eq!(facts(&plain).file, FileKind::Other);
        match tempfile::tempfile_in("/dev/shm") {
            Ok(shared) => assert_eq!(facts(&shared).file, FileKind::Memory { sealed: false }),
            Err(error) => eprintln!("skipped: no tmpfs at /dev/shm: {error}"),
        }
    }

    #[test]
    fn what_has_no_bytes_of_its_own_is_no_memory() {
        use rustix::event::{EventfdFlags, epoll, eventfd};
        use rustix::fs::{Mode, OFlags, open};
        use std::os::fd::AsRawFd;
        let other = FileKind::Other;
        let sealed = memory(SEALED);
        let path_only = format!("/proc/self/fd/{}", sealed.as_raw_fd());
        let path_only = open(path_only, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let endless = File::open("/dev/zero").unwrap();
        for (what, descriptor, kind) in [
            (
                "epoll",
                epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(),
                other,
            ),
            ("eventfd", eventfd(0, EventfdFlags::CLOEXEC).unwrap(), other),
            ("a path of sealed memory", path_only, other),
            ("/dev/zero", endless.into(), FileKind::CharDevice { major: 1 }),
            ("a pipe", std::io::pipe().unwrap().1.into(), other),
        ] {
            assert_eq!(facts(descriptor).file, kind, "{what}");
        }
        match memfd_create(
            "huge",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB,
        ) {
            Ok(huge) if ftruncate(&huge, 2 << 20).is_ok() => {
                assert_eq!(facts(&huge).file, FileKind::Memory { sealed: false });
                fcntl_add_seals(&huge, SEALED).unwrap();
                assert_eq!(facts(&huge).file, FileKind::Memory { sealed: true });
            }
            _ => eprintln!("skipped: no huge pages"),
        }
    }

    #[test]
    fn a_character_device_is_known_by_its_major_number() {
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        assert_eq!(
            facts(&null),
            Facts {
                file: FileKind::CharDevice { major: 1 },
                size: 0
            }
        );
    }

    #[test]
    fn only_a_unix_stream_socket_that_listens_is_a_listener() {
        let temp = tempfile::tempdir().unwrap();
        let listener = std::os::unix::net::UnixListener::bind(temp.path().join("a")).unwrap();
        assert_eq!(
            facts(&listener),
            Facts {
                file: FileKind::Listener,
                size: 0
            }
        );
        let other = Facts {
            file: FileKind::Other,
            size: 0,
        };
        let (connected, _peer) = crate::connect::pair().unwrap();
        assert_eq!(facts(&connected), other);
        assert_eq!(
            facts(std::os::unix::net::UnixDatagram::bind(temp.path().join("b")).unwrap()),
            other
        );
        assert_eq!(facts(std::net::TcpListener::bind("127.0.0.1:0").unwrap()), other);
        assert_eq!(facts(File::open("/").unwrap()), other);
        assert_eq!(facts(std::io::pipe().unwrap().0), other);
    }
}
