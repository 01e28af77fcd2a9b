//! What the tests of this crate share: directories, and children that run one test of this binary.
#![allow(dead_code)]

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;
use weightd_core::content::{DeviceUuid, Role};
use weightd_core::peer::Peer;
use weightd_socket::connect::{ConnectError, Refusal};
use weightd_socket::listen::Pending;
use weightd_socket::lock::{Lock, LockError};
use weightd_socket::path::socket_path;

/// A user that is neither us nor the overflow uid.
pub const STRANGER: u32 = 12_345;

/// The file that a child is to work on.
const CHILD_PATH: &str = "WEIGHTD_TEST_CHILD_PATH";

pub fn socket_in(dir: &Path) -> PathBuf {
    socket_path(dir, &DeviceUuid([7; 16]), None, None, Role::Target).unwrap()
}

/// Whether we can make files and processes of another user; says so if not.
pub fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: only root can make files and processes of another user");
    }
    root
}

/// Runs the ignored test `name` of this binary in a process of its own, on `path`.
pub fn child(name: &str, path: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    as_child(&mut command, name, path);
    command
}

/// The same as another user, from a copy of this binary that this user can reach.
pub fn stranger(name: &str, path: &Path) -> (Command, TempDir) {
    let temp = open_dir();
    let copy = temp.path().join("test");
    // By another process: a child that another test starts meanwhile would inherit our descriptor
    // of the copy, and a file that is open for writing cannot be run.
    let status = Command::new("cp")
        .arg(std::env::current_exe().unwrap())
        .arg(&copy)
        .status()
        .unwrap();
    assert!(status.success());
    let mut command = Command::new(copy);
    as_child(&mut command, name, path);
    command.uid(STRANGER).gid(STRANGER).current_dir(temp.path());
    (command, temp)
}

fn as_child(command: &mut Command, name: &str, path: &Path) {
    command
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env(CHILD_PATH, path);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
}

/// In the child: its path; `None` where somebody runs ignored tests by hand.
pub fn child_path() -> Option<PathBuf> {
    std::env::var_os(CHILD_PATH).map(PathBuf::from)
}

pub fn assert_success(output: Output) {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}: {text}", output.status);
    assert!(text.contains("1 passed"), "the child found no such test: {text}");
}

/// A directory that every user may write to.
pub fn open_dir() -> TempDir {
    let temp = tempfile::tempdir().unwrap();
    std::fs::set_permissions(temp.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    temp
}

pub fn limit_open_files(limit: u64) {
    use rustix::process::{Resource, Rlimit, setrlimit};
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(limit),
            maximum: Some(limit),
        },
    )
    .unwrap();
}

/// How many descriptors this process has open; to be compared in a child, where no other test runs.
pub fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

pub fn memory(size: u64) -> OwnedFd {
    let memory = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&memory, size).unwrap();
    fcntl_add_seals(
        &memory,
        SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
    )
    .unwrap();
    memory
}

/// As a peer that ignores the rules.
pub fn send_unchecked(socket: &OwnedFd, descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    sendmsg(socket, &[IoSlice::new(b"x")], &mut control, SendFlags::NOSIGNAL).unwrap();
}

pub fn serve(lock: &Lock) -> OwnedFd {
    Pending::bind(lock).unwrap().publish(lock).unwrap()
}

#[track_caller]
pub fn assert_owned(result: Result<Lock, LockError>) {
    assert!(
        matches!(result, Err(LockError::AlreadyOwned { .. })),
        "{result:?}"
    );
}

#[track_caller]
pub fn refusal(result: Result<(OwnedFd, Peer), ConnectError>) -> Refusal {
    match result {
        Err(ConnectError::Refused { why, .. }) => why,
        other => panic!("{other:?}"),
    }
}
