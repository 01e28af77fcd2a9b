//! The example engines, as a reader of the README runs them.

use crate::checkpoints::*;
use crate::harness::*;
use crate::http::{get, post};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// An example of this name, built with the profile that this test has.
fn example(name: &str, site: &Site, model: &Path, more: &[&str]) -> Command {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let dir = BUILT.get_or_init(|| {
        let dir = Path::new(env!("CARGO_BIN_EXE_weightd"))
            .parent()
            .unwrap()
            .to_owned();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", "weightd-examples"]);
        cargo.arg("--target-dir").arg(dir.parent().unwrap());
        if dir.ends_with("release") {
            cargo.arg("--release");
        }
        let built = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap();
        assert!(built.success());
        dir
    });
    let mut command = Command::new(dir.join(name));
    command
        .arg("--model")
        .arg(model)
        .args(more)
        .env("WEIGHTD_SOCKET_DIR", site.dir())
        .stdin(Stdio::null());
    command
}

fn run(name: &str, site: &Site, model: &Path, more: &[&str]) -> Ran {
    let ran = finish(example(name, site, model, more));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    ran
}

#[test]
fn a_synchronous_engine_generates_the_same_from_cache_copy_and_disk_and_says_which_it_was() {
    let (site, model) = (Site::new(), model("llama"));
    let from_disk = run("engine_blocking", &site, &model, &[]);
    assert!(
        from_disk.stderr.contains("loaded from disk: no socket directory"),
        "{from_disk:?}"
    );
    assert!(
        from_disk.stderr.contains("external memory: 0 bytes"),
        "{from_disk:?}"
    );

    let _launcher = site.preload(&model, 1, &[]);
    let mapped = run("engine_blocking", &site, &model, &[]);
    assert!(mapped.stderr.contains("mapped generation"), "{mapped:?}");
    let bytes = &site.status()[0]["bytes"];
    assert!(
        mapped.stderr.contains(&format!("external memory: {bytes} bytes")),
        "{mapped:?}"
    );

    let copied = run(
        "engine_blocking",
        &site,
        &model,
        &["--loader-config", r#"{"mode": "copy"}"#],
    );
    assert!(copied.stderr.contains("copied generation"), "{copied:?}");
    assert_eq!(site.status()[0]["state"], "released");

    assert_eq!([&mapped.stdout, &copied.stdout], [&from_disk.stdout; 2]);
    assert_eq!(
        from_disk.stdout.matches(',').count(),
        7,
        "eight tokens: {from_disk:?}"
    );
}

#[test]
fn an_engine_reads_what_the_checkpoint_lists_and_nothing_that_lies_beside_it() {
    let site = Site::new();
    let plain = run("engine_blocking", &site, &model("llama"), &[]);
    let copy = copy_of(&model("llama"), &site.path().join("copy"));
    fs::write(copy.join("other.safetensors"), "no such format").unwrap();
    let beside = run("engine_blocking", &site, &copy, &[]);
    assert_eq!(beside.stdout, plain.stdout);
}

#[test]
fn each_example_says_what_it_does_and_colours_no_file() {
    let (site, model) = (Site::new(), model("llama"));
    for (name, does) in [
        ("engine_blocking", "A synchronous engine"),
        ("engine_publishing", "An engine that quantizes"),
        ("server_tokio", "An async inference server"),
    ] {
        let help = run(name, &site, &model, &["--help"]);
        assert!(help.stdout.starts_with(does), "{help:?}");
    }
    let logged = run("engine_blocking", &site, &model, &[]);
    assert!(logged.stderr.contains("WARN"), "{logged:?}");
    assert!(!logged.stderr.contains('\x1b'), "{logged:?}");
}

#[test]
fn loader_options_that_are_none_are_named() {
    let (site, model) = (Site::new(), model("llama"));
    let more = ["--loader-config", r#"{"connect_timeout": 1}"#];
    let ran = finish(example("engine_blocking", &site, &model, &more));
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("unknown field `connect_timeout`"), "{ran:?}");
}

#[test]
fn an_engine_that_quantizes_does_so_once_and_nobody_else_gets_what_it_made() {
    let (site, model) = (Site::new(), model("llama"));
    let mut serve = site.start(site.weightd(&["serve"]));
    assert!(serve.line().starts_with("SERVING"), "{}", serve.log());

    let first = run("engine_publishing", &site, &model, &[]);
    assert!(first.stderr.contains("published generation"), "{first:?}");
    let second = run("engine_publishing", &site, &model, &[]);
    assert!(second.stderr.contains("mapped: nothing to do"), "{second:?}");
    assert_eq!(first.stdout, second.stdout);

    // Weights as they are stored are something else.
    let plain = run("engine_blocking", &site, &model, &[]);
    assert!(
        plain.stderr.contains("processing (asked for stored, served "),
        "{plain:?}"
    );
}

#[test]
fn an_async_server_reloads_on_request_and_serves_on_when_its_daemon_is_lost() {
    let (site, model) = (Site::new(), model("llama"));
    let launcher = site.preload(&model, 1, &[]);
    let mut server = site.start(example("server_tokio", &site, &model, &["--port", "0"]));
    let line = server.line();
    let address = line.strip_prefix("listening on ").unwrap().to_owned();
    let json = |path: &str| -> Value { serde_json::from_str(&get(&address, path).1).unwrap() };
    let tokens = json("/generate?first=1&tokens=8");
    let weights = json("/weights");
    assert_eq!(
        (&weights["path"], &weights["daemon_lost"]),
        (&"mapped".into(), &false.into())
    );
    assert_eq!(weights["generation"], site.status()[0]["generation"]);
    assert_eq!(
        post(&address, "/reload"),
        (200, r#"{"changed":false}"#.to_owned())
    );

    // The next launcher loads afresh, so it is another generation.
    let mut launcher = launcher;
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    wait_until("the daemon is lost", || json("/weights")["daemon_lost"] == true);
    assert_eq!(json("/generate?first=1&tokens=8"), tokens);
    let (code, why) = post(&address, "/reload");
    assert!(code == 503 && why.contains("no daemon serves"), "{code} {why}");

    let _next = site.preload(&model, 1, &[]);
    assert_eq!(post(&address, "/reload"), (200, r#"{"changed":true}"#.to_owned()));
    let reloaded = json("/weights");
    assert_eq!(reloaded["daemon_lost"], false);
    assert_eq!(reloaded["generation"], site.status()[0]["generation"]);
    assert_ne!(reloaded["generation"], weights["generation"]);
    assert_eq!(json("/generate?first=1&tokens=8"), tokens);
    server.signal(Signal::INT);
    assert_eq!(server.code(), 0);
}
