//! The next launcher goes on with a server that outlived its own.

use crate::checkpoints::*;
use crate::engine::*;
use crate::harness::*;
use rustix::process::Signal;
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, SystemTime};

/// What must not change when a server is adopted.
fn served(site: &Site) -> Vec<[Value; 4]> {
    let fields = ["socket", "pid", "generation", "leases"];
    let of = |daemon: &Value| fields.map(|field| daemon[field].clone());
    site.status().iter().map(of).collect()
}

fn is_led_by(site: &Site, launcher: Option<u32>) -> bool {
    let pid = launcher.map_or(Value::Null, Value::from);
    site.status().iter().all(|daemon| daemon["launcher_pid"] == pid)
}

/// Kills a launcher, and returns when its server has noticed.
pub fn orphan(site: &Site, launcher: &mut Running) {
    launcher.kill();
    wait_until("the server has noticed", || is_led_by(site, None));
}

/// A launcher that is ready and has loaded nothing.
#[track_caller]
pub fn adopts(site: &Site, model: &Path, tp: u32) -> Running {
    let launcher = site.preload(model, tp, &[]);
    assert!(is_led_by(site, Some(launcher.pid())));
    assert_loaded_nothing(&launcher);
    launcher
}

#[track_caller]
pub fn assert_loaded_nothing(launcher: &Running) {
    let log = launcher.log();
    assert!(log.contains("adopted") && !log.contains("loaded"), "{log}");
    assert!(launcher.children("loader").is_empty());
}

#[test]
fn server_content_and_leases_are_adopted_again_and_again_and_nothing_is_read() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = site.preload(&model, 2, &[]);
    let server = launcher.child("server");
    launcher.has_loaded();
    let mapped = map(&site, &model, 2);
    let mut holder = site.start(site.on_model("attach", &model, 2, &["--all", "--hold", "--json"]));
    assert!(holder.line().contains("generation") && holder.line().contains("generation"));
    let before = served(&site);
    assert!(
        before.iter().all(|daemon| daemon[3].as_u64() >= Some(1)),
        "{before:?}"
    );
    for _ in 0..2 {
        orphan(&site, &mut launcher);
        launcher = adopts(&site, &model, 2);
        assert_eq!(served(&site), before);
        assert_intact(&mapped, &model, 2);
        site.attach_verified(&model, 2);
    }

    // It is this launcher's server now: when it dies, the next one is armed.
    assert!(launcher.children("server").is_empty() && is_alive(&server));
    signal(server, Signal::KILL);
    wait_until("another server serves", || {
        let status = site.status();
        status.len() == 2 && status.iter().all(|daemon| daemon["pid"] != server)
    });
    assert!(
        holder.line().contains("leased_again"),
        "until then its lease lasted"
    );
    let generations =
        |served: &[[Value; 4]]| served.iter().map(|daemon| daemon[2].clone()).collect::<Vec<_>>();
    assert_eq!(generations(&served(&site)), generations(&before));
    assert_loaded_nothing(&launcher);
    site.attach_verified(&model, 2);
    // And that one is adopted as well.
    orphan(&site, &mut launcher);
    let mut launcher = adopts(&site, &model, 2);
    assert_intact(&mapped, &model, 2);
    let ran = site.run(&["stop"]);
    assert_eq!(
        (ran.code, ran.stdout.as_str()),
        (Some(0), "stopped 2 daemons\n"),
        "{ran:?}"
    );
    assert_eq!(launcher.code(), 0);
    holder.kill();
    site.assert_clean();
}

#[test]
fn names_that_were_never_given_are_there_when_the_next_launcher_is_ready() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = site.preload(&model, 2, &[]);
    launcher.has_loaded();
    let (status, before) = (site.status(), site.generations());
    orphan(&site, &mut launcher);
    for daemon in &status {
        std::fs::remove_file(daemon["socket"].as_str().unwrap()).unwrap();
    }
    let ran = site.run(&["status"]);
    assert_eq!(
        (ran.code, ran.stdout.matches("not reached").count()),
        (Some(1), 2),
        "{ran:?}"
    );
    assert!(
        ran.stderr.contains("take it over with `weightd preload`"),
        "{ran:?}"
    );
    // The server would be reached by nobody, so another one takes its place.
    let launcher = site.preload(&model, 2, &[]);
    assert_eq!(site.generations(), before);
    launcher.says("nothing is loaded again");
    site.attach_verified(&model, 2);
}

#[test]
fn an_adopted_server_ends_with_its_launcher_and_what_was_released_stays_so() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 2, &[]);
    let server = launcher.child("server");
    orphan(&site, &mut launcher);
    // Of an orphan, and of an adopted server.
    for rank in ["0", "1"] {
        assert_eq!(site.run(&["release", "--rank", rank]).code, Some(0));
        if rank == "0" {
            launcher = adopts(&site, &model, 2);
        }
    }
    let states = |site: &Site| {
        site.status()
            .iter()
            .map(|daemon| daemon["state"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(states(&site), ["released", "released"]);
    launcher.says("rank 1: released");
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.code(), 143);
    assert!(!is_alive(&server));
    site.assert_clean();
}

#[test]
fn a_server_that_hangs_after_it_was_adopted_is_killed_and_replaced() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 1, &[]);
    let server = launcher.child("server");
    orphan(&site, &mut launcher);
    let launcher = adopts(&site, &model, 1);
    signal(server, Signal::STOP);
    wait_until("it is killed", || !is_alive(&server));
    wait_until("another server serves", || !site.status().is_empty());
    launcher.says("did not answer");
    site.attach_verified(&model, 1);
}

#[test]
fn another_key_says_what_runs_and_how_to_end_it_and_changes_nothing() {
    let (site, model) = (Site::new(), model("qwen3"));
    let other = copy_of(&model, &site.path().join("other"));
    let weights = File::options()
        .write(true)
        .open(other.join("model.safetensors"))
        .unwrap();
    let last = weights.metadata().unwrap().len() - 1;
    weights.write_all_at(&[0x55], last).unwrap();
    let mut launcher = site.preload(&model, 2, &[]);
    launcher.has_loaded();
    orphan(&site, &mut launcher);
    let before = served(&site);
    let cases: [(&Path, u32, &[&str], &str); 6] = [
        (&model, 1, &[], "daemons, tp_size (asked for 1, served 2);"),
        (&model, 4, &[], "daemons, tp_size (asked for 4, served 2);"),
        (
            &model,
            2,
            &["--dtype", "float16"],
            "in dtype (asked for float16, served auto);",
        ),
        (
            &model,
            2,
            &["--revision", "x", "--key-extra", "kv=fp8"],
            "in revision (asked for x, served none), extra.kv (asked for fp8, served none);",
        ),
        (&model, 2, &["--no-release"], "in no_release;"),
        (&other, 2, &[], "in checkpoint (asked for digest "),
    ];
    for (model, tp, more, differs) in cases {
        let error = finish(site.on_model("preload", model, tp, more)).error(1);
        let stop = format!("weightd stop --socket-dir {}", site.dir().display());
        for part in [
            "a launcher that was killed",
            "already owns",
            "Qwen3ForCausalLM (target ranks 0,1; tp 2",
            &stop,
        ] {
            assert!(error.contains(part), "{error}");
        }
        assert!(error.contains(differs), "{error}");
    }
    assert!(is_led_by(&site, None));
    assert_eq!(served(&site), before);
    site.attach_verified(&model, 2);
    // Another instance is none of its business.
    let _beside = site.preload(&model, 2, &["--instance", "blue"]);
    let _launcher = site.preload(&model, 2, &[]);
    assert!(
        site.status()
            .iter()
            .all(|daemon| daemon["launcher_pid"] != Value::Null)
    );
}

#[test]
fn the_same_weights_in_other_files_are_known_by_their_digest() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 1, &[]);
    launcher.has_loaded();
    orphan(&site, &mut launcher);
    let before = served(&site);
    let copy = copy_of(&model, &site.path().join("copy"));
    let launcher = adopts(&site, &copy, 1);
    launcher.says("taking the digest of");
    assert_eq!(served(&site), before);
    site.attach_verified(&copy, 1);
}

#[test]
fn weights_whose_digest_nobody_knows_are_adopted_by_who_has_the_same_files_alone() {
    let site = Site::new();
    let model = large_checkpoint(&site.path().join("model"), 512 << 20);
    if !is_steady(&model) {
        eprintln!("not tested: on this file system no digest is ever late");
        return;
    }
    // From disk it would come along with the weights.
    let mut weights = File::open(model.join("model.safetensors")).unwrap();
    std::io::copy(&mut weights, &mut std::io::sink()).unwrap();
    let mut launcher = site.start(site.on_model("preload", &model, 1, &[]));
    let loader = launcher.child("loader");
    launcher.ready();
    signal(loader, Signal::KILL);
    orphan(&site, &mut launcher);
    if launcher.log().contains("digest is missing") {
        // Before it was killed, it has noticed; it had no time for another loader.
        assert!(launcher.children("loader").is_empty());
    }
    let before = served(&site);
    let copy = copy_of(&model, &site.path().join("copy"));
    let error = finish(site.on_model("preload", &copy, 1, &[])).error(1);
    assert!(
        error.contains("their digest is not known") && error.contains("weightd stop"),
        "{error}"
    );
    assert_eq!(served(&site), before);
    let launcher = site.preload(&model, 1, &[]);
    launcher.says("adopted");
    assert_eq!(served(&site), before);
    // And it makes up for the digest.
    let ran = site.attach(&copy, 1, &["--all", "--wait", "60"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
}

#[test]
fn of_launchers_that_come_at_once_one_adopts() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 1, &[]);
    launcher.has_loaded();
    orphan(&site, &mut launcher);
    let before = served(&site);
    let mut rivals: Vec<Running> = (0..5)
        .map(|_| site.start(site.on_model("preload", &model, 1, &[])))
        .collect();
    let lines: Vec<String> = rivals.iter_mut().map(Running::line).collect();
    let winners = lines.iter().filter(|line| line.starts_with("READY")).count();
    assert_eq!(winners, 1, "{lines:?}");
    for (rival, line) in rivals.iter_mut().zip(&lines) {
        if line.is_empty() {
            assert_eq!(rival.code(), 1);
            let error = rival.error();
            assert!(error.contains("already owns"), "{error}");
        } else {
            assert_loaded_nothing(rival);
        }
    }
    assert_eq!(served(&site), before);
    site.attach_verified(&model, 1);
}

#[test]
fn a_launcher_that_hangs_keeps_the_lead() {
    let (site, model) = (Site::new(), model("qwen3"));
    let launcher = site.preload(&model, 1, &[]);
    launcher.signal(Signal::STOP);
    let error = finish(site.on_model("preload", &model, 1, &[])).error(1);
    assert!(
        error.contains(&format!("launcher {} already owns", launcher.pid())),
        "{error}"
    );
    launcher.signal(Signal::CONT);
    site.attach_verified(&model, 1);
}

#[test]
fn a_launcher_that_is_killed_at_any_moment_of_an_adoption_leaves_the_server_to_the_next() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = site.preload(&model, 2, &[]);
    launcher.has_loaded();
    let mapped = map(&site, &model, 2);
    orphan(&site, &mut launcher);
    let before = served(&site);
    // How long one takes, so that the seeds spread over all of it.
    let start = SystemTime::now();
    let mut launcher = adopts(&site, &model, 2);
    let whole = start.elapsed().unwrap();
    orphan(&site, &mut launcher);
    for seed in 0..20_u32 {
        let mut victim = site.start(site.on_model("preload", &model, 2, &[]));
        // Not to wait for anything: the moment is what is tried.
        sleep(whole * (seed * 7 % 20) / 18 + Duration::from_micros(u64::from(seed) * 137));
        victim.kill();
        wait_until("the server is alone", || is_led_by(&site, None));
        assert_eq!(served(&site), before, "seed {seed}");
    }
    site.attach_verified(&model, 2);
    assert_intact(&mapped, &model, 2);
    let mut launcher = adopts(&site, &model, 2);
    assert_eq!(served(&site), before);
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    site.assert_clean();
}
