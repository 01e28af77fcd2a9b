//! Whatever is killed, stopped and flooded, and whenever: what is mapped stays, what is served is right, what is said
//! is true, the next launcher serves, and nothing grows.
//!
//! A seed decides an era: what is served there, and in each of its steps what is done, who is killed or stands still
//! meanwhile, and when. What these meet depends on the machine, so a seed that failed may need some runs.
//!
//! ```sh
//! WEIGHTD_CHAOS_MINUTES=30 cargo test -p weightd --test e2e chaos -- --nocapture
//! ```
//!
//! goes on from seed to seed for so long, `WEIGHTD_CHAOS_SEED=N` begins there, or is the only one where no minutes are
//! given, and `WEIGHTD_CHAOS_STEPS=N` makes eras longer or shorter. `WEIGHTD_CHAOS_DEVICE=cuda` has all ranks on the first
//! NVIDIA GPU, which nobody else may use meanwhile.

mod engines;
mod flood;
mod plan;
mod trend;
mod world;

use crate::gpu;
use crate::harness::*;
use crate::publisher::of_model;
use plan::{Era, Step};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use trend::Trends;
use world::World;

/// As many as take a minute: an engine waits some seconds for a daemon that is gone.
const ERAS: u64 = 9;
const STEPS: u64 = 14;
/// Steps of an era for whoever has minutes.
const MANY_STEPS: u64 = 60;

#[test]
fn whoever_is_killed_and_whenever_nothing_is_lost_and_the_next_launcher_serves() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let minutes = number("WEIGHTD_CHAOS_MINUTES").map(|minutes| Duration::from_secs(60 * minutes));
    let seed = number("WEIGHTD_CHAOS_SEED");
    let eras = match (minutes, seed) {
        (Some(_), _) => u64::MAX,
        (None, Some(_)) => 1,
        (None, None) => ERAS,
    };
    let many = if minutes.is_some() { MANY_STEPS } else { STEPS };
    let steps = number("WEIGHTD_CHAOS_STEPS").unwrap_or(many);
    // What this process takes of a GPU for itself, it takes before anything is measured.
    let _opened = Site::on(device()).devices(1)[0].open().unwrap();
    let start = Instant::now();
    let mut ours = Trends::default();
    for seed in (seed.unwrap_or(0)..).take(eras as usize) {
        if minutes.is_some_and(|minutes| start.elapsed() > minutes) {
            break;
        }
        era(seed, steps);
        // Other tests run in this process too, where nobody asked for minutes of this one.
        if minutes.is_some() {
            ours.sample("the test", std::process::id(), 0);
        }
    }
    ours.assert_flat();
}

fn era(seed: u64, steps: u64) {
    let (start, mut trends) = (Instant::now(), Trends::default());
    let before = used();
    let mut world = World::new(device(), Era::of(seed));
    eprintln!("seed {seed}: {:?}", Era::of(seed));
    let mut taken: Vec<Step> = Vec::new();
    let all = catch_unwind(AssertUnwindSafe(|| {
        for number in 0..steps {
            taken.push(Era::of(seed).step(number));
            world.step(taken.last().unwrap());
            world.sample(&mut trends);
        }
        trends.assert_flat();
    }));
    if let Err(panic) = all {
        for (number, step) in taken.iter().enumerate() {
            eprintln!("step {number}: {step:?}");
        }
        world.tell();
        let count = taken.len();
        eprintln!("again: WEIGHTD_CHAOS_SEED={seed} WEIGHTD_CHAOS_STEPS={count}");
        resume_unwind(panic);
    }
    world.end();
    let shared = fs::read_dir("/dev/shm").into_iter().flatten();
    let ours = shared.filter(|entry| {
        let name = entry.as_ref().unwrap().file_name();
        name.to_string_lossy().contains("weightd")
    });
    assert_eq!(ours.count(), 0, "something is left in /dev/shm");
    wait_until("the device's memory is free again", || used() <= before);
    eprintln!("seed {seed}: {steps} steps in {:.1?}", start.elapsed());
}

/// What the weights are on.
fn device() -> &'static str {
    match std::env::var("WEIGHTD_CHAOS_DEVICE").as_deref() {
        Ok("cuda") => "cuda",
        Ok("cpu") | Err(_) => "cpu",
        Ok(other) => panic!("WEIGHTD_CHAOS_DEVICE={other}"),
    }
}

/// What a GPU has given away, in MiB.
fn used() -> u64 {
    match device() {
        "cuda" => gpu::used(),
        _ => 0,
    }
}

/// Publishes all ranks of a model in place of what is served, one after another.
#[test]
#[ignore = "the body of another process"]
fn publisher_body() {
    let Some(site) = std::env::var_os("WEIGHTD_CHAOS_SITE") else {
        return;
    };
    let site = Site::at(site.into(), device());
    let model = PathBuf::from(std::env::var_os("WEIGHTD_CHAOS_MODEL").unwrap());
    let tp = std::env::var("WEIGHTD_CHAOS_TP").unwrap().parse().unwrap();
    let status = site.status();
    for publication in of_model(&site, &model, tp) {
        let socket = publication.socket.to_str().unwrap();
        let daemon = status.iter().find(|daemon| daemon["socket"] == socket).unwrap();
        let publication = match daemon["generation"].as_str() {
            Some(generation) if daemon["state"] == "serving" => publication.instead_of(generation),
            _ => publication,
        };
        publication.publish().unwrap();
    }
}
