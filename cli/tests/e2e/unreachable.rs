//! Daemons that hold their names and cannot be reached by them: every command that meets one says so, and names the process.

use crate::checkpoints::*;
use crate::harness::*;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::path::Path;

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
    let server = site.orphan(&model, 1, &[]);
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
    let server = site.orphan(&model, 1, &[]);
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

/// The rows of `weightd status --json`, and how it ended.
fn rows(site: &Site) -> (Option<i32>, Vec<Value>) {
    let ran = site.run(&["status", "--json"]);
    let rows = ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap());
    (ran.code, rows.collect())
}

#[test]
fn a_daemon_that_is_loading_has_a_row_and_is_no_failure() {
    let site = Site::new();
    let model = large_checkpoint(&site.path().join("model"), 16 << 20);
    let mut launcher = site.start(site.on_model("preload", &model, 1, &[]));
    let loader = launcher.child("loader");
    signal(loader, Signal::STOP);
    let ran = site.run(&["status"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""), "{ran:?}");
    let row = ran.stdout.lines().nth(1).unwrap();
    assert!(
        row.contains("loading") && row.ends_with(&launcher.pid().to_string()),
        "{row}"
    );
    let (code, rows) = rows(&site);
    assert_eq!(code, Some(0));
    assert_eq!(rows[0]["state"], "loading");
    assert_eq!(rows[0]["launcher_pid"], launcher.pid());
    assert_eq!(rows[0]["pid"], launcher.child("server"));
    let none = site.run(&["status", "--instance", "blue"]);
    assert!(none.stdout.starts_with("no daemons of instance blue"), "{none:?}");
    signal(loader, Signal::CONT);
    launcher.ready();
    assert_eq!(site.status()[0]["state"], "serving");
    // What its lock file says is no daemon's any more.
    launcher.kill();
    assert_eq!(site.run(&["stop"]).code, Some(0));
    assert_eq!(site.run(&["status"]).stdout, site.no_daemons());
}

#[test]
fn a_daemon_whose_socket_is_gone_or_is_something_else_has_a_row_and_is_a_failure() {
    let (site, model) = (Site::new(), model("qwen3"));
    let server = site.orphan(&model, 1, &[]);
    let socket = site.socket();
    fs::remove_file(&socket).unwrap();
    let ran = site.run(&["status"]);
    let error = ran.error(1);
    assert!(
        error.contains("or end it with `weightd stop --socket-dir"),
        "{error}"
    );
    assert!(error.contains(socket.to_str().unwrap()), "{error}");
    let row = ran.stdout.lines().nth(1).unwrap();
    assert!(
        row.contains("not reached") && row.contains(&server.to_string()),
        "{row}"
    );

    fs::create_dir(&socket).unwrap();
    let (code, rows) = rows(&site);
    assert_eq!(code, Some(1));
    assert_eq!(
        (&rows[0]["state"], &rows[0]["pid"]),
        (&"no answer".into(), &server.into())
    );
    assert!(
        rows[0]["why"].as_str().unwrap().contains("not a stream socket"),
        "{rows:?}"
    );
    assert_eq!(site.run(&["stop"]).stdout, "stopped 1 daemon\n");
}

#[test]
fn what_lies_in_a_stopped_daemons_way_is_named_and_no_failure() {
    type Puts = fn(&Path);
    let ways: [(&str, Puts); 2] = [
        ("Is a directory", |socket| {
            let _ = fs::remove_file(socket);
            fs::create_dir(socket).unwrap();
        }),
        ("also known by another name", |socket| {
            fs::hard_link(socket.with_extension("sock.lock"), socket.with_extension("other")).unwrap();
        }),
    ];
    for (what, put) in ways {
        let (site, model) = (Site::new(), model("llama"));
        let mut launcher = site.preload(&model, 2, &[]);
        launcher.has_loaded();
        put(&site.socket());
        let ran = site.run(&["stop"]);
        assert_eq!(
            (ran.code, ran.stdout.as_str()),
            (Some(0), "stopped 2 daemons\n"),
            "{ran:?}"
        );
        assert!(
            ran.stderr.contains(what) && ran.stderr.contains("remove"),
            "{ran:?}"
        );
        assert_eq!(launcher.code(), 0);
        wait_until("all processes are gone", || site.processes().is_empty());
        assert_eq!(site.run(&["status"]).stdout, site.no_daemons());
    }
}
