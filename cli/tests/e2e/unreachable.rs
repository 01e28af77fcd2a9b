//! Servers whose launcher was killed and that cannot be reached: every command that meets one names the process.

use crate::checkpoints::*;
use crate::harness::*;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// The server of a launcher that was killed, when it has noticed.
fn orphan(site: &Site, model: &Path, more: &[&str]) -> u32 {
    let mut launcher = site.preload(model, 1, more);
    launcher.has_loaded();
    let server = launcher.child("server");
    launcher.kill();
    wait_until("the server has noticed", || {
        site.status()
            .iter()
            .all(|daemon| daemon["launcher_pid"] == Value::Null)
    });
    server
}

fn remove_control_sockets(site: &Site) {
    for entry in fs::read_dir(site.dir()).unwrap() {
        let path = entry.unwrap().path();
        if path
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .starts_with("weightd-control")
        {
            fs::remove_file(path).unwrap();
        }
    }
}

#[test]
fn a_server_without_a_launcher_that_hangs_is_named_by_preload_status_and_stop() {
    let (site, model) = (Site::new(), model("qwen3"));
    let server = orphan(&site, &model, &[]);
    signal(server, Signal::STOP);
    let commands = [
        site.weightd(&["status"]),
        site.weightd(&["stop"]),
        site.on_model("preload", &model, 1, &[]),
    ];
    for mut ran in commands.map(|command| site.start(command)) {
        assert_eq!(ran.code(), 1, "{}", ran.log());
        let error = ran.error();
        assert!(error.contains(&format!("`kill -9 {server}`")), "{error}");
    }
    let row = site.run(&["status"]).stdout.lines().nth(1).unwrap().to_owned();
    assert!(row.ends_with(&format!("{server}         -")), "{row}");

    signal(server, Signal::KILL);
    let mut next = site.preload(&model, 1, &[]);
    next.signal(Signal::INT);
    assert_eq!(next.code(), 130);
    site.assert_clean();
}

#[test]
fn a_server_whose_control_socket_is_gone_is_named_whether_it_answers_or_not() {
    let (site, model) = (Site::new(), model("qwen3"));
    let server = orphan(&site, &model, &[]);
    remove_control_sockets(&site);
    let end = format!("end it with `kill {server}`");
    let ran = site.run(&["status"]);
    assert!(ran.stdout.contains(&end), "{ran:?}");
    assert!(!ran.stdout.contains("take it over"), "{ran:?}");
    for command in [site.weightd(&["stop"]), site.on_model("preload", &model, 1, &[])] {
        let error = finish(command).error(1);
        assert!(error.contains(&end), "{error}");
    }
    signal(server, Signal::STOP);
    let error = site.run(&["stop"]).error(1);
    assert!(error.contains(&end), "{error}");
    signal(server, Signal::KILL);
}

#[test]
fn the_advice_to_stop_a_daemon_is_about_its_instance_alone() {
    let (site, model) = (Site::new(), model("qwen3"));
    let blue = ["--instance", "blue"];
    let stop = format!(
        "`weightd stop --socket-dir {} --instance blue`",
        site.dir().display()
    );
    let mut launcher = site.preload(&model, 1, &blue);
    let error = finish(site.on_model("preload", &model, 1, &blue)).error(1);
    assert!(error.contains(&stop), "{error}");
    launcher.kill();
    wait_until("the server has noticed", || {
        site.status()[0]["launcher_pid"] == Value::Null
    });
    let other = [&blue[..], &["--dtype", "float32"]].concat();
    let error = finish(site.on_model("preload", &model, 1, &other)).error(1);
    assert!(error.contains(&stop), "{error}");
    let ran = site.run(&["status"]);
    assert!(ran.stdout.contains(&stop), "{ran:?}");
    assert_eq!(
        site.run(&["stop", "--instance", "blue"]).stdout,
        "stopped 1 daemon\n"
    );
    site.assert_clean();
}
