//! A launcher that dies after READY leaves its server serving.

use crate::checkpoints::*;
use crate::harness::*;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;

#[test]
fn the_server_serves_on_until_it_is_stopped() {
    let (site, model) = (Site::new(), model("llama"));
    let server = site.orphan(&model, 2, &[]);
    site.attach_verified(&model, 2);
    let status = site.run(&["status"]);
    assert_eq!(status.stdout.matches("launcher none").count(), 2, "{status:?}");

    let ran = site.run(&["stop"]);
    assert_eq!(
        (ran.code, ran.stdout.as_str()),
        (Some(0), "stopped 2 daemons\n"),
        "{ran:?}"
    );
    wait_until("the server is gone", || !is_alive(&server));
    site.assert_clean();
    let mut next = site.preload(&model, 2, &[]);
    site.attach_verified(&model, 2);
    next.signal(Signal::INT);
    assert_eq!(next.code(), 130);
    site.assert_clean();
}

#[test]
fn whoever_was_killed_and_is_waited_for_by_nobody_is_dead() {
    let (site, model) = (Site::new(), model("llama"));
    let launcher = site.preload(&model, 1, &[]);
    let server = launcher.child("server");
    // Killed under a parent that does not wait, it keeps its process id, as a zombie.
    let zombie = |pid: u32| fs::exists(format!("/proc/{pid}")).unwrap() && !is_alive(&pid);
    launcher.signal(Signal::KILL);
    wait_until("the launcher is a zombie", || zombie(launcher.pid()));
    wait_until("the server has noticed", || {
        site.status()
            .iter()
            .all(|daemon| daemon["launcher_pid"] == Value::Null)
    });
    let next = site.preload(&model, 1, &[]);
    assert_eq!(site.status()[0]["launcher_pid"], next.pid());
    assert_eq!(site.status()[0]["pid"], server, "it was adopted");

    // The whole pair.
    next.signal(Signal::KILL);
    wait_until("the second launcher is a zombie", || zombie(next.pid()));
    signal(server, Signal::KILL);
    wait_until("the server is gone", || !is_alive(&server));
    let mut last = site.preload(&model, 1, &[]);
    assert!(zombie(launcher.pid()) && zombie(next.pid()), "nobody waited");
    site.attach_verified(&model, 1);
    last.signal(Signal::INT);
    assert_eq!(last.code(), 130);
    site.assert_clean();
}

#[test]
fn an_orphan_that_is_terminated_removes_its_sockets() {
    let site = Site::new();
    let server = site.orphan(&model("llama"), 2, &[]);
    signal(server, Signal::TERM);
    wait_until("the server is gone", || !is_alive(&server));
    let left = |site: &Site, end| site.left().iter().any(|name| name.ends_with(end));
    assert!(!left(&site, ".sock"));
    site.assert_clean();
    assert_eq!(site.run(&["stop"]).stdout, site.no_daemons());
}

#[test]
fn an_orphan_that_was_released_ends() {
    let site = Site::new();
    let server = site.orphan(&model("llama"), 1, &[]);
    let ran = site.run(&["release", "--all"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    wait_until("the server is gone", || !is_alive(&server));
}

#[test]
fn the_stale_sockets_of_a_killed_pair_are_replaced() {
    let (site, model) = (Site::new(), model("llama"));
    let server = site.orphan(&model, 2, &[]);
    signal(server, Signal::KILL);
    wait_until("the server is gone", || !is_alive(&server));
    assert!(site.left().len() >= 2);
    assert!(site.status().is_empty());
    let error = site.attach(&model, 2, &["--all"]).error(1);
    assert!(error.contains("no daemon serves"), "{error}");

    let mut next = site.preload(&model, 2, &[]);
    site.attach_verified(&model, 2);
    next.signal(Signal::TERM);
    assert_eq!(next.code(), 143);
    site.assert_clean();
}

#[test]
fn an_orphan_leaves_a_name_alone_whose_lock_file_was_replaced() {
    let (site, model) = (Site::new(), model("llama"));
    let server = site.orphan(&model, 1, &[]);
    let socket = site.status()[0]["socket"].as_str().unwrap().to_owned();
    // As a cleaner of temporary files does. The name is anyone's then, and another takes it.
    fs::remove_file(format!("{socket}.lock")).unwrap();
    fs::remove_file(&socket).unwrap();
    let mut next = site.preload(&model, 1, &[]);
    signal(server, Signal::TERM);
    wait_until("the orphan is gone", || !is_alive(&server));
    assert!(fs::exists(&socket).unwrap(), "it is not the orphan's to remove");
    site.attach_verified(&model, 1);
    next.signal(Signal::INT);
    assert_eq!(next.code(), 130);
    site.assert_clean();
}
