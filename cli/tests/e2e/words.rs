//! What others say steers no terminal and breaks no script, whoever they are.

use crate::checkpoints::*;
use crate::faults::next_frame;
use crate::harness::*;
use serde_json::Value;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::thread;
use weightd_core::text::is_hidden;
use weightd_core::wire::Message;
use weightd_core::wire::message::{ErrorCode, Failure};

/// What steers terminals, and what JSON escapes in two halves.
const FOUL: &str = "a\u{1b}[2J\u{9b}31m\u{202e}\u{e0041}";

/// A directory with a daemon's socket, of a daemon that answers everything with a failure of many words.
fn impostor(site: &Site) -> PathBuf {
    let _launcher = site.preload(&model("qwen3"), 1, &[]);
    let name = site.socket().file_name().unwrap().to_owned();
    let dir = site.path().join("impostor");
    fs::create_dir(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).unwrap();
    let listener = UnixListener::bind(dir.join(name)).unwrap();
    thread::spawn(move || {
        while let Ok((mut client, _)) = listener.accept() {
            while let Some((header, _)) = next_frame(&mut client) {
                let failure = Failure {
                    code: ErrorCode::Internal.number(),
                    retryable: false,
                    message: format!("{FOUL}\nweightd: forged {}", "x".repeat(60_000)),
                };
                let answer = Message::from(failure).frame(header.request, 0).unwrap();
                client.write_all(&answer).unwrap();
            }
        }
    });
    dir
}

#[track_caller]
fn assert_harmless(text: &str) {
    assert!(!text.contains(|c| is_hidden(c) && c != '\n'), "{text:?}");
    assert!(text.lines().all(|line| line.len() < 5000), "{text:?}");
}

#[test]
fn a_daemons_words_stay_on_one_line_wherever_they_are_shown() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let dir = impostor(&site);
    let there = ["--socket-dir", dir.to_str().unwrap()];
    for subcommand in ["status", "scrub"] {
        let ran = site.run(&[&[subcommand], &there[..]].concat());
        let error = ran.error(1);
        assert!(
            error.contains(r"a\u{1b}[2J\u{9b}31m\u{202e}\u{e0041}\nweightd: forged"),
            "{error}"
        );
        assert_harmless(&error);
    }
    let error = site
        .attach(&qwen, 1, &[&["--rank", "0"], &there[..]].concat())
        .error(1);
    assert_harmless(&error);

    let ran = site.run(&[&["status", "--log-format", "json"], &there[..]].concat());
    assert_eq!(ran.code, Some(1));
    assert_harmless(&ran.stderr);
    let line: Value = serde_json::from_str(&ran.stderr).unwrap();
    assert_eq!(line["level"], "ERROR");
    assert!(line["message"].as_str().unwrap().contains("forged"), "{line}");
}

#[test]
fn daemons_that_do_not_answer_are_the_exit_code_too_where_stderr_takes_nothing() {
    let site = Site::new();
    let dir = impostor(&site);
    let mut status = site.weightd(&["status", "--socket-dir", dir.to_str().unwrap()]);
    status.stderr(File::options().write(true).open("/dev/full").unwrap());
    assert_eq!(status.status().unwrap().code(), Some(1));
}

#[test]
fn json_answers_show_nothing_hidden_and_say_what_was_said() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let _launcher = site.preload(&qwen, 1, &["--key-extra", &format!("{FOUL}={FOUL}")]);
    let ran = site.run(&["status", "--json"]);
    assert!(!ran.stdout.contains(|c| is_hidden(c) && c != '\n'), "{ran:?}");
    let status: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(status["key"]["extra"][FOUL], FOUL, "{status}");
}

#[test]
fn who_asks_with_few_descriptors_is_served_or_told_what_to_do() {
    let (site, qwen) = (Site::new(), model("qwen3"));
    let _launcher = site.preload(&qwen, 1, &[]);
    let (mut refused, mut served) = (0, 0);
    // With less, not even its libraries are loaded.
    for limit in 4..10 {
        let script = format!(r#"ulimit -n {limit}; exec "$0" "$@""#);
        let ran = finish(run_by(&["sh", "-c", &script], &site.weightd(&["status"])));
        match ran.code {
            Some(0) => served += 1,
            _ => {
                refused += 1;
                let error = ran.error(1);
                assert!(error.contains("ulimit -n"), "{limit}: {error}");
            }
        }
    }
    assert!(refused > 0 && served > 0, "{refused} {served}");
}
