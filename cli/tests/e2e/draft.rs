//! Target and draft of speculative decoding, side by side.

use crate::checkpoints::*;
use crate::engine;
use crate::harness::*;
use rustix::process::Signal;
use serde_json::json;
use std::path::{Path, PathBuf};
use weightd_checkpoint::{Checkpoint, Draft, KeyOptions, Rank, ShardingOptions};
use weightd_core::content::Role;
use weightd_core::machine::{AttachOptions, Mode};
use weightd_core::plan::placement::Parallel;
use weightd_socket::credentials::our_uid;

#[test]
fn an_engine_of_each_role_gets_its_own() {
    for (target, method, draft) in [
        ("deepseek_v3_mtp", "mtp", None),
        ("llama", "eagle", Some("eagle_llama")),
        ("llama", "eagle3", Some("eagle3_llama")),
    ] {
        let (site, target) = (Site::new(), model(target));
        let config = match draft {
            None => json!({ "method": method, "num_speculative_tokens": 1 }),
            Some(draft) => json!({ "method": method, "model": model(draft) }),
        };
        let config = config.to_string();
        let speculative = ["--speculative-config", &config];
        let mut launcher = site.start(site.on_model("preload", &target, 2, &speculative));
        let ready = launcher.ready();
        assert!(ready.contains("ranks 2 roles 2"), "{ready}");

        site.attach_verified(&target, 2);
        let of_draft = [&speculative[..], &["--draft", "--all", "--verify"]].concat();
        let ran = site.attach(&target, 2, &of_draft);
        assert_eq!(ran.code, Some(0), "{method}: {ran:?}");
        assert_eq!(ran.stdout.lines().count(), 2);

        let status = site.status();
        let roles: Vec<_> = status
            .iter()
            .map(|daemon| (&daemon["role"], &daemon["global_rank"]))
            .collect();
        assert_eq!(roles.len(), 4, "{roles:?}");
        for (daemon, socket) in status
            .iter()
            .map(|daemon| (daemon, daemon["socket"].as_str().unwrap()))
        {
            assert_eq!(
                daemon["role"] == "draft",
                socket.ends_with("_draft.sock"),
                "{socket}"
            );
        }
        launcher.signal(Signal::INT);
        launcher.wait();
        site.assert_clean();
    }
}

#[test]
fn a_rank_is_released_with_its_draft_or_by_generation_alone() {
    let (site, target) = (Site::new(), model("deepseek_v3_mtp"));
    let config = r#"{"method": "mtp"}"#;
    let mut launcher = site.start(site.on_model("preload", &target, 2, &["--speculative-config", config]));
    launcher.ready();
    let held = || -> Vec<(String, u64, bool)> {
        let role = |daemon: &serde_json::Value| daemon["role"].as_str().unwrap().to_owned();
        let rank = |daemon: &serde_json::Value| daemon["global_rank"].as_u64().unwrap();
        let status = site.status();
        status
            .iter()
            .map(|daemon| (role(daemon), rank(daemon), daemon["state"] == "serving"))
            .collect()
    };
    let status = site.status();
    let draft = status
        .iter()
        .find(|daemon| daemon["role"] == "draft" && daemon["global_rank"] == 0)
        .unwrap();
    let generation = draft["generation"].as_str().unwrap();
    assert_eq!(
        site.run(&["release", "--rank", "0", "--generation", generation])
            .code,
        Some(0)
    );
    for (role, rank, serves) in held() {
        assert_eq!(serves, (role.as_str(), rank) != ("draft", 0), "{role} {rank}");
    }
    assert_eq!(site.run(&["release", "--rank", "1"]).code, Some(0));
    for (role, rank, serves) in held() {
        assert_eq!(serves, (role.as_str(), rank) == ("target", 0), "{role} {rank}");
    }
}

#[test]
fn a_role_mixed_up_is_a_mismatch() {
    let (site, llama) = (Site::new(), model("llama"));
    let config = json!({ "method": "eagle", "model": model("eagle_llama") }).to_string();
    let mut launcher = site.start(site.on_model("preload", &llama, 1, &["--speculative-config", &config]));
    launcher.ready();
    let socket = |role: &str| {
        let status = site.status();
        let daemon = status.iter().find(|daemon| daemon["role"] == role).unwrap();
        PathBuf::from(daemon["socket"].as_str().unwrap())
    };
    let (target, draft) = (key(&llama, None), key(&model("eagle_llama"), Some(Draft::Eagle)));
    for (socket, key, options_role) in [
        // The key of the other role, an engine that says so, and one that does not.
        (socket("draft"), &target, Role::Target),
        (socket("target"), &draft, Role::Draft),
        (socket("target"), &target, Role::Draft),
        (socket("draft"), &draft, Role::Target),
    ] {
        let error = engine::refused(&socket, key.clone(), options_role);
        assert!(error.contains("role"), "{error}");
    }
}

#[test]
fn an_engine_counts_what_its_own_daemons_hold_and_nothing_that_others_have() {
    let (site, llama, qwen) = (Site::new(), model("llama"), model("qwen3"));
    let config = json!({ "method": "eagle", "model": model("eagle_llama") }).to_string();
    let _launcher = site.preload(&llama, 1, &["--speculative-config", &config]);
    let held = |instance: &[&str], role: &str| {
        let status = site.json(&[&["status", "--json"], instance].concat());
        let daemon = status.iter().find(|daemon| daemon["role"] == role).unwrap();
        let socket = PathBuf::from(daemon["socket"].as_str().unwrap());
        (socket, daemon["bytes"].as_u64().unwrap())
    };
    let of_target = site
        .status()
        .into_iter()
        .find(|daemon| daemon["role"] == "target");
    let generation = of_target.unwrap()["generation"].clone();
    let (target, of_target) = held(&[], "target");
    let (draft, of_draft) = held(&[], "draft");
    let (target_key, draft_key) = (key(&llama, None), key(&model("eagle_llama"), Some(Draft::Eagle)));
    let counts = |socket: &Path, key: &weightd_core::content::Key, mode: Mode| {
        let options = AttachOptions {
            role: key.role,
            mode,
            ..AttachOptions::new(our_uid().unwrap())
        };
        let loader = engine::loader(socket, options, key.clone());
        loader.external_memory().unwrap()
    };
    let all_is_counted = || {
        for (socket, key, bytes) in [(&target, &target_key, of_target), (&draft, &draft_key, of_draft)] {
            assert_eq!(counts(socket, key, Mode::ZeroCopy), bytes, "{key:?}");
            assert_eq!(counts(socket, key, Mode::Copy), 0, "{key:?}");
        }
    };
    assert!(of_target > 0 && of_draft > 0 && of_target != of_draft);
    all_is_counted();

    // Another model on the same device, its engine, and one more engine of the same daemons.
    let blue = ["--instance", "blue"];
    let _other = site.preload(&qwen, 1, &blue);
    let (other, of_other) = held(&blue, "target");
    assert_eq!(counts(&other, &key(&qwen, None), Mode::ZeroCopy), of_other);
    let options = AttachOptions::new(our_uid().unwrap());
    let theirs = engine::loader(&other, options, key(&qwen, None))
        .attach()
        .unwrap();
    let mapped = engine::map(&site, &llama, 1);
    let copy = mapped.model().duplicate().unwrap();
    all_is_counted();

    // What was released is the engine's who still maps it, and no daemon's.
    let released = site.run(&[
        "release",
        "--rank",
        "0",
        "--generation",
        generation.as_str().unwrap(),
    ]);
    assert_eq!(released.code, Some(0), "{released:?}");
    assert_eq!(counts(&target, &target_key, Mode::ZeroCopy), 0);
    assert_eq!(counts(&draft, &draft_key, Mode::ZeroCopy), of_draft);
    drop((theirs, mapped, copy));
    assert_eq!(counts(&other, &key(&qwen, None), Mode::ZeroCopy), of_other);
}

#[test]
fn a_draft_without_weights_to_cache_is_said_and_left_out() {
    let (site, llama) = (Site::new(), model("llama"));
    let config = r#"{"method": "ngram", "prompt_lookup_max": 4}"#;
    let mut launcher = site.start(site.on_model("preload", &llama, 1, &["--speculative-config", config]));
    assert!(launcher.ready().contains("ranks 1 roles 1"));
    launcher.says("speculative method ngram is not cached");
    let error = site
        .attach(&llama, 1, &["--all", "--draft", "--speculative-config", config])
        .error(2);
    assert!(error.contains("no draft"), "{error}");
}

#[test]
fn the_draft_is_on_the_last_pipeline_stage() {
    let (site, llama) = (Site::new(), model("llama"));
    let config = json!({ "method": "eagle", "model": model("eagle_llama") }).to_string();
    let options = ["--pipeline-parallel-size", "2", "--speculative-config", &config];
    let mut launcher = site.start(site.on_model("preload", &llama, 2, &options));
    assert!(launcher.ready().contains("ranks 4 roles 2"));
    let status = site.status();
    let drafts: Vec<_> = status
        .iter()
        .filter(|daemon| daemon["role"] == "draft")
        .map(|daemon| &daemon["global_rank"])
        .collect();
    assert_eq!(drafts, [&json!(2), &json!(3)]);
    let ran = site.attach(
        &llama,
        2,
        &[&options[..], &["--draft", "--all", "--verify"]].concat(),
    );
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let elsewhere = ["--nnodes", "2", "--node-rank", "0", "--draft", "--all"];
    let error = site
        .attach(&llama, 2, &[&options[..], &elsewhere].concat())
        .error(2);
    assert!(error.contains("another node"), "{error}");
}

#[test]
fn a_target_without_further_layers_has_no_mtp_draft() {
    let (site, llama) = (Site::new(), model("llama"));
    let config = r#"{"method": "mtp"}"#;
    let error = finish(site.on_model("preload", &llama, 1, &["--speculative-config", config])).error(1);
    assert!(
        error.contains("draft: ") && error.contains("num_hidden_layers"),
        "{error}"
    );
    site.assert_clean();
}

fn key(model: &Path, draft: Option<Draft>) -> weightd_core::content::Key {
    let checkpoint = Checkpoint::open(model).unwrap();
    let sharding = ShardingOptions::new(Parallel {
        tensor: 1,
        pipeline: 1,
        data: 1,
    });
    let target = KeyOptions::new(sharding);
    let options = draft.map_or(target.clone(), |draft| target.of_draft(draft, None));
    options
        .key(&checkpoint, checkpoint.identity(), Rank::default())
        .unwrap()
}
