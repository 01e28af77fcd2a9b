//! Other users, and other namespaces.

use crate::checkpoints::*;
use crate::harness::*;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::fs;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use weightd_core::wire::Message;
use weightd_core::wire::frame::{HEADER_BYTES, Header};
use weightd_core::wire::message::ErrorCode;

/// A user that is neither us nor the one that stands for those without a number here.
const STRANGER: u32 = 12_345;
/// The socket that a child is to work on.
const CHILD_SOCKET: &str = "WEIGHTD_TEST_SOCKET";

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: only root can start processes of another user");
    }
    root
}

/// Starts the ignored test `name` of this binary as another user.
fn stranger(site: &Site, name: &str, socket: &Path) -> Child {
    fs::set_permissions(site.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let copy = site.path().join("stranger");
    // By another process: a child that another test starts meanwhile would inherit our descriptor
    // of the copy, and a file that is open for writing cannot be run.
    let copied = Command::new("cp")
        .arg(std::env::current_exe().unwrap())
        .arg(&copy)
        .status();
    assert!(copied.unwrap().success());
    Command::new(copy)
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env(CHILD_SOCKET, socket)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .uid(STRANGER)
        .gid(STRANGER)
        .spawn()
        .unwrap()
}

fn assert_passed(child: Child) {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

fn child_socket() -> Option<PathBuf> {
    std::env::var_os(CHILD_SOCKET).map(PathBuf::from)
}

#[test]
fn a_daemon_refuses_an_engine_of_another_user_and_says_so() {
    if !is_root() {
        return;
    }
    let (site, qwen) = (Site::new(), model("qwen3"));
    let _launcher = site.preload(&qwen, 1, &[]);
    let socket = site.socket();
    // As if an operator had opened both.
    fs::set_permissions(site.dir(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    assert_passed(stranger(&site, "strangers::child_is_refused", &socket));
    site.attach_verified(&qwen, 1);
}

#[test]
#[ignore = "a child of another test"]
fn child_is_refused() {
    let Some(socket) = child_socket() else { return };
    let mut bytes = Vec::new();
    UnixStream::connect(socket)
        .unwrap()
        .read_to_end(&mut bytes)
        .unwrap();
    let header = Header::decode(&bytes).unwrap().unwrap();
    let Ok(Message::Failure(failure)) = Message::decode(header.kind, &bytes[HEADER_BYTES..]) else {
        panic!("{bytes:?}");
    };
    assert_eq!(ErrorCode::from_number(failure.code), ErrorCode::RefusedPeer);
    assert!(failure.message.contains("12345"), "{}", failure.message);
}

#[test]
fn an_engine_refuses_a_daemon_of_another_user() {
    if !is_root() {
        return;
    }
    let (site, qwen) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&qwen, 1, &[]);
    let socket = site.socket();
    launcher.signal(rustix::process::Signal::INT);
    assert_eq!(launcher.code(), 130);
    fs::set_permissions(site.dir(), fs::Permissions::from_mode(0o777)).unwrap();
    let impostor = stranger(&site, "strangers::child_listens", &socket);
    wait_until("the impostor listens", || UnixStream::connect(&socket).is_ok());
    let error = site.attach(&qwen, 1, &["--all"]).error(1);
    assert!(error.contains("refused") && error.contains("12345"), "{error}");
    // The same file under our name, with the stranger behind it.
    std::os::unix::fs::chown(&socket, Some(0), None).unwrap();
    let error = site.attach(&qwen, 1, &["--all"]).error(1);
    assert!(error.contains("refused") && error.contains("12345"), "{error}");
    assert_passed(impostor);
}

#[test]
#[ignore = "a child of another test"]
fn child_listens() {
    let Some(socket) = child_socket() else { return };
    let _listener = UnixListener::bind(socket).unwrap();
    // Until whoever started us closes it.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn namespaces_that_share_only_the_socket_directory_share_the_weights() {
    let isolated = ["--pid", "--net", "--ipc", "--uts", "--mount", "--fork"];
    let possible = Command::new("unshare").args(isolated).arg("true").status();
    if !possible.is_ok_and(|status| status.success()) {
        eprintln!("skipped: this user may not make namespaces");
        return;
    }
    let (site, qwen) = (Site::new(), model("qwen3"));
    let _launcher = site.preload(&qwen, 2, &[]);
    let attach = site.on_model("attach", &qwen, 2, &["--all", "--verify"]);
    let mut command = Command::new("unshare");
    command
        .args(isolated)
        .arg(attach.get_program())
        .args(attach.get_args())
        .env("WEIGHTD_SOCKET_DIR", site.dir());
    let ran = finish(command);
    assert_eq!(ran.code, Some(0), "{ran:?}");
}

/// `weightd` as a user whom permissions bind; of a site that everybody may enter.
fn unprivileged(site: &Site, command: &Command) -> Command {
    let binary = site.path().join("weightd");
    if !binary.exists() {
        fs::set_permissions(site.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let copied = Command::new("cp")
            .arg(command.get_program())
            .arg(&binary)
            .status();
        assert!(copied.unwrap().success());
    }
    let mut stranger = Command::new(binary);
    stranger
        .args(command.get_args())
        .env("WEIGHTD_SOCKET_DIR", site.dir())
        .current_dir("/")
        .uid(STRANGER)
        .gid(STRANGER);
    stranger
}

#[test]
fn a_socket_directory_that_cannot_be_looked_into_is_no_empty_one() {
    if !is_root() {
        return;
    }
    let site = Site::new();
    fs::set_permissions(site.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let qwen = copy_of(&model("qwen3"), &site.path().join("model"));
    let mut launcher = site.start(unprivileged(&site, &site.on_model("preload", &qwen, 1, &[])));
    launcher.ready();
    let socket = fs::read_dir(site.dir())
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let socket = socket.filter(|path| path.extension().is_some_and(|end| end == "sock"));
    let socket = socket.max().unwrap();
    let commands = [&["status"][..], &["stop"], &["release", "--all"], &["scrub"]];
    let expect = |mode, what: &str| {
        fs::set_permissions(site.dir(), fs::Permissions::from_mode(mode)).unwrap();
        for command in commands {
            let error = finish(unprivileged(&site, &site.weightd(command))).error(1);
            for part in [what, site.dir().to_str().unwrap(), "chmod 0700"] {
                assert!(error.contains(part), "{command:?}, {mode:o}: {error}");
            }
        }
    };
    expect(0o600, "cannot look into");
    expect(0o000, "cannot look into");
    expect(0o300, "cannot list");
    // Nor does it hold less since its sockets are gone.
    fs::remove_file(socket).unwrap();
    expect(0o600, "cannot look into");
    fs::set_permissions(site.dir(), fs::Permissions::from_mode(0o700)).unwrap();
    launcher.signal(rustix::process::Signal::INT);
    assert_eq!(launcher.code(), 130);
}

#[test]
fn content_waits_while_the_user_has_too_many_descriptors_in_flight() {
    if !is_root() {
        return;
    }
    // Root is exempt from the kernel's limit, which is the sender's limit of open files.
    let site = Site::new();
    fs::set_permissions(site.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let qwen = copy_of(&model("qwen3"), &site.path().join("model"));
    let binary = site.path().join("weightd");
    let copied = Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_weightd"))
        .arg(&binary)
        .status();
    assert!(copied.unwrap().success());
    let as_stranger = |subcommand: &str, limit: u32, more: &[&str]| {
        let plain = site.on_model(subcommand, &qwen, 1, more);
        let mut command = Command::new("sh");
        command
            .args(["-c", r#"ulimit -n "$0"; exec "$@""#, &limit.to_string()])
            .arg(&binary)
            .args(plain.get_args())
            .env("WEIGHTD_SOCKET_DIR", site.dir())
            .current_dir("/")
            .uid(STRANGER)
            .gid(STRANGER);
        command
    };
    let mut launcher = site.start(as_stranger("preload", 128, &[]));
    launcher.ready();
    let mut flood = stranger(&site, "strangers::child_floods", &site.dir());
    wait_until("descriptors are in flight", || {
        site.path().join("sockets/flood").exists()
    });

    let mut engine = site.start(as_stranger("attach", 128, &["--all", "--verify"]));
    wait_until("the server has the request", || {
        launcher.log().contains(": sent ")
    });
    assert!(engine.child.try_wait().unwrap().is_none());
    drop(flood.stdin.take());
    assert_passed(flood);
    assert_eq!(engine.code(), 0, "{}", engine.log());
    launcher.signal(rustix::process::Signal::INT);
    assert_eq!(launcher.code(), 130);
}

#[test]
#[ignore = "a child of another test"]
fn child_floods() {
    let Some(dir) = child_socket() else { return };
    let (ours, _never_reads) = UnixStream::pair().unwrap();
    for _ in 0..2 {
        let fds = vec![ours.as_fd(); 200];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&ours, &[IoSlice::new(b"x")], &mut control, SendFlags::NOSIGNAL).unwrap();
    }
    fs::write(dir.join("flood"), "").unwrap();
    // Until whoever started us has seen enough.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}
