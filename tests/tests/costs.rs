//! What an engine's load costs, counted and not timed: messages, mappings and memory.
//!
//! Mappings and memory are counted for the whole process, so these tests take turns.

use rustix::event::{PollFd, PollFlags, poll};
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use weightd_blocking::Loaded;
use weightd_blocking::request::request;
use weightd_core::machine::{AttachError, AttachOptions, Mode};
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{GetStatus, Holds};
use weightd_gpu::Device;
use weightd_socket::credentials::our_uid;
use weightd_socket::message::{receive, send};
use weightd_tests::shapes::many;
use weightd_tests::{Resident, key, loader};

static TURN: Mutex<()> = Mutex::new(());

/// How often memory of a daemon's is mapped.
fn mappings() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").expect("mappings");
    maps.lines().filter(|line| line.contains("memfd:weightd")).count()
}

/// What one direction of a connection carried.
#[derive(Debug, Default, PartialEq)]
struct Carried {
    bytes: usize,
    descriptors: usize,
}

/// Hands on what comes on `from` until that ends.
fn carry(from: &UnixStream, to: &UnixStream) -> Carried {
    let (mut carried, mut buffer) = (Carried::default(), [0; 4096]);
    loop {
        poll(&mut [PollFd::new(from, PollFlags::IN)], None).expect("a wait");
        let mut descriptors = Vec::new();
        let Ok(received) = receive(from, &mut buffer, &mut descriptors) else {
            return carried;
        };
        if received.bytes == 0 {
            let _ = to.shutdown(std::net::Shutdown::Write);
            return carried;
        }
        carried.bytes += received.bytes;
        carried.descriptors += descriptors.len();
        let borrowed: Vec<_> = descriptors.iter().map(|(_, fd)| fd.as_fd()).collect();
        // Little enough for any socket.
        let sent = send(to, &buffer[..received.bytes], &borrowed).expect("room");
        assert_eq!(sent, received.bytes);
    }
}

/// Between an engine that connects to `at` once, and a daemon: what each of them says.
fn between(at: &Path, daemon: &Path) -> thread::JoinHandle<[Carried; 2]> {
    let listener = UnixListener::bind(at).expect("a socket");
    let daemon = UnixStream::connect(daemon).expect("the daemon");
    thread::spawn(move || {
        let (engine, _) = listener.accept().expect("the engine");
        thread::scope(|scope| {
            let asks = scope.spawn(|| carry(&engine, &daemon));
            let answers = carry(&daemon, &engine);
            [asks.join().expect("the engine's words"), answers]
        })
    })
}

#[test]
fn an_attach_takes_as_many_messages_and_mappings_for_100_000_tensors_as_for_ten() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let key = key();
    let costs = [10, 100_000].map(|count| {
        let tensors = many(count, &[2]);
        let resident = Resident::serve(&Device::host(0), &key, &tensors);
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("between.sock");
        let said = between(&socket, &resident.socket);
        let before = mappings();
        let options = AttachOptions::new(our_uid().expect("a user"));
        let loaded = loader(&socket, options, &key).attach().expect("weights");
        let mapped = mappings() - before;
        for (name, shape) in &tensors {
            assert_eq!(loaded.model().get(name).expect(name).shape, &shape[..]);
        }
        drop(loaded);
        assert_eq!(mappings(), before);
        (said.join().expect("both"), mapped)
    });
    assert_eq!(costs[0], costs[1]);
    let [(said, mapped), _] = costs;
    assert_eq!(said[1].descriptors, 2, "the manifest and the one region");
    assert_eq!(mapped, 1);
}

/// What this process has in memory now, in bytes: pages of its own, and of memfds that it maps.
fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kibibytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kibibytes.expect("its size") << 10
}

#[test]
fn when_the_disk_is_read_after_a_failed_build_neither_copy_nor_mapping_nor_content_is_left() {
    const BYTES: u64 = 256 << 20;
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let key = key();
    for mode in [Mode::ZeroCopy, Mode::Copy] {
        let resident = Resident::serve(&Device::host(0), &key, &many(1, &[BYTES / 2]));
        let before = (resident_bytes(), mappings());
        let options = AttachOptions {
            mode,
            ..AttachOptions::new(our_uid().expect("a user"))
        };
        let loaded = loader(&resident.socket, options, &key).load(
            |weights| {
                // The engine reads all of it, and then finds that it cannot use it.
                let tensor = weights.tensors().next().expect("a tensor");
                let bytes = tensor.fetch().expect("its bytes");
                assert!(bytes.iter().all(|byte| *byte == 0));
                drop(bytes);
                assert!(resident_bytes() >= before.0 + BYTES, "it is in memory now");
                Err("no such layer")
            },
            |because| {
                assert!(matches!(because, AttachError::BuildFailed { .. }), "{because}");
                assert_eq!(mappings(), before.1);
                assert!(resident_bytes() < before.0 + BYTES / 2, "room for the disk's");
                match request(&resident.socket, GetStatus {}, Span::secs(60)).expect("a status") {
                    Message::DaemonStatus(status) => Ok::<_, std::io::Error>(status.holds),
                    other => panic!("{other:?}"),
                }
            },
        );
        let Ok(Loaded::LoadedFromDisk { model: holds, .. }) = loaded else {
            panic!("{loaded:?}")
        };
        // Who maps took nothing that others could not have as well; who would have copied has no use for it.
        assert_eq!(
            matches!(holds, Holds::Released(_)),
            mode == Mode::Copy,
            "{holds:?}"
        );
    }
}
