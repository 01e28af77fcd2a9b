//! What takes several processes: other users, other namespaces, full descriptor tables, kill -9.
//!
//! They are apart from the other tests, since a child holds copies of all our descriptors until it
//! executes, and so delays whatever a test beside it expects from closing one.

mod common;

use common::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command};
use tempfile::tempdir;
use weightd_socket::connect::{ConnectError, Refusal, connect, pair};
use weightd_socket::credentials::our_uid;
use weightd_socket::listen::{AcceptError, accept};
use weightd_socket::lock::{Lock, LockError};
use weightd_socket::message::{Received, SendError, receive, send};

#[test]
fn of_100_processes_that_want_a_name_one_gets_it_until_it_is_killed() {
    let temp = tempdir().unwrap();
    let socket = socket_in(temp.path());
    let mut children: Vec<_> = (0..100)
        .map(|_| child("child_that_wants_the_name", &socket).spawn().unwrap())
        .collect();
    let answers: Vec<_> = children.iter_mut().map(answer).collect();
    assert_eq!(
        answers.iter().filter(|answer| *answer == "owner").count(),
        1,
        "{answers:?}"
    );
    assert_eq!(
        answers.iter().filter(|answer| *answer == "already owned").count(),
        99,
        "{answers:?}"
    );
    assert_owned(Lock::acquire(&socket));
    for mut child in children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    Lock::acquire(&socket).unwrap();
}

fn answer(child: &mut Child) -> String {
    let lines = BufReader::new(child.stdout.as_mut().unwrap())
        .lines()
        .map(Result::unwrap);
    let mut answers = lines.filter_map(|line| Some(line.split_once("answer: ")?.1.to_owned()));
    answers.next().expect("the child ended without an answer")
}

#[test]
#[ignore = "run in child processes by the test of 100 processes"]
fn child_that_wants_the_name() {
    let Some(socket) = child_path() else { return };
    let result = Lock::acquire(&socket);
    match &result {
        Ok(_) => println!("answer: owner"),
        Err(LockError::AlreadyOwned { .. }) => println!("answer: already owned"),
        Err(error) => println!("answer: {error}"),
    }
    // Until the parent kills us, or is gone.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn a_full_descriptor_table_is_told_apart_and_the_client_stays_queued() {
    let temp = tempdir().unwrap();
    assert_success(
        child("child_with_a_full_descriptor_table", &socket_in(temp.path()))
            .output()
            .unwrap(),
    );
}

#[test]
#[ignore = "run in a child process by the test of the full descriptor table"]
fn child_with_a_full_descriptor_table() {
    let Some(socket) = child_path() else { return };
    let lock = Lock::acquire(&socket).unwrap();
    let listener = serve(&lock);
    let _client = connect(&socket).unwrap();
    limit_open_files(64);
    let mut fill: Vec<OwnedFd> = std::iter::from_fn(|| listener.as_fd().try_clone_to_owned().ok()).collect();
    assert!(matches!(accept(&listener), Err(AcceptError::Exhausted)));
    fill.pop();
    assert!(accept(&listener).unwrap().is_some());
}

#[test]
fn a_client_of_another_user_is_known_as_one() {
    if !is_root() {
        return;
    }
    let temp = common::open_dir();
    let lock = Lock::acquire(&socket_in(temp.path())).unwrap();
    let listener = serve(&lock);
    // Else the kernel would keep the stranger out already.
    std::fs::set_permissions(lock.socket(), std::fs::Permissions::from_mode(0o666)).unwrap();
    let (mut command, _copy) = stranger("child_that_connects", lock.socket());
    assert_success(command.output().unwrap());
    let (_connection, peer) = accept(&listener).unwrap().unwrap();
    assert_eq!(peer.uid, STRANGER);
    assert!(!peer.is_trusted_by(our_uid().unwrap()));
}

#[test]
#[ignore = "run in a child process by the test of another user's client"]
fn child_that_connects() {
    let Some(socket) = child_path() else { return };
    assert!(
        matches!(connect(&socket), Err(ConnectError::Refused { .. })),
        "the client looks first, too"
    );
    UnixStream::connect(&socket).unwrap();
}

#[test]
fn a_daemon_of_another_user_is_refused_even_behind_a_file_of_ours() {
    if !is_root() {
        return;
    }
    let temp = open_dir();
    let path = socket_in(temp.path());
    let (mut command, _copy) = stranger("child_that_listens", &path);
    let mut daemon = command.spawn().unwrap();
    let mut lines = BufReader::new(daemon.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    assert!(
        lines.any(|line| line.contains("listening")),
        "the child did not listen"
    );
    let ours = our_uid().unwrap();
    chown(&path, Some(ours), None).unwrap();
    assert_eq!(
        refusal(connect(&path)),
        Refusal::ForeignPeer { uid: STRANGER, ours }
    );
    drop(daemon.stdin.take());
    assert!(daemon.wait().unwrap().success());
}

#[test]
#[ignore = "run in a child process by the test of another user's daemon"]
fn child_that_listens() {
    let Some(path) = child_path() else { return };
    let _listener = UnixListener::bind(path).unwrap();
    println!("listening");
    std::io::stdout().flush().unwrap();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn a_daemon_outside_our_pid_namespace_has_no_pid_and_is_trusted_by_its_uid() {
    if !is_root() {
        return;
    }
    let temp = tempdir().unwrap();
    let path = socket_in(temp.path());
    let _listener = UnixListener::bind(&path).unwrap();
    let inside = child("child_in_a_pid_namespace", &path);
    let mut unshare = Command::new("unshare");
    unshare
        .args(["--pid", "--fork"])
        .arg(inside.get_program())
        .args(inside.get_args());
    for (name, value) in inside.get_envs() {
        unshare.env(name, value.unwrap());
    }
    if !Command::new("unshare")
        .args(["--pid", "--fork", "true"])
        .status()
        .is_ok_and(|status| status.success())
    {
        eprintln!("skipped: cannot make a pid namespace here");
        return;
    }
    assert_success(unshare.output().unwrap());
}

#[test]
#[ignore = "run in a child process by the test of the pid namespace"]
fn child_in_a_pid_namespace() {
    let Some(path) = child_path() else { return };
    let (_socket, peer) = connect(&path).unwrap();
    assert_eq!(peer.pid, 0);
    assert_eq!(Ok(peer.uid), our_uid());
}

#[test]
fn no_descriptor_leaks_on_any_path() {
    assert_success(
        child("child_that_counts_descriptors", Path::new("unused"))
            .output()
            .unwrap(),
    );
}

#[test]
#[ignore = "run in a child process by the test of leaks"]
fn child_that_counts_descriptors() {
    if child_path().is_none() {
        return;
    }
    let before = open_files();
    for _ in 0..100 {
        let (ours, theirs) = pair().unwrap();
        let memory = memory(1);
        let mut received = Vec::new();
        send_unchecked(&ours, &[memory.as_fd(); 253]);
        receive(&theirs, &mut [0], &mut received).unwrap();
        send(&ours, b"x", &[memory.as_fd(); 16]).unwrap();
        receive(&theirs, &mut [0], &mut received).unwrap();
        send(&ours, b"never read", &[memory.as_fd(); 16]).unwrap();
        assert!(received.len() >= 32 + 16);
        assert_eq!(open_files(), before + 3 + received.len());
    }
    assert_eq!(open_files(), before);
}

#[test]
fn a_full_descriptor_table_is_reported_as_truncated() {
    assert_success(
        child("child_without_room_to_receive", Path::new("unused"))
            .output()
            .unwrap(),
    );
}

#[test]
#[ignore = "run in a child process by the test of the full descriptor table"]
fn child_without_room_to_receive() {
    if child_path().is_none() {
        return;
    }
    let (ours, theirs) = pair().unwrap();
    let memory = memory(1);
    send(&ours, b"x", &[memory.as_fd(); 16]).unwrap();
    limit_open_files(64);
    let mut fill: Vec<OwnedFd> = std::iter::from_fn(|| memory.as_fd().try_clone_to_owned().ok()).collect();
    fill.truncate(fill.len() - 3);
    let mut received = Vec::new();
    let message = receive(&theirs, &mut [0], &mut received).unwrap();
    assert_eq!(
        message,
        Received {
            bytes: 1,
            truncated: true
        }
    );
    assert_eq!(received.len(), 3);
}

#[test]
fn descriptors_that_no_peer_reads_make_sending_fail_with_an_error_of_its_own() {
    if !is_root() {
        return;
    }
    let (mut command, _copy) = stranger("child_with_too_many_descriptors_in_flight", Path::new("unused"));
    assert_success(command.output().unwrap());
}

#[test]
#[ignore = "run in a child process, as a user to whom the limit applies, by the test of descriptors in flight"]
fn child_with_too_many_descriptors_in_flight() {
    if child_path().is_none() {
        return;
    }
    limit_open_files(32);
    let (ours, theirs) = pair().unwrap();
    let memory = memory(1);
    let error = (0..10).find_map(|_| send(&ours, b"x", &[memory.as_fd(); 16]).err());
    assert!(matches!(error, Some(SendError::TooManyInFlight)), "{error:?}");
    send(&ours, b"without", &[]).unwrap();
    receive(&theirs, &mut [0], &mut Vec::new()).unwrap();
    receive(&theirs, &mut [0], &mut Vec::new()).unwrap();
    send(&ours, b"x", &[memory.as_fd()]).unwrap();
}
