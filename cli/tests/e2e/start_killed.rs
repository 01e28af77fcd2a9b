//! What dies before READY takes everything with it.

use crate::checkpoints::*;
use crate::floods::frame;
use crate::harness::*;
use rustix::process::Signal;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command};
use weightd_core::wire::frame::HEADER_BYTES;
use weightd_core::wire::message::ServerStatus;
use weightd_socket::lock::{Lock, Owner};

/// A launcher whose loader is stopped half-way.
fn half_way(site: &Site) -> (Running, u32) {
    let model = large_checkpoint(&site.path().join("model"), 256 << 20);
    let launcher = site.start(site.on_model("preload", &model, 1, &[]));
    let loader = launcher.child("loader");
    signal(loader, Signal::STOP);
    (launcher, loader)
}

#[test]
fn a_killed_loader_ends_the_start_with_one_line() {
    let site = Site::new();
    let (mut launcher, loader) = half_way(&site);
    signal(loader, Signal::KILL);
    assert_eq!(launcher.code(), 1);
    assert_eq!(launcher.line(), "");
    let error = launcher.error();
    assert!(error.contains("the loader was killed by signal 9"), "{error}");
    site.assert_clean();
}

#[test]
fn a_server_killed_before_ready_ends_the_start_with_one_line() {
    let site = Site::new();
    let (mut launcher, _) = half_way(&site);
    signal(launcher.child("server"), Signal::KILL);
    assert_eq!(launcher.code(), 1);
    assert_eq!(launcher.line(), "");
    let error = launcher.error();
    assert!(error.contains("the server died before it was ready"), "{error}");
    assert!(error.contains("signal 9"), "{error}");
    site.assert_clean();
}

#[test]
fn a_launcher_killed_before_ready_leaves_no_process_and_the_next_one_takes_its_names() {
    let site = Site::new();
    let (mut launcher, loader) = half_way(&site);
    let server = launcher.child("server");
    launcher.kill();
    signal(loader, Signal::CONT);
    wait_until("loader and server are gone", || {
        !is_alive(&loader) && !is_alive(&server)
    });
    let mut next = site.preload(&model("qwen3"), 1, &[]);
    site.attach_verified(&model("qwen3"), 1);
    next.signal(Signal::INT);
    assert_eq!(next.code(), 130);
    site.assert_clean();
}

/// A server whose launcher was killed before it led it, at a control socket in the site's directory.
pub fn never_led(control: &Path) -> Child {
    let _ = fs::remove_file(control);
    let listener = UnixListener::bind(control).unwrap();
    listener.set_nonblocking(true).unwrap();
    File::create(format!("{}.lock", control.display())).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_weightd"));
    command.args(["server", "--control"]).arg(control);
    command.stdin(OwnedFd::from(listener)).spawn().unwrap()
}

#[test]
fn a_server_that_was_never_led_ends_when_it_is_asked_to_stop() {
    let site = Site::new();
    fs::create_dir_all(site.dir()).unwrap();
    let mut server = never_led(&site.dir().join("weightd-control_1.sock"));
    // Of launchers that were killed a little earlier.
    let early = ["weightd-control_2.tmp", "weightd-control_2.sock.lock"];
    for name in early {
        File::create(site.dir().join(name)).unwrap();
    }
    assert_eq!(site.run(&["stop"]).stdout, site.no_daemons());
    assert_eq!(server.wait().unwrap().code(), Some(0));
    site.assert_clean();
}

#[test]
fn engines_find_nobody_before_all_is_loaded() {
    let site = Site::new();
    let (mut launcher, loader) = half_way(&site);
    let model = site.path().join("model");
    let error = site.attach(&model, 1, &["--all"]).error(1);
    assert!(
        error.contains("no daemon serves") && error.ends_with("wait until it is ready (--wait SECONDS)"),
        "{error}"
    );
    assert!(site.status().is_empty());
    let patient = site.start(site.on_model("attach", &model, 1, &["--all", "--wait", "60"]));
    signal(loader, Signal::CONT);
    launcher.ready();
    let mut patient = patient;
    assert_eq!(patient.code(), 0, "{}", patient.log());
}

#[test]
fn an_engine_that_waits_may_come_before_the_socket_directory() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut patient = site.start(site.on_model("attach", &model, 1, &["--all", "--wait", "60"]));
    assert!(!site.dir().exists());
    let _launcher = site.preload(&model, 1, &[]);
    assert_eq!(patient.code(), 0, "{}", patient.log());
}

#[test]
fn a_server_that_has_not_noticed_yet_that_its_launcher_was_killed_is_waited_for() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = site.preload(&model, 1, &[]);
    let socket = site.socket();
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);

    // What such a server has, and says.
    let lock = Lock::acquire(&socket).unwrap();
    let control = site.dir().join("weightd-control_00000000000000ff.sock");
    let owner = Owner {
        control: control.file_name().unwrap().to_str().unwrap().to_owned(),
        pid: launcher.pid(),
    };
    lock.write_owner(&owner).unwrap();
    let status = ServerStatus {
        version: "1".to_owned(),
        pid: std::process::id(),
        launcher_pid: launcher.pid(),
        daemons: 1,
        uptime_s: 1,
    };
    let listener = UnixListener::bind(&control).unwrap();
    let server = std::thread::spawn(move || {
        for _ in 0..3 {
            let (mut client, _) = listener.accept().unwrap();
            client.read_exact(&mut [0; HEADER_BYTES]).unwrap();
            client.write_all(&frame(status.clone())).unwrap();
        }
        fs::remove_file(control).unwrap();
        drop(lock);
    });
    let mut next = site.preload(&model, 1, &[]);
    server.join().unwrap();
    site.attach_verified(&model, 1);
    next.signal(Signal::INT);
    assert_eq!(next.code(), 130);
    site.assert_clean();
}
