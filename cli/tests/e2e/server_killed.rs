//! A server that dies is replaced, and nobody notices more than a pause.

use crate::checkpoints::*;
use crate::engine::*;
use crate::harness::*;
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Kills the server and returns when the next one serves.
fn kill_server(site: &Site, launcher: &Running) {
    let old = launcher.child("server");
    signal(old, Signal::KILL);
    wait_until("another server serves", || {
        let status = site.status();
        !status.is_empty() && status.iter().all(|daemon| daemon["pid"] != old)
    });
}

fn generations(status: &[Value]) -> Vec<&Value> {
    status.iter().map(|daemon| &daemon["generation"]).collect()
}

#[test]
fn a_holder_keeps_its_mapping_and_leases_the_same_generation_again() {
    let (site, model) = (Site::new(), model("llama"));
    let launcher = site.preload(&model, 2, &[]);
    let mapped = map(&site, &model, 2);
    let mut holder = site.start(site.on_model("attach", &model, 2, &["--all", "--hold", "--json"]));
    let attached: Vec<Value> = (0..2)
        .map(|_| serde_json::from_str(&holder.line()).unwrap())
        .collect();
    wait_until("the loader is gone", || launcher.children("loader").is_empty());
    let before = site.status();

    kill_server(&site, &launcher);
    let mut noted: Vec<Value> = (0..2)
        .map(|_| serde_json::from_str(&holder.line()).unwrap())
        .collect();
    noted.sort_by_key(|noted| noted["global_rank"].as_u64());
    for (noted, attached) in noted.iter().zip(attached) {
        assert_eq!(noted["event"], "leased_again");
        assert_eq!(noted["global_rank"], attached["global_rank"]);
        assert_eq!(noted["generation"], attached["generation"]);
    }
    let leases = || -> Vec<Value> {
        let status = site.status().into_iter();
        status.map(|daemon| daemon["leases"].clone()).collect()
    };
    wait_until("this engine has leased again too", || leases() == [2, 1]);
    assert_intact(&mapped, &model, 2);
    site.attach_verified(&model, 2);
    assert_eq!(generations(&site.status()), generations(&before));
    // Nobody loads: the vault had it.
    assert!(launcher.children("loader").is_empty());
    launcher.says("re-armed");
    holder.signal(Signal::TERM);
    assert_eq!(holder.code(), 143);
}

#[test]
fn a_holder_is_told_when_what_it_maps_is_served_no_more() {
    let (site, model) = (Site::new(), model("llama"));
    let mut launcher = site.preload(&model, 1, &[]);
    let mut holder = site.start(site.on_model("attach", &model, 1, &["--all", "--hold", "--json"]));
    holder.line();
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    let _other = site.preload(&model, 1, &[]);
    let lost: Value = serde_json::from_str(&holder.line()).unwrap();
    assert_eq!(lost["event"], "daemon_lost");
    holder.signal(Signal::TERM);
    assert_eq!(holder.code(), 143);
}

#[test]
fn no_engine_is_refused_while_the_server_dies_twenty_times() {
    let (site, model) = (Site::new(), model("qwen3"));
    let launcher = site.preload(&model, 1, &[]);
    let over = AtomicBool::new(false);
    let attached = thread::scope(|scope| {
        let engines = scope.spawn(|| {
            let mut attached = 0;
            while !over.load(Ordering::Relaxed) {
                let ran = site.attach(&model, 1, &["--all"]);
                assert_eq!(ran.code, Some(0), "{ran:?}");
                attached += 1;
            }
            attached
        });
        for _ in 0..20 {
            if engines.is_finished() {
                break;
            }
            kill_server(&site, &launcher);
        }
        over.store(true, Ordering::Relaxed);
        engines.join().unwrap()
    });
    assert!(attached > 0);
    wait_until("all deaths are logged", || {
        launcher.log().matches("starting another").count() == 20
    });
}

#[test]
fn a_server_that_cannot_be_started_for_a_while_costs_no_weights() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 1, &[]);
    let status = site.status();
    let before = generations(&status);
    // From now on it gets no descriptor more.
    let pid = Pid::from_raw(launcher.pid() as i32);
    let none = Rlimit {
        current: Some(0),
        maximum: Some(4096),
    };
    let limit = prlimit(pid, Resource::Nofile, none).unwrap();
    signal(launcher.child("server"), Signal::KILL);
    wait_until("it has tried more than once", || {
        launcher.log().matches("cannot start the server").count() > 1
    });
    let some = Rlimit {
        current: Some(1024),
        ..none
    };
    prlimit(pid, Resource::Nofile, some).unwrap();
    wait_until("another server serves", || !site.status().is_empty());
    assert_eq!(generations(&site.status()), before, "nothing was loaded again");
    site.attach_verified(&model, 1);
    assert!(limit.current.is_none_or(|current| current > 0));
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    site.assert_clean();
}

#[test]
fn a_server_that_hangs_is_noticed_and_replaced_though_nobody_asks_for_anything() {
    let (site, model) = (Site::new(), model("qwen3"));
    let launcher = site.preload(&model, 1, &[]);
    let before = site.status();
    let hung = launcher.child("server");
    signal(hung, Signal::STOP);
    wait_until("it is killed", || !is_alive(&hung));
    wait_until("another server serves", || {
        generations(&site.status()) == generations(&before)
    });
    launcher.says("did not answer");
    site.attach_verified(&model, 1);
}
