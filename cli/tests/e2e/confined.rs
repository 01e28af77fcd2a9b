//! What a server gives up, and that it serves, is adopted and ends as before.

use crate::checkpoints::*;
use crate::harness::*;
use rustix::process::Signal;
use std::fs;

/// What the kernel says of every thread of a process, on a line of this name of its status.
fn threads_say(pid: u32, name: &str) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let mut said = Vec::new();
    for task in tasks {
        let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let mut lines = status.lines();
        let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        said.push(line.unwrap().trim().to_owned());
    }
    said
}

/// The soft and the hard limit of a process's core dumps.
fn core_limits(pid: u32) -> [String; 2] {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let mut lines = limits.lines();
    let line = lines
        .find_map(|line| line.strip_prefix("Max core file size"))
        .unwrap();
    let mut words = line.split_whitespace().map(str::to_owned);
    std::array::from_fn(|_| words.next().unwrap())
}

#[track_caller]
fn every_thread_is_confined(server: u32) {
    let calls = threads_say(server, "Seccomp");
    assert!(calls.len() > 1, "it has threads: {calls:?}");
    assert!(
        calls.iter().all(|mode| mode == "2"),
        "a filter for each: {calls:?}"
    );
    let privileges = threads_say(server, "NoNewPrivs");
    assert!(privileges.iter().all(|barred| barred == "1"), "{privileges:?}");
    assert_eq!(core_limits(server), ["0", "0"]);
}

/// With each runtime: served, armed again, adopted, released, and ended without a launcher.
fn is_confined_and_serves(runtime: &str) {
    let (site, llama) = (Site::new(), model("llama"));
    let runtime = ["--runtime", runtime];
    let mut launcher = site.preload(&llama, 2, &runtime);
    let server = launcher.child("server");
    every_thread_is_confined(server);
    assert_eq!(core_limits(launcher.pid()), ["0", "0"]);
    launcher.says("gave up what it does not need: no new privileges, no core dumps, landlock (ABI ");
    site.attach_verified(&llama, 2);

    signal(server, Signal::KILL);
    wait_until("another server serves", || {
        launcher
            .children("server")
            .first()
            .is_some_and(|next| *next != server)
            && site.status().iter().all(|daemon| daemon["pid"] != server)
    });
    let server = launcher.child("server");
    every_thread_is_confined(server);

    launcher.kill();
    site.attach_verified(&llama, 2);
    let mut launcher = site.preload(&llama, 2, &runtime);
    launcher.says("adopted");
    every_thread_is_confined(server);
    site.attach_verified(&llama, 2);
    assert_eq!(site.run(&["release", "--rank", "1"]).code, Some(0));

    launcher.kill();
    assert!(is_alive(&server), "rank 0 is still served");
    site.attach_verified_rank(&llama, 2, 0);
    // It removes its sockets itself.
    signal(server, Signal::TERM);
    site.assert_clean();
}

#[test]
fn a_server_on_blocking_is_confined_and_serves() {
    is_confined_and_serves("blocking");
}

#[test]
fn a_server_on_tokio_is_confined_and_serves() {
    is_confined_and_serves("tokio");
}

#[test]
fn a_server_on_smol_is_confined_and_serves() {
    is_confined_and_serves("smol");
}

#[test]
fn what_was_given_up_is_in_the_status() {
    let (site, llama) = (Site::new(), model("llama"));
    let launcher = site.preload(&llama, 1, &[]);
    let server = launcher.child("server");
    let confinement = &site.status()[0]["confinement"];
    assert_eq!(confinement["no_new_privileges"], true);
    assert_eq!(confinement["no_core_dumps"], true);
    assert!(confinement["landlock_abi"].as_u64().unwrap() > 0, "{confinement}");
    assert_eq!(confinement["seccomp"], true);
    let ran = site.run(&["status"]);
    let line = format!(
        "server {server} gave up what it does not need: no new privileges, no core dumps, landlock (ABI "
    );
    assert!(ran.stdout.contains(&line), "{ran:?}");
    assert!(!ran.stdout.contains("missing"), "{ran:?}");
}
