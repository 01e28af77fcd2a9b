//! How a launcher ends.

use crate::checkpoints::*;
use crate::harness::*;
use rustix::process::Signal;

const LET_GO: &str = "its weights are let go, and free when no engine maps them any more";

/// What a launcher says last, which ended in order.
#[track_caller]
fn assert_last_line(launcher: &Running, expected: &str) {
    let log = launcher.log();
    assert!(log.lines().last().unwrap().ends_with(expected), "{log}");
    assert_eq!(log.matches("ended by ").count(), 1, "{log}");
}

fn ends_with(which: Signal, name: &str, code: i32) {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 2, &[]);
    let server = launcher.child("server");
    launcher.signal(which);
    assert_eq!(launcher.code(), code);
    assert_last_line(&launcher, &format!("ended by {name}: {LET_GO}"));
    assert!(!is_alive(&server));
    site.assert_clean();
}

#[test]
fn ctrl_c_leaves_nothing_and_exits_with_130() {
    ends_with(Signal::INT, "SIGINT", 130);
}

#[test]
fn a_termination_leaves_nothing_and_exits_with_143() {
    ends_with(Signal::TERM, "SIGTERM", 143);
}

#[test]
fn a_hang_up_leaves_nothing_and_exits_with_129() {
    ends_with(Signal::HUP, "SIGHUP", 129);
}

#[test]
fn a_hang_up_is_ignored_under_nohup() {
    let (site, model) = (Site::new(), model("qwen3"));
    let plain = site.on_model("preload", &model, 1, &[]);
    let nohup = run_by(&["sh", "-c", r#"trap "" HUP; exec "$0" "$@""#], &plain);
    let mut launcher = site.start(nohup);
    launcher.ready();
    launcher.signal(Signal::HUP);
    site.attach_verified(&model, 1);
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.code(), 143);
    site.assert_clean();
}

#[test]
fn a_second_signal_does_not_wait_for_a_server_that_hangs() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 1, &[]);
    let server = launcher.child("server");
    signal(server, Signal::STOP);
    launcher.signal(Signal::INT);
    launcher.signal(Signal::TERM);
    assert!(matches!(launcher.code(), 130 | 143));
    assert!(!is_alive(&server));
    site.assert_clean();
}

#[test]
fn ctrl_c_while_loading_leaves_nothing() {
    let site = Site::new();
    let model = large_checkpoint(&site.path().join("model"), 256 << 20);
    let mut launcher = site.start(site.on_model("preload", &model, 1, &[]));
    signal(launcher.child("loader"), Signal::STOP);
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    assert_last_line(&launcher, "ended by SIGINT: it held no weights");
    assert_eq!(launcher.line(), "");
    site.assert_clean();
}

#[test]
fn stop_ends_a_launcher_with_success_and_returns_when_it_is_over() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 2, &[]);
    let ran = site.run(&["stop"]);
    assert_eq!(
        (ran.code, ran.stdout.as_str()),
        (Some(0), "stopped 2 daemons\n"),
        "{ran:?}"
    );
    assert_eq!(site.left(), [""; 0]);
    assert_eq!(launcher.code(), 0);
    assert_last_line(&launcher, &format!("ended by `weightd stop`: {LET_GO}"));
    site.assert_clean();
    let again = site.run(&["stop"]);
    assert_eq!(
        (again.code, again.stdout.as_str()),
        (Some(0), &site.no_daemons()[..]),
        "{again:?}"
    );
}

#[test]
fn stop_ends_all_that_it_can_and_then_says_what_it_could_not() {
    let (site, model) = (Site::new(), model("llama"));
    let instances = ["a", "b", "c"];
    let mut launchers = instances.map(|name| site.preload(&model, 1, &["--instance", name]));
    // A server without a launcher that stands still is what nobody else replaces.
    launchers[1].kill();
    let server = site.json(&["status", "--json", "--instance", "b"])[0]["pid"]
        .as_u64()
        .unwrap() as u32;
    signal(server, Signal::STOP);
    let stop = site.run(&["stop"]);
    assert_eq!(stop.stdout, "stopped 2 daemons\n");
    let error = stop.error(1);
    assert!(error.contains("no answer within"), "{error}");
    for launcher in [0, 2] {
        assert_eq!(launchers[launcher].code(), 0);
    }
    signal(server, Signal::CONT);
    assert_eq!(site.run(&["stop"]).code, Some(0));
    site.assert_clean();
}

#[test]
fn stop_names_the_process_that_serves_where_no_lock_file_leads_to_it() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = site.preload(&model, 2, &[]);
    let sockets = site.status();
    let lock_file = |number: usize| format!("{}.lock", sockets[number]["socket"].as_str().unwrap());
    std::fs::write(lock_file(0), "junk").unwrap();
    std::fs::write(lock_file(1), "junk").unwrap();
    let error = site.run(&["stop"]).error(1);
    assert!(error.contains(&format!("`kill {}`", launcher.pid())), "{error}");
    launcher.kill();
    std::fs::remove_file(lock_file(0)).unwrap();
    let server = sockets[0]["pid"].as_u64().unwrap() as u32;
    wait_until("the server has noticed", || {
        site.status()
            .iter()
            .all(|daemon| daemon["launcher_pid"].is_null())
    });
    let error = site.run(&["stop"]).error(1);
    let advice = format!("`kill {server}`");
    assert_eq!(error.matches(&advice).count(), 2, "{error}");
    signal(server, Signal::TERM);
    wait_until("it ends", || site.processes().is_empty());
}

#[test]
fn stop_ends_a_launcher_that_is_still_loading_and_that_one_has_failed() {
    let site = Site::new();
    let model = large_checkpoint(&site.path().join("model"), 256 << 20);
    let mut launcher = site.start(site.on_model("preload", &model, 1, &[]));
    signal(launcher.child("loader"), Signal::STOP);
    let ran = site.run(&["stop"]);
    assert_eq!(
        (ran.code, ran.stdout.as_str()),
        (Some(0), "stopped 1 daemon\n"),
        "{ran:?}"
    );
    assert_eq!(launcher.code(), 1);
    assert!(launcher.error().contains("asked to stop before"));
    site.assert_clean();
}

#[test]
fn a_holder_ends_with_its_signal() {
    let (site, model) = (Site::new(), model("qwen3"));
    let _launcher = site.preload(&model, 1, &[]);
    let mut engine = site.start(site.on_model("attach", &model, 1, &["--all", "--hold"]));
    assert!(engine.line().starts_with("rank 0: "));
    wait_until("the lease is counted", || site.status()[0]["leases"] == 1);
    engine.signal(Signal::INT);
    assert_eq!(engine.code(), 130);
    wait_until("the lease is over", || site.status()[0]["leases"] == 0);
}

#[test]
fn a_holder_says_on_stdout_what_becomes_of_a_lost_lease_and_in_its_log_why_it_was_lost() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 1, &[]);
    let mut holder = site.start(site.on_model("attach", &model, 1, &["--all", "--hold"]));
    assert!(holder.line().starts_with("rank 0: "));
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    let line = holder.line();
    assert!(
        line.starts_with("rank 0: daemon lost: generation ") && line.contains(" leased again where "),
        "{line}"
    );
    assert!(!line.contains("no daemon serves"), "{line}");
    holder.says("no daemon serves");
    holder.signal(Signal::INT);
    assert_eq!(holder.code(), 130);
    assert_eq!(holder.line(), "");
    assert_eq!(holder.log().matches("daemon lost").count(), 1, "{}", holder.log());
}

#[test]
fn a_server_that_does_not_end_is_killed_and_the_exit_code_says_that_something_was_wrong() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 1, &[]);
    let server = launcher.child("server");
    signal(server, Signal::STOP);
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 1);
    let log = launcher.log();
    let warning = format!("the server (pid {server}) did not end and was killed");
    assert!(log.contains(&warning), "{log}");
    site.assert_clean();
}
