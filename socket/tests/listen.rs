//! A socket gets its name in one step, from the holder of its lock, and is private from then on.

mod common;

use common::*;
use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::{FdFlags, fcntl_getfd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use tempfile::tempdir;
use weightd_core::content::{DeviceUuid, Role};
use weightd_core::peer::Peer;
use weightd_socket::connect::{ConnectError, connect};
use weightd_socket::credentials::our_uid;
use weightd_socket::listen::{ListenError, Pending, accept, remove};
use weightd_socket::lock::Lock;
use weightd_socket::path::socket_path;

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o7777
}

#[test]
fn a_socket_is_absent_until_it_is_published_and_private_from_then_on() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    let lock = Lock::acquire(&socket).unwrap();
    let pending = Pending::bind(&lock).unwrap();
    assert!(matches!(connect(&socket), Err(ConnectError::Absent { .. })));
    assert_eq!(mode(&socket.with_extension("tmp")), 0o600);

    let listener = pending.publish(&lock).unwrap();
    assert_eq!(mode(&socket), 0o600);
    assert!(!socket.with_extension("tmp").exists());
    connect(&socket).unwrap();
    assert!(fcntl_getfl(&listener).unwrap().contains(OFlags::NONBLOCK));
    assert!(fcntl_getfd(&listener).unwrap().contains(FdFlags::CLOEXEC));
}

#[test]
fn a_temporary_name_that_somebody_removed_or_took_is_noticed() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    let lock = Lock::acquire(&socket).unwrap();
    let pending = Pending::bind(&lock).unwrap();
    assert!(pending.is_there());
    let temporary = socket.with_extension("tmp");
    std::fs::remove_file(&temporary).unwrap();
    assert!(!pending.is_there());
    let _another = UnixListener::bind(&temporary).unwrap();
    assert!(!pending.is_there());
}

#[test]
fn a_socket_that_is_never_published_leaves_nothing() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    let lock = Lock::acquire(&socket).unwrap();
    drop(Pending::bind(&lock).unwrap());
    lock.remove().unwrap();
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
}

#[test]
fn what_a_dead_owner_left_is_replaced() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    drop(UnixListener::bind(&socket).unwrap());
    drop(UnixListener::bind(socket.with_extension("tmp")).unwrap());
    assert!(matches!(connect(&socket), Err(ConnectError::Absent { .. })));
    let lock = Lock::acquire(&socket).unwrap();
    let listener = serve(&lock);
    connect(&socket).unwrap();
    assert!(accept(&listener).unwrap().is_some());
}

#[test]
fn who_connects_while_nobody_accepts_is_served_later() {
    let temp = tempdir().unwrap();
    let lock = Lock::acquire(&socket_in(temp.path())).unwrap();
    let listener = serve(&lock);
    let clients: Vec<_> = (0..100).map(|_| connect(lock.socket()).unwrap()).collect();
    for _ in &clients {
        assert!(accept(&listener).unwrap().is_some());
    }
    assert!(accept(&listener).unwrap().is_none());
}

#[test]
fn both_sides_know_each_other_and_neither_waits_nor_leaks_into_children() {
    let temp = tempdir().unwrap();
    let lock = Lock::acquire(&socket_in(temp.path())).unwrap();
    let listener = serve(&lock);
    let (client, server_peer) = connect(lock.socket()).unwrap();
    let (server, client_peer) = accept(&listener).unwrap().unwrap();
    let us = Peer {
        pid: std::process::id(),
        uid: our_uid().unwrap(),
    };
    assert_eq!(server_peer, us);
    assert_eq!(client_peer, us);
    for end in [&client, &server] {
        assert!(fcntl_getfl(end).unwrap().contains(OFlags::NONBLOCK));
        assert!(fcntl_getfd(end).unwrap().contains(FdFlags::CLOEXEC));
    }
}

#[test]
fn a_client_that_left_while_it_queued_does_no_harm() {
    let temp = tempdir().unwrap();
    let lock = Lock::acquire(&socket_in(temp.path())).unwrap();
    let listener = serve(&lock);
    drop(connect(lock.socket()).unwrap());
    let _stays = connect(lock.socket()).unwrap();
    assert_eq!(std::iter::from_fn(|| accept(&listener).unwrap()).count(), 2);
}

#[test]
fn only_the_lock_of_this_very_name_publishes_it() {
    let temp = tempdir().unwrap();
    let path = |slot| socket_path(temp.path(), &DeviceUuid([1; 16]), Some(slot), None, Role::Target).unwrap();
    let (right, wrong) = (Lock::acquire(&path(0)).unwrap(), Lock::acquire(&path(1)).unwrap());
    let pending = Pending::bind(&right).unwrap();
    assert!(matches!(
        pending.publish(&wrong),
        Err(ListenError::OtherLock { .. })
    ));
    for slot in [0, 1] {
        assert!(!path(slot).exists());
        assert!(!path(slot).with_extension("tmp").exists());
    }
}

#[test]
fn who_lost_the_lock_neither_binds_nor_publishes_nor_removes() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    let old = Lock::acquire(&socket).unwrap();
    let pending = Pending::bind(&old).unwrap();
    std::fs::remove_file(format!("{}.lock", socket.display())).unwrap();
    let new = Lock::acquire(&socket).unwrap();
    let _listener = serve(&new);
    assert!(matches!(Pending::bind(&old), Err(ListenError::LockLost { .. })));
    assert!(matches!(pending.publish(&old), Err(ListenError::LockLost { .. })));
    assert!(matches!(remove(&old), Err(ListenError::LockLost { .. })));
    connect(&socket).unwrap();
}

#[test]
fn its_holder_removes_a_socket_and_once_more_is_no_error() {
    let temp = tempdir().unwrap();
    let lock = Lock::acquire(&socket_in(temp.path())).unwrap();
    let listener = serve(&lock);
    let (_client, _) = connect(lock.socket()).unwrap();
    remove(&lock).unwrap();
    remove(&lock).unwrap();
    assert!(matches!(connect(lock.socket()), Err(ConnectError::Absent { .. })));
    assert!(accept(&listener).unwrap().is_some(), "who was connected stays so");

    // What an owner left that was killed before it gave the socket its name.
    std::mem::forget(Pending::bind(&lock).unwrap());
    assert!(lock.socket().with_extension("tmp").exists());
    remove(&lock).unwrap();
    assert!(!lock.socket().with_extension("tmp").exists());

    // What is in the way of the one is not in the way of the other.
    let _listener = serve(&lock);
    std::fs::create_dir(lock.socket().with_extension("tmp")).unwrap();
    assert!(matches!(remove(&lock), Err(ListenError::Io(_))));
    assert!(!lock.socket().exists());
}

#[test]
fn the_longest_path_is_served_and_one_more_byte_is_refused() {
    let temp = tempdir().unwrap();
    let name = socket_in(Path::new("")).as_os_str().len();
    let padding = 107 - name - temp.path().as_os_str().len() - 2;
    let dir = temp.path().join("d".repeat(padding));
    std::fs::create_dir(&dir).unwrap();
    let socket = socket_in(&dir);
    assert_eq!(socket.as_os_str().len(), 107);
    let lock = Lock::acquire(&socket).unwrap();
    let _listener = serve(&lock);
    connect(&socket).unwrap();

    let longer = dir.join(format!("{}x", socket.file_name().unwrap().to_str().unwrap()));
    let lock = Lock::acquire(&longer).unwrap();
    assert!(matches!(Pending::bind(&lock), Err(ListenError::Path(_))));
    assert!(matches!(connect(&longer), Err(ConnectError::Path(_))));
}
