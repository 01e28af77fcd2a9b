//! `weightd serve`: daemons that wait for whoever publishes.

use crate::adoption::orphan;
use crate::checkpoints::*;
use crate::engine::*;
use crate::harness::*;
use crate::http::{address, health, metrics};
use crate::publisher::*;
use crate::store::{Manager, kill_both};
use rustix::process::Signal;
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;
use weightd_blocking::request::request;
use weightd_core::content::Role;
use weightd_core::time::Span;
use weightd_core::wire::message::{ErrorCode, Expects, Message, Report};

fn command(site: &Site, tp: u32, more: &[&str]) -> Command {
    let tp = tp.to_string();
    site.weightd(&[&["serve", "-tp", &tp][..], more].concat())
}

/// A launcher whose daemons have their names.
#[track_caller]
fn serve(site: &Site, tp: u32, more: &[&str]) -> Running {
    let mut launcher = site.start(command(site, tp, more));
    let line = launcher.line();
    assert!(line.starts_with("SERVING "), "{line:?}, {}", launcher.log());
    launcher
}

/// One for each rank of this model.
#[track_caller]
fn publish_all(site: &Site, model: &std::path::Path, tp: u32) -> Vec<Publication> {
    let publications = of_model(site, model, tp);
    for publication in &publications {
        publication.publish().unwrap();
    }
    publications
}

fn states(site: &Site) -> Vec<Value> {
    site.status()
        .iter()
        .map(|daemon| daemon["state"].clone())
        .collect()
}

/// The generation of rank 0.
fn generation(site: &Site) -> String {
    let status = site.status();
    let daemon = status.iter().find(|daemon| daemon["global_rank"] == 0).unwrap();
    daemon["generation"].as_str().unwrap().to_owned()
}

#[test]
fn daemons_have_their_names_at_once_and_serve_what_is_published() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = site.start(command(&site, 2, &[]));
    let expected = format!("SERVING node 0/1 ranks 2 roles 1 dir {}", site.dir().display());
    assert_eq!(launcher.line(), expected, "{}", launcher.log());
    assert!(launcher.children("loader").is_empty());

    let status = site.status();
    for daemon in &status {
        assert_eq!(daemon["state"], "empty");
        assert_eq!(daemon["publish"], "keep");
        assert_eq!(
            (&daemon["key"]["tp_size"], &daemon["role"]),
            (&2.into(), &"target".into())
        );
    }
    let text = site.run(&["status"]).stdout;
    assert_eq!(
        text.matches("nothing was published yet; engines may publish")
            .count(),
        2,
        "{text}"
    );
    let ran = site.attach(&model, 2, &["--all"]);
    assert!(ran.error(1).contains("nothing was published here yet"), "{ran:?}");

    let publications = publish_all(&site, &model, 2);
    site.attach_verified(&model, 2);
    let mapped = map(&site, &model, 2);
    let status = site.status();
    for daemon in &status {
        assert_eq!(
            (&daemon["state"], &daemon["key"]["model_arch"]),
            (&"serving".into(), &"LlamaForCausalLM".into())
        );
    }
    let first = generation(&site);
    launcher.says(&format!(
        "rank 0: published by pid {}: serving generation {first}, ",
        std::process::id()
    ));
    let text = site.run(&["status"]).stdout;
    assert_eq!(text.matches("; engines may publish").count(), 2, "{text}");

    // Nothing expected is there any more; what is there is replaced as one step.
    let (code, why) = publications[0].publish().unwrap_err();
    assert!(code == ErrorCode::Conflict && why.contains(&first), "{why}");
    let again = of_model(&site, &model, 2).remove(0).instead_of(&first);
    let second = again.publish().unwrap().to_string();
    assert_eq!(generation(&site), second);
    site.attach_verified(&model, 2);
    assert_intact(&mapped, &model, 2);

    // Another model's engine is told what differs.
    let other = site.attach(&model, 2, &["--rank", "0", "--dtype", "float16"]);
    assert!(other.error(1).contains("dtype"), "{other:?}");
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    let log = launcher.log();
    assert_eq!(log.matches("published").count(), 3, "each is told once: {log}");
    site.assert_clean();
}

#[test]
fn a_server_that_is_killed_is_back_with_what_was_published() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = serve(&site, 2, &[]);
    // Also with nothing at all, and with less than everything.
    for round in 0..3 {
        let server = launcher.child("server");
        signal(server, Signal::KILL);
        wait_until("another server serves", || {
            let status = site.status();
            status.len() == 2 && status.iter().all(|daemon| daemon["pid"] != server)
        });
        launcher.says("re-armed");
        match round {
            0 => assert_eq!(states(&site), ["empty", "empty"]),
            1 => {
                let before = generation(&site);
                site.attach_verified_rank(&model, 2, 0);
                let other = of_model(&site, &model, 2).remove(1);
                other.publish().unwrap();
                assert_eq!(generation(&site), before);
                continue;
            }
            _ => {
                site.attach_verified(&model, 2);
                continue;
            }
        }
        of_model(&site, &model, 2).remove(0).publish().unwrap();
    }
    let ran = site.run(&["stop"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "stopped 2 daemons\n"));
    assert_eq!(launcher.code(), 0);
    site.assert_clean();
}

#[test]
fn a_launcher_that_is_killed_is_followed_by_the_next_one_and_until_then_nothing_is_stored() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = serve(&site, 2, &[]);
    publish_all(&site, &model, 2);
    let (before, mapped) = (site.generations(), map(&site, &model, 2));
    orphan(&site, &mut launcher);
    site.attach_verified(&model, 2);
    let held = generation(&site);
    let next = of_model(&site, &model, 2).remove(0).instead_of(&held);
    let (code, why) = next.publish().unwrap_err();
    assert!(
        code == ErrorCode::Busy && why.contains("`weightd serve`"),
        "{why}"
    );
    let text = site.run(&["status"]).stdout;
    assert_eq!(
        text.matches("with `weightd serve` as before").count(),
        2,
        "{text}"
    );

    // What loads, and what has publishers do otherwise, does not go on with it.
    let refused = site.start(site.on_model("preload", &model, 2, &[])).refused();
    assert!(refused.contains("who brings the weights"), "{refused}");
    let refused = site
        .start(command(&site, 2, &["--replace", "drop-first"]))
        .refused();
    assert!(refused.contains("--replace"), "{refused}");
    let refused = site
        .start(command(&site, 2, &["--pipeline-parallel-size", "2"]))
        .refused();
    assert!(refused.contains("pp_size"), "{refused}");
    assert_eq!(site.generations(), before);

    let mut launcher = serve(&site, 2, &[]);
    launcher.says("adopted 2 daemons");
    assert!(!launcher.log().contains("afresh"), "{}", launcher.log());
    assert_eq!(site.generations(), before);
    assert_intact(&mapped, &model, 2);
    let new = next.publish().unwrap().to_string();
    assert_eq!(generation(&site), new);
    site.attach_verified(&model, 2);
    let second = site.start(command(&site, 2, &[])).refused();
    assert!(second.contains("already owns"), "{second}");
    launcher.signal(Signal::TERM);
    assert_eq!(launcher.code(), 143);
    site.assert_clean();
}

#[test]
fn a_server_with_nothing_ends_with_its_launcher_and_one_with_anything_stays() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = serve(&site, 2, &[]);
    let server = launcher.child("server");
    launcher.kill();
    wait_until("the server is gone", || !is_alive(&server));
    let mut launcher = serve(&site, 2, &[]);
    assert!(!launcher.log().contains("adopted"), "{}", launcher.log());
    of_model(&site, &model, 2).remove(1).publish().unwrap();
    orphan(&site, &mut launcher);
    let mut launcher = serve(&site, 2, &[]);
    launcher.says("adopted 2 daemons");
    let mut states = states(&site);
    states.sort_by_key(Value::to_string);
    assert_eq!(states, ["empty", "serving"]);
    of_model(&site, &model, 2).remove(0).publish().unwrap();
    site.attach_verified(&model, 2);
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    site.assert_clean();
}

#[test]
fn a_publisher_that_ends_half_way_changes_nothing() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = serve(&site, 1, &[]);
    for part in [0.02, 0.5, 0.99] {
        drop(of_model(&site, &model, 1).remove(0).say(part));
        assert_eq!(states(&site), ["empty"]);
    }
    publish_all(&site, &model, 1);
    let held = generation(&site);
    for part in [0.02, 0.5, 0.99] {
        let next = of_model(&site, &model, 1).remove(0).instead_of(&held);
        drop(next.say(part));
        assert_eq!(generation(&site), held);
    }
    site.attach_verified(&model, 1);
    // One that does not wait for its answer has published all the same.
    let next = of_model(&site, &model, 1).remove(0).instead_of(&held);
    drop(next.say(1.0));
    drop(next);
    wait_until("it is stored", || generation(&site) != held);
    site.attach_verified(&model, 1);
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    site.assert_clean();
}

#[test]
fn what_was_released_is_published_again_and_health_is_that_of_the_processes() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = serve(&site, 1, &["--health-port", "0"]);
    let address = address(&launcher);
    let state = || {
        let mut last = (0, Value::Null);
        wait_until("health is good", || {
            last = health(&address);
            last.0 == 200
        });
        last.1["daemons"][0]["state"].clone()
    };
    assert_eq!(state(), "empty");
    let rank_0 = [("rank", "0"), ("role", "target")];
    assert_eq!(metrics(&address).value("weightd_up", &rank_0), 1.0);
    publish_all(&site, &model, 1);
    wait_until("health shows it", || state() == "serving");
    wait_until("metrics show it", || {
        metrics(&address).value("weightd_content_bytes", &rank_0) > 0.0
    });
    let first = generation(&site);
    assert_eq!(site.run(&["release", "--all"]).code, Some(0));
    wait_until("health shows it", || state() == "released");
    let ran = site.attach(&model, 1, &["--all"]);
    assert!(ran.error(1).contains("released"), "{ran:?}");

    let stale = of_model(&site, &model, 1).remove(0).instead_of(&first);
    assert_eq!(stale.publish().unwrap_err().0, ErrorCode::Conflict);
    publish_all(&site, &model, 1);
    assert_ne!(generation(&site), first);
    site.attach_verified(&model, 1);
    let server = launcher.child("server");
    signal(server, Signal::STOP);
    wait_until("health tells", || health(&address).0 == 503);
    signal(server, Signal::CONT);
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    site.assert_clean();
}

#[test]
fn a_draft_has_a_daemon_of_its_own_beside_the_last_stage() {
    let (site, model) = (Site::new(), model("llama"));
    let more = [
        "--draft",
        "--pipeline-parallel-size",
        "2",
        "--replace",
        "drop-first",
    ];
    let mut launcher = site.start(command(&site, 1, &more));
    let line = launcher.line();
    assert!(line.starts_with("SERVING node 0/1 ranks 2 roles 2 "), "{line}");
    let status = site.status();
    let drafts: Vec<&Value> = status.iter().filter(|daemon| daemon["role"] == "draft").collect();
    assert_eq!((status.len(), drafts.len()), (3, 1));
    assert_eq!(drafts[0]["global_rank"], 1);
    assert_eq!(
        (&drafts[0]["key"]["pp_size"], &drafts[0]["publish"]),
        (&1.into(), &"drop-first".into())
    );
    // An engine's target is not what a draft's daemon is for.
    let mut wrong = of_model(&site, &model, 1).remove(0);
    wrong.socket = PathBuf::from(drafts[0]["socket"].as_str().unwrap());
    let (code, why) = wrong.publish().unwrap_err();
    assert!(code == ErrorCode::Conflict && why.contains("role"), "{why}");
    wrong.publish.key.role = Role::Draft;
    wrong.publish().unwrap();
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    site.assert_clean();
}

#[test]
fn what_a_device_lost_waits_for_a_publisher() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = serve(&site, 1, &[]);
    // Its manifest is that of a larger region, which nobody can map.
    let mut broken = of_model(&site, &model, 1).remove(0);
    let region = weightd_gpu::sealed(&[7; 4096]).unwrap();
    broken.descriptors[1] = region;
    broken.publish.content.regions[0].bytes = 4096;
    let broken = broken.publish().unwrap();
    let socket = site.socket();
    let report = Report {
        daemon: 0,
        generation: broken,
        import_failed: "no such memory".to_owned(),
    };
    let answer = request(&socket, report, Span::secs(60)).unwrap();
    assert!(matches!(answer, Message::Reported(_)), "{answer:?}");
    wait_until("it is lost", || states(&site) == ["lost"]);
    launcher.says("nothing is served there until it is published again");
    let ran = site.attach(&model, 1, &["--all"]);
    assert!(ran.error(1).contains("lost"), "{ran:?}");
    assert!(!launcher.log().contains("afresh"), "{}", launcher.log());
    // Also in the next server.
    let server = launcher.child("server");
    signal(server, Signal::KILL);
    launcher.says("re-armed");
    assert_eq!(states(&site), ["lost"]);
    publish_all(&site, &model, 1);
    site.attach_verified(&model, 1);
    assert!(launcher.children("loader").is_empty());
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    site.assert_clean();
}

#[test]
fn a_unit_that_was_killed_serves_what_was_published() {
    let (site, model) = (Site::new(), model("llama"));
    let manager = Manager::new(&site);
    let start = || {
        let mut launcher = manager.start(&site, &command(&site, 2, &[]));
        let line = launcher.line();
        assert!(line.starts_with("SERVING "), "{line:?}, {}", launcher.log());
        launcher
    };
    let mut launcher = start();
    let publications = publish_all(&site, &model, 2);
    manager.has_all(2);
    let (before, mapped) = (site.generations(), map(&site, &model, 2));
    kill_both(&mut launcher);
    let mut launcher = start();
    launcher.says("adopted 2 daemons from the service manager");
    assert_eq!(site.generations(), before);
    assert_intact(&mapped, &model, 2);
    site.attach_verified(&model, 2);
    let held = generation(&site);
    let mut next = publications.into_iter().next().unwrap();
    next.publish.expects = Expects::Generation(held.parse().unwrap());
    next.publish().unwrap();
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
}

#[test]
fn what_serve_does_not_take_is_said() {
    let site = Site::new();
    let error = |more: &[&str]| {
        let mut args = vec!["serve"];
        args.extend(more);
        site.run(&args).error(2)
    };
    assert!(error(&["--no-release", "--replace", "drop-first"]).contains("leave one of them out"));
    assert!(error(&["--model", "m"]).contains("--model is not for `weightd serve`"));
    assert!(error(&["m"]).contains("is not for `weightd serve`"));
    assert!(error(&["--speculative-config.method", "mtp"]).contains("--draft"));
    assert!(error(&["-tp", "0"]).contains("tensor"));
    let ran = site.run(&["serve", "--runtime", "turbo"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    let mut launcher = serve(
        &site,
        1,
        &["--runtime", "blocking", "--no-release", "--enable-lora"],
    );
    launcher.says("--enable-lora");
    let ran = site.run(&["release", "--all"]);
    assert!(ran.error(1).contains("--no-release"), "{ran:?}");
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    site.assert_clean();
}
