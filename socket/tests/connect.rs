//! A client connects to a daemon of its own user, and to nothing else.

mod common;

use common::*;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
use std::os::unix::fs::{chown, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener};
use tempfile::tempdir;
use weightd_socket::connect::{ConnectError, Refusal, connect, pair};
use weightd_socket::credentials::{our_uid, peer};

#[test]
fn no_file_and_a_dead_daemons_socket_are_both_absence() {
    let temp = tempdir().unwrap();
    let path = socket_in(temp.path());
    assert!(matches!(connect(&path), Err(ConnectError::Absent { .. })));
    drop(UnixListener::bind(&path).unwrap());
    assert!(matches!(connect(&path), Err(ConnectError::Absent { .. })));
    assert!(matches!(
        connect(&temp.path().join("no/directory.sock")),
        Err(ConnectError::Absent { .. })
    ));
}

#[test]
fn what_is_no_stream_socket_is_refused() {
    let temp = tempdir().unwrap();
    let path = |name: &str| temp.path().join(name);
    std::fs::write(path("file"), "").unwrap();
    assert_eq!(refusal(connect(&path("file"))), Refusal::NotASocket);
    std::fs::create_dir(path("dir")).unwrap();
    assert_eq!(refusal(connect(&path("dir"))), Refusal::NotASocket);
    let _datagrams = UnixDatagram::bind(path("datagrams")).unwrap();
    assert_eq!(refusal(connect(&path("datagrams"))), Refusal::NotASocket);
    let _live = UnixListener::bind(path("live")).unwrap();
    symlink(path("live"), path("link")).unwrap();
    assert_eq!(refusal(connect(&path("link"))), Refusal::Symlink);
    connect(&path("live")).unwrap();
    assert!(matches!(connect(&path("file/below")), Err(ConnectError::Io(_))));
}

#[test]
fn a_full_backlog_is_told_apart_from_absence() {
    let temp = tempdir().unwrap();
    let path = socket_in(temp.path());
    let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&listener, 1).unwrap();
    let mut queued = Vec::new();
    let error = loop {
        match connect(&path) {
            Ok(connection) => queued.push(connection),
            Err(error) => break error,
        }
        assert!(queued.len() < 10, "a backlog of one took ten");
    };
    assert!(matches!(error, ConnectError::Busy { .. }), "{error}");
}

#[test]
fn a_socket_file_of_another_user_is_refused() {
    if !is_root() {
        return;
    }
    let temp = tempdir().unwrap();
    let path = socket_in(temp.path());
    let _listener = UnixListener::bind(&path).unwrap();
    chown(&path, Some(STRANGER), None).unwrap();
    let ours = our_uid().unwrap();
    assert_eq!(
        refusal(connect(&path)),
        Refusal::ForeignFile { uid: STRANGER, ours }
    );
}

#[test]
fn both_ends_of_a_pair_are_ours() {
    let (one, other) = pair().unwrap();
    for end in [&one, &other] {
        let peer = peer(end).unwrap();
        assert_eq!(peer.pid, std::process::id());
        assert!(peer.is_trusted_by(our_uid().unwrap()));
    }
}
