//! A launcher's death on an NVIDIA GPU, by hand and one at a time, since these watch the device's memory:
//! `cargo test -p weightd --test e2e gpu_adoption -- --ignored --test-threads 1`.

use crate::adoption::{adopts, assert_loaded_nothing, orphan};
use crate::checkpoints::*;
use crate::gpu::{processes, used};
use crate::harness::*;
use crate::store::{Manager, kill_both};
use rustix::process::Signal;
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

const BYTES: u64 = 128 << 20;

/// The most that the device has given away at any time while this is done, in MiB.
fn most_used(work: impl FnOnce()) -> u64 {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let sampled = scope.spawn(|| {
            let (mut most, mut samples) = (0, 0);
            while !over.load(Ordering::Relaxed) {
                (most, samples) = (used().max(most), samples + 1);
            }
            assert!(samples > 3, "{samples} samples tell nothing");
            most
        });
        // Also where it fails.
        let stop = Stop(&over);
        work();
        drop(stop);
        sampled.join().unwrap()
    })
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The same as far as can be told: it is told in whole MiB, and the driver's own part moves by one.
fn is_about(one: u64, other: u64) -> bool {
    one.abs_diff(other) <= 2
}

fn generation(site: &Site) -> Value {
    site.status()[0]["generation"].clone()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn servers_and_launchers_die_in_turn_and_there_is_never_a_second_copy() {
    let before = used();
    let site = Site::on("cuda");
    let model = large_checkpoint(&site.path().join("model"), BYTES);
    let mut launcher = site.preload(&model, 1, &[]);
    launcher.has_loaded();
    let (first, held) = (generation(&site), used());
    assert_eq!(processes(), [""; 0]);
    assert!(is_about(held - before, BYTES >> 20), "{before} {held}");
    let most = most_used(|| {
        for _ in 0..3 {
            orphan(&site, &mut launcher);
            launcher = adopts(&site, &model, 1);
            let server = site.status()[0]["pid"].as_u64().unwrap() as u32;
            signal(server, Signal::KILL);
            wait_until("another server serves", || {
                site.status()
                    .first()
                    .is_some_and(|daemon| daemon["pid"] != server)
            });
        }
    });
    assert_eq!(generation(&site), first);
    assert!(is_about(most, held), "{most} {held}");
    site.attach_verified(&model, 1);
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    assert!(is_about(used(), before));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_service_manager_keeps_device_memory_while_no_process_of_ours_lives() {
    let before = used();
    let site = Site::on("cuda");
    let model = large_checkpoint(&site.path().join("model"), BYTES);
    let manager = Manager::new(&site);
    let mut launcher = manager.preload(&site, &model, 1);
    manager.has_all(1);
    launcher.has_loaded();
    let (first, held) = (generation(&site), used());
    assert_eq!(processes(), [""; 0]);
    assert!(is_about(held - before, BYTES >> 20), "{before} {held}");
    let most = most_used(|| {
        for _ in 0..3 {
            kill_both(&mut launcher);
            wait_until("all processes are gone", || site.processes().is_empty());
            assert!(is_about(used(), held));
            launcher = manager.preload(&site, &model, 1);
            assert_loaded_nothing(&launcher);
        }
    });
    assert_eq!(generation(&site), first);
    assert!(is_about(most, held), "{most} {held}");
    site.attach_verified(&model, 1);
    let ran = site.run(&["release", "--all"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(is_about(used(), before));
}
