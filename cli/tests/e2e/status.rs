//! `weightd status` for a person, for a script, and for somebody who watches.

use crate::checkpoints::*;
use crate::engine::*;
use crate::harness::*;
use rustix::process::Signal;
use std::fs::File;
use std::io::{Read, Write};
use std::process::Stdio;

#[test]
fn the_table_names_every_daemon_and_the_list_below_who_holds_and_leases_what() {
    let (site, llama) = (Site::new(), model("llama"));
    let launcher = site.preload(&llama, 2, &[]);
    let mapped = map(&site, &llama, 2);
    let ran = site.run(&["status"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert!(lines[0].starts_with("DEVICE"), "{ran:?}");
    let server = launcher.child("server").to_string();
    for (line, (daemon, leases)) in lines[1..3].iter().zip(site.status().iter().zip(["1", "0"])) {
        let cells: Vec<&str> = line
            .split("  ")
            .map(str::trim)
            .filter(|cell| !cell.is_empty())
            .collect();
        let device = &daemon["device_uuid"].as_str().unwrap()[..8];
        assert_eq!(cells[0], device);
        assert_eq!(cells[1], daemon["global_rank"].to_string());
        assert_eq!(
            cells[2..6],
            ["target", "LlamaForCausalLM", "checkpoint", "serving"]
        );
        assert_eq!(cells[6], daemon["generation"].as_str().unwrap());
        assert!(cells[7].ends_with(" KiB") || cells[7].ends_with(" MiB"), "{line}");
        assert_eq!(cells[8], leases);
        assert_eq!(cells[10..], [server.as_str(), &launcher.pid().to_string()]);
    }
    let held = format!("held by launcher {} and server {server}", launcher.pid());
    assert_eq!(ran.stdout.matches(&held).count(), 2, "{ran:?}");
    let leased = format!("leased by pid {}, held", std::process::id());
    assert_eq!(ran.stdout.matches(&leased).count(), 1, "{ran:?}");
    assert_eq!(ran.stdout.matches("leased by none").count(), 1, "{ran:?}");

    assert_eq!(
        ran.stdout.matches(" (dtype auto, no checksums), ").count(),
        2,
        "{ran:?}"
    );
    assert_eq!(site.status()[0]["checksums"], false);

    assert_eq!(site.run(&["release", "--rank", "0"]).code, Some(0));
    let ran = site.run(&["status"]);
    let waits = format!(
        "let go by weightd, free when it is unmapped by pid {}",
        std::process::id()
    );
    assert!(ran.stdout.contains(&waits), "{ran:?}");
    assert!(ran.stdout.contains("was released"), "{ran:?}");
    let json = &site.status()[0];
    assert!(json["checksums"].is_null(), "{json}");
    let leases = &json["activity"]["leases"];
    assert_eq!(leases[0]["pid"], std::process::id());
    assert_eq!(leases[0]["generation"], json["generation"]);
    assert_eq!(
        json["activity"]["leased_generations"][0]["bytes"],
        json["leased_bytes"]
    );
    assert!(json["leased_bytes"].as_u64().unwrap() > 0 && json["bytes"] == 0);
    drop(mapped);
    wait_until("nothing waits any more", || {
        !site.run(&["status"]).stdout.contains("let go by weightd")
    });
}

#[test]
fn a_daemon_that_does_not_answer_has_a_line_and_an_error() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let launcher = site.preload(&qwen, 1, &[]);
    let server = launcher.child("server");
    // Neither launcher nor server goes on, so the one does not replace the other.
    launcher.signal(Signal::STOP);
    signal(server, Signal::STOP);
    let ran = site.run(&["status"]);
    assert!(ran.stdout.contains("no answer"), "{ran:?}");
    let error = ran.error(1);
    assert!(error.contains("no answer within"), "{error}");
    let (launcher_pid, server_pid) = (launcher.pid().to_string(), server.to_string());
    assert!(
        error.contains(&format!("`kill -9 {launcher_pid} {server_pid}`")),
        "{error}"
    );
    let row = ran.stdout.lines().nth(1).unwrap();
    let cells: Vec<&str> = row.split_whitespace().rev().take(2).collect();
    assert_eq!(cells, [launcher_pid, server_pid]);
    launcher.signal(Signal::CONT);
    signal(server, Signal::CONT);
}

#[test]
fn watching_prints_again_and_again_until_a_signal() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let mut watch = site.start(site.weightd(&["status", "--watch", "0.1"]));
    let none = site.no_daemons();
    assert_eq!(watch.line(), none.trim_end());
    let _launcher = site.preload(&qwen, 1, &[]);
    for _ in 0..2 {
        let mut line = watch.line();
        while line == none.trim_end() {
            line = watch.line();
        }
        while !line.contains("serving") {
            assert!(!line.contains('\x1b'), "{line:?}");
            line = watch.line();
        }
    }
    watch.signal(Signal::INT);
    assert_eq!(watch.code(), 130);

    let mut json = site.start(site.weightd(&["status", "--json", "--watch=0.1"]));
    for _ in 0..2 {
        let daemon: serde_json::Value = serde_json::from_str(&json.line()).unwrap();
        assert_eq!(daemon["state"], "serving");
    }
    json.signal(Signal::TERM);
    assert_eq!(json.code(), 143);
    for wrong in ["0", "-1", "x", "1e9"] {
        let wrong = format!("--watch={wrong}");
        assert_eq!(site.run(&["status", &wrong]).code, Some(2));
    }
}

#[test]
fn watching_on_a_terminal_redraws_in_place_and_leaves_it_as_it_was() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let _launcher = site.preload(&qwen, 1, &[]);
    let (mut ours, theirs) = terminal();
    let mut command = site.weightd(&["status", "--watch", "0.1"]);
    let mut watch = command
        .stdout(Stdio::from(theirs.try_clone().unwrap()))
        .stderr(Stdio::from(theirs))
        .spawn()
        .unwrap();
    drop(command);
    let mut shown = String::new();
    let mut buffer = [0; 4096];
    while shown.matches("\x1b[H").count() < 3 {
        let read = ours.read(&mut buffer).unwrap();
        shown.push_str(&String::from_utf8_lossy(&buffer[..read]));
    }
    assert!(shown.starts_with("\x1b[?1049h"), "{shown:?}");
    assert!(shown.contains("serving"), "{shown:?}");
    signal(watch.id(), Signal::INT);
    // Until the other end is closed: EIO.
    while let Ok(read @ 1..) = ours.read(&mut buffer) {
        shown.push_str(&String::from_utf8_lossy(&buffer[..read]));
    }
    assert_eq!(watch.wait().unwrap().code(), Some(130));
    assert!(shown.ends_with("\x1b[?7h\x1b[?25h\x1b[?1049l"), "{shown:?}");
}

/// A pseudo terminal: our end and the other.
pub fn terminal() -> (File, File) {
    use rustix::fs::{Mode, OFlags, open};
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let theirs = open(&name, flags, Mode::empty()).unwrap();
    let mut theirs = File::from(theirs);
    theirs.flush().unwrap();
    (File::from(ours), theirs)
}
