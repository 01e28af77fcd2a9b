//! What is logged, for whom, and that nobody waits for whoever reads it.

use crate::checkpoints::*;
use crate::harness::*;
use crate::status::terminal;
use rustix::process::Signal;
use serde_json::Value;
use std::fs::File;
use std::io::{Read, pipe};
use std::path::Path;
use std::process::{Child, Stdio};

#[test]
fn json_lines_carry_rank_and_role_wherever_they_are_about_a_daemon() {
    let (site, llama) = (Site::new(), model("llama"));
    let mut launcher = site.preload(&llama, 2, &["--log-format", "json", "--log", "debug"]);
    site.attach_verified(&llama, 2);
    site.attach(
        &llama,
        2,
        &["--rank", "1", "--dtype", "float16", "--key-extra", "a\nb=1"],
    )
    .error(1);
    assert_eq!(site.run(&["release", "--rank", "0"]).code, Some(0));
    let old = launcher.child("server");
    signal(old, Signal::KILL);
    wait_until("another server serves", || launcher.log().contains("re-armed"));
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);

    let log = launcher.log();
    let lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    for line in &lines {
        for field in ["timestamp", "level", "message", "target"] {
            assert!(line[field].is_string(), "{field} in {line}");
        }
        let message = line["message"].as_str().unwrap();
        if message.starts_with("rank ") {
            let rank = line["rank"].as_u64().unwrap_or_else(|| panic!("{line}"));
            assert!(message.starts_with(&format!("rank {rank}: ")), "{line}");
            assert_eq!(line["role"], "target", "{line}");
        }
    }
    let of = |rank: u64, what: &str| {
        let about = |line: &&Value| {
            line["rank"] == rank
                && line["role"] == "target"
                && line["message"].as_str().unwrap().contains(what)
        };
        assert!(
            lines.iter().any(|line| about(&line)),
            "{what} of rank {rank} in {log}"
        );
    };
    for rank in [0, 1] {
        of(rank, "loaded ");
        of(rank, "serving on ");
        of(rank, "sent 39 tensors (+0 aliases)");
    }
    of(1, "mismatch with pid ");
    of(
        1,
        r" in dtype (asked for float16, served auto), extra.a\nb (asked for 1, served none)",
    );
    of(0, "released generation ");
    let model = llama.to_str().unwrap();
    let loaded = lines.iter().find(|line| line["model"] == model).unwrap();
    assert!(loaded["message"].as_str().unwrap().ends_with(" GB/s"), "{loaded}");
    assert!(loaded["path"].is_string() && loaded["bytes"].is_u64() && loaded["seconds"].is_f64());
}

#[test]
fn the_environment_chooses_the_format_and_the_last_line_of_a_failure_has_it_too() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let _holder = site.preload(&qwen, 1, &[]);
    let mut command = site.on_model("preload", &qwen, 1, &[]);
    command.env("WEIGHTD_LOG_FORMAT", "json");
    let ran = finish(command);
    assert_eq!(ran.code, Some(1));
    let last: Value = serde_json::from_str(ran.stderr.lines().last().unwrap()).unwrap();
    assert_eq!(last["level"], "ERROR");
    assert!(
        last["message"].as_str().unwrap().contains("already owns"),
        "{last}"
    );
}

#[test]
fn what_a_client_says_makes_no_line_of_its_own() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let launcher = site.preload(&qwen, 1, &[]);
    let extra = "a\nWARN forged line\u{1b}[2J=1";
    site.attach(&qwen, 1, &["--rank", "0", "--key-extra", extra])
        .error(1);
    wait_until("it is logged", || launcher.log().contains("forged line"));
    let log = launcher.log();
    assert!(log.contains(r"extra.a\nWARN forged line\u{1b}[2J"), "{log}");
}

#[test]
fn a_stderr_that_is_closed_full_or_read_by_nobody_stops_nothing() {
    for way in ["closed", "full", "unread"] {
        let (site, qwen) = (Site::new(), model("qwen3"));
        let mut command = site.on_model("preload", &qwen, 1, &["--log", "trace"]);
        let mut unread = None;
        match way {
            "closed" => {
                // The shell's way; what opens next takes the number.
                command = run_by(&["sh", "-c", r#"exec "$0" "$@" 2>&-"#], &command);
            }
            "full" => drop(command.stderr(File::options().write(true).open("/dev/full").unwrap())),
            _ => {
                let (ours, theirs) = pipe().unwrap();
                command.stderr(theirs);
                unread = Some(ours);
            }
        }
        let mut launcher = command.stdout(Stdio::piped()).spawn().unwrap();
        drop(command);
        ready(&mut launcher, way);
        // More than a pipe holds, and the queue before it.
        for _ in 0..40 {
            cause_a_long_line(&site, &qwen);
        }
        site.attach_verified(&qwen, 1);
        let old = site.status()[0]["pid"].clone();
        signal(old.as_u64().unwrap() as u32, Signal::KILL);
        wait_until("another server serves", || {
            let status = site.status();
            !status.is_empty() && status[0]["pid"] != old
        });
        site.attach_verified(&qwen, 1);
        signal(launcher.id(), Signal::INT);
        let mut ended = None;
        wait_until("it ends in order", || {
            ended = launcher.try_wait().unwrap();
            ended.is_some()
        });
        assert_eq!(ended.unwrap().code(), Some(130), "{way}");
        site.assert_clean();
        drop(unread);
    }
}

/// An engine whose key differs in more than a line has room for.
fn cause_a_long_line(site: &Site, model: &Path) {
    let extra = |number| format!("--key-extra={number:064}={}", "x".repeat(64));
    let extras: Vec<String> = (0..32).map(extra).collect();
    let mut args = vec!["--rank", "0"];
    args.extend(extras.iter().map(String::as_str));
    let error = site.attach(model, 1, &args).error(1);
    assert!(error.len() > 3500, "{error}");
}

/// Waits for READY of a launcher whose log nobody sees.
#[track_caller]
fn ready(launcher: &mut Child, way: &str) {
    let mut stdout = launcher.stdout.take().unwrap();
    let mut line = String::new();
    let mut byte = [0];
    while !line.ends_with('\n') && stdout.read(&mut byte).unwrap() == 1 {
        line.push(char::from(byte[0]));
    }
    assert!(line.starts_with("READY "), "{way}: {line:?}");
}

#[test]
fn lines_that_were_lost_are_counted_when_stderr_is_read_again() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let (mut ours, theirs) = pipe().unwrap();
    let mut command = site.on_model("preload", &qwen, 1, &[]);
    let mut launcher = command.stdout(Stdio::piped()).stderr(theirs).spawn().unwrap();
    drop(command);
    ready(&mut launcher, "unread");
    // The pipe takes 64 KiB, the queue 256 KiB, and no line is longer than 4 KiB.
    for _ in 0..160 {
        cause_a_long_line(&site, &qwen);
    }
    let mut log = String::new();
    let mut buffer = [0; 65536];
    while !log.contains("log lines were lost so far") {
        let read = ours.read(&mut buffer).unwrap();
        assert!(read > 0, "{log}");
        log.push_str(&String::from_utf8_lossy(&buffer[..read]));
    }
    signal(launcher.id(), Signal::INT);
    assert_eq!(launcher.wait().unwrap().code(), Some(130));
}

#[test]
fn a_terminal_shows_bars_with_the_lines_above_them() {
    let site = Site::new();
    let large = large_checkpoint(&site.path().join("model"), 256 << 20);
    let (mut ours, theirs) = terminal();
    let mut command = site.on_model("preload", &large, 1, &[]);
    let mut launcher = command.stdout(Stdio::piped()).stderr(theirs).spawn().unwrap();
    drop(command);
    let mut shown = String::new();
    let mut buffer = [0; 4096];
    while !shown.contains("serving on") {
        let read = ours.read(&mut buffer).unwrap();
        shown.push_str(&String::from_utf8_lossy(&buffer[..read]));
    }
    assert!(shown.contains("rank 0 ["), "{shown:?}");
    assert!(shown.contains("256.00 MiB"), "{shown:?}");
    assert!(!shown.contains(": loading, "), "{shown:?}");
    assert!(shown.contains("loaded "), "{shown:?}");
    signal(launcher.id(), Signal::INT);
    assert_eq!(launcher.wait().unwrap().code(), Some(130));
}
