//! Letting go, and who keeps what.

use crate::checkpoints::*;
use crate::engine::*;
use crate::harness::*;
use rustix::process::Signal;

#[test]
fn a_release_takes_nothing_from_those_who_mapped_and_nothing_comes_back() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = site.preload(&model, 2, &[]);
    let (one, other) = (map(&site, &model, 2), map(&site, &model, 2));
    let generation = site.status()[0]["generation"].clone();

    let ran = site.run(&["release", "--rank", "0"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.stdout.starts_with("released "));
    drop(one);
    assert_intact(&other, &model, 2);
    let released = |site: &Site| {
        let status = site.status();
        let daemon = status.iter().find(|daemon| daemon["global_rank"] == 0).unwrap();
        (
            daemon["state"].clone(),
            daemon["generation"].clone(),
            daemon["bytes"].clone(),
        )
    };
    assert_eq!(released(&site), ("released".into(), generation.clone(), 0.into()));
    let error = site.attach(&model, 2, &["--rank", "0"]).error(1);
    assert!(error.contains("was released: end its launcher"), "{error}");
    assert_eq!(site.attach(&model, 2, &["--rank", "1", "--verify"]).code, Some(0));

    let again = site.run(&["release", "--rank", "0"]);
    assert_eq!(again.code, Some(0), "{again:?}");

    let old = launcher.child("server");
    signal(old, Signal::KILL);
    wait_until("another server serves", || {
        site.status().iter().all(|daemon| daemon["pid"] != old)
    });
    assert_eq!(released(&site), ("released".into(), generation, 0.into()));
    site.attach(&model, 2, &["--rank", "0"]).error(1);
    assert_intact(&other, &model, 2);
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    let log = launcher.log();
    assert_eq!(log.matches("released generation").count(), 1, "{log}");
}

#[test]
fn a_stale_generation_releases_nothing() {
    let (site, model) = (Site::new(), model("qwen3"));
    let _launcher = site.preload(&model, 1, &[]);
    let generation = site.status()[0]["generation"].as_str().unwrap().to_owned();
    let stale = format!("{:016x}-1", 1);
    let error = site
        .run(&["release", "--rank", "0", "--generation", &stale])
        .error(1);
    assert!(
        error.contains(&format!("the current generation is {generation}")),
        "{error}"
    );
    site.attach_verified(&model, 1);
    let garbled = site
        .run(&["release", "--rank", "0", "--generation", "7"])
        .error(2);
    assert!(garbled.contains("--generation"), "{garbled}");
    let ran = site.run(&["release", "--rank", "0", "--generation", &generation]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert_eq!(site.status()[0]["state"], "released");
}

#[test]
fn no_release_means_no_release() {
    let (site, model) = (Site::new(), model("qwen3"));
    let _launcher = site.preload(&model, 1, &["--no-release"]);
    let error = site.run(&["release", "--all"]).error(1);
    assert!(error.contains("--no-release"), "{error}");
    site.attach_verified(&model, 1);
}

#[test]
fn an_engine_that_is_killed_takes_nothing_from_others() {
    let (site, model) = (Site::new(), model("llama"));
    let _launcher = site.preload(&model, 2, &[]);
    let mut victim = site.start(site.on_model("attach", &model, 2, &["--all", "--hold"]));
    let mapped = map(&site, &model, 2);
    assert!(victim.line().starts_with("rank 0: "));
    victim.kill();
    assert_intact(&mapped, &model, 2);
    site.attach_verified(&model, 2);
    wait_until("its leases are over", || {
        let leases = site
            .status()
            .into_iter()
            .map(|daemon| daemon["leases"].as_u64().unwrap());
        leases.sum::<u64>() == 1
    });
}

#[test]
fn a_release_of_nobody_says_so() {
    let site = Site::new();
    let error = site.run(&["release", "--all"]).error(1);
    let expected = format!("no such daemon in {}:", site.dir().display());
    assert!(error.contains(&expected), "{error}");
}
