//! The same on an NVIDIA GPU, by hand and one at a time, since these watch the device's memory:
//! `cargo test -p weightd --test e2e gpu -- --ignored --test-threads 1`.

use crate::checkpoints::*;
use crate::engine::*;
use crate::harness::*;
use rustix::process::Signal;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use weightd_blocking::Loaded;
use weightd_checkpoint::Checkpoint;
use weightd_core::machine::{AttachOptions, Mode};
use weightd_gpu::cuda::Touch;
use weightd_gpu::{Device, Weights};
use weightd_socket::credentials::our_uid;

const MIB: u64 = 1 << 20;

fn nvidia_smi(query: &str) -> String {
    let output = Command::new("nvidia-smi")
        .args([query, "--format=csv,noheader,nounits"])
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// What the device has given away, in MiB: no context of ours is needed to ask.
pub fn used() -> u64 {
    nvidia_smi("--query-gpu=memory.used")
        .lines()
        .next()
        .unwrap()
        .parse()
        .unwrap()
}

/// The processes that have a context on the device.
pub fn processes() -> Vec<String> {
    nvidia_smi("--query-compute-apps=pid")
        .lines()
        .map(str::to_owned)
        .collect()
}

/// The first device, kept open: what this process takes for its context is taken before anything is
/// measured.
fn open() -> (Device, weightd_gpu::Opened) {
    let device = Device::cuda().expect("an NVIDIA GPU")[0];
    let opened = device.open().unwrap();
    (device, opened)
}

/// The device reads the first byte of each tensor.
fn first_bytes(touch: &Touch, weights: &Weights) -> Vec<u8> {
    let places: Vec<_> = weights.tensors().map(|tensor| tensor.place().unwrap()).collect();
    touch.read(&places).unwrap()
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_layout_type_and_draft_holds_the_checkpoints_bytes() {
    let before = used();
    let mtp = r#"--speculative-config={"method": "mtp"}"#;
    let experts = "--enable-expert-parallel";
    for (name, tp, slots, options) in [
        (
            "llama",
            2,
            "4",
            &["--layout=vllm", "--pipeline-parallel-size=2"][..],
        ),
        ("llama", 4, "4", &["--layout=vllm", "--dtype=float32"]),
        ("llama", 2, "2", &["--dtype=float16"]),
        ("qwen3", 4, "4", &["--layout=vllm"]),
        ("deepseek_v3_mtp", 2, "2", &["--layout=vllm", experts]),
        (
            "deepseek_v3_mtp",
            2,
            "4",
            &[
                "--data-parallel-size=2",
                "--expert-placement-strategy=round_robin",
                experts,
            ],
        ),
        ("deepseek_v3_mtp", 4, "4", &[mtp]),
    ] {
        let (site, model) = (Site::on("cuda"), model(name));
        let options = [options, &["--ranks-per-device", slots]].concat();
        let mut launcher = site.preload(&model, tp, &options);
        let mut roles = vec![&[][..]];
        if options.contains(&mtp) {
            roles.push(&["--draft"]);
        }
        for role in roles {
            let ran = site.attach(&model, tp, &[&options[..], role, &["--all", "--verify"]].concat());
            assert_eq!(ran.code, Some(0), "{name} {options:?}: {ran:?}");
        }
        launcher.signal(Signal::INT);
        launcher.wait();
        site.assert_clean();
    }
    wait_until("the device's memory is free again", || used() <= before);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_model_that_the_device_has_no_room_for_is_refused_with_what_is_needed_and_free() {
    let before = used();
    let site = Site::on("cuda");
    let bytes = 400 << 30;
    let model = large_checkpoint(&site.path().join("model"), bytes);
    let mut launcher = site.start(site.on_model("preload", &model, 1, &[]));
    assert_eq!(launcher.code(), 1);
    let error = launcher.error();
    assert!(error.contains(&format!("no room for {bytes} bytes")), "{error}");
    assert!(error.contains("bytes are free"), "{error}");
    site.assert_clean();
    wait_until("nothing of it is on the device", || used() <= before);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn every_rank_holds_the_checkpoints_bytes_and_only_they_stay_on_the_device() {
    let before = used();
    for name in ["llama", "qwen3"] {
        for tp in [1, 2, 4] {
            let (site, model, slots) = (Site::on("cuda"), model(name), tp.to_string());
            let slots = ["--ranks-per-device", slots.as_str()];
            let mut launcher = site.preload(&model, tp, &slots);
            let ran = site.attach(&model, tp, &[&slots[..], &["--all", "--verify"]].concat());
            assert_eq!(ran.code, Some(0), "{ran:?}");
            wait_until("the loader is gone", || launcher.children("loader").is_empty());
            let bytes = site
                .status()
                .into_iter()
                .map(|daemon| daemon["bytes"].as_u64().unwrap());
            let granules: u64 = bytes.map(|bytes| bytes.div_ceil(2 * MIB) * 2).sum();
            assert_eq!((used() - before, processes()), (granules, vec![]));
            launcher.signal(Signal::INT);
            assert_eq!(launcher.code(), 130);
            site.assert_clean();
            assert_eq!(used(), before);
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn an_engine_reads_on_while_its_server_is_killed_and_nothing_is_held_twice() {
    let (device, _opened) = open();
    let site = Site::on("cuda");
    let model = large_checkpoint(&site.path().join("model"), 2048 * MIB);
    let known = || Checkpoint::open(&model).unwrap().identity().files.is_some();
    wait_until("the files are old enough to be known by their times", known);
    let touch = Touch::new(device.uuid()).unwrap();
    let before = used();
    let launcher = site.preload(&model, 1, &[]);
    let mapped = map(&site, &model, 1);
    wait_until("the loader is gone", || launcher.children("loader").is_empty());
    let (generation, held) = (mapped.generation(), used() - before);
    let expected = first_bytes(&touch, mapped.model());
    let over = AtomicBool::new(false);
    let most = thread::scope(|scope| {
        let sampler = scope.spawn(|| {
            let mut most = 0;
            while !over.load(Ordering::Relaxed) {
                most = most.max(used());
            }
            most
        });
        for _ in 0..5 {
            let old = launcher.child("server");
            signal(old, Signal::KILL);
            assert_eq!(first_bytes(&touch, mapped.model()), expected);
            wait_until("another server serves", || {
                let status = site.status();
                status.iter().any(|daemon| daemon["pid"] != old)
            });
            assert_eq!(map(&site, &model, 1).generation(), generation);
        }
        over.store(true, Ordering::Relaxed);
        sampler.join().unwrap()
    });
    assert!(
        most - before <= held,
        "{most} MiB at most, {before} before and {held} for the weights"
    );
    assert_eq!(first_bytes(&touch, mapped.model()), expected);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn an_engine_that_is_killed_takes_nothing_from_the_others() {
    let (device, _opened) = open();
    let (site, model) = (Site::on("cuda"), model("llama"));
    let touch = Touch::new(device.uuid()).unwrap();
    let _launcher = site.preload(&model, 1, &[]);
    let mapped = map(&site, &model, 1);
    let expected = first_bytes(&touch, mapped.model());
    for _ in 0..5 {
        let mut other = site.start(site.on_model("attach", &model, 1, &["--all", "--hold"]));
        assert!(other.line().contains("mapped"));
        other.kill();
        assert_eq!(first_bytes(&touch, mapped.model()), expected);
    }
    assert_intact(&mapped, &model, 1);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_loader_killed_half_way_leaves_nothing_on_the_device() {
    let before = used();
    let site = Site::on("cuda");
    let model = large_checkpoint(&site.path().join("model"), 8192 * MIB);
    let mut launcher = site.start(site.on_model("preload", &model, 1, &[]));
    let loader = launcher.child("loader");
    wait_until("the loader has its memory", || used() > before + 4096);
    signal(loader, Signal::KILL);
    assert_eq!(launcher.code(), 1);
    let error = launcher.error();
    assert!(error.contains("the loader was killed by signal 9"), "{error}");
    site.assert_clean();
    wait_until("the device is as before", || used() == before);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn two_engines_map_and_one_copies_and_each_is_right_after_the_release() {
    let (device, _opened) = open();
    let (site, model) = (Site::on("cuda"), model("llama"));
    let touch = Touch::new(device.uuid()).unwrap();
    let before = used();
    let mut launcher = site.preload(&model, 1, &[]);
    let (first, second) = (map(&site, &model, 1), map(&site, &model, 1));
    let expected = first_bytes(&touch, first.model());
    let options = AttachOptions {
        mode: Mode::Copy,
        ..AttachOptions::new(our_uid().unwrap())
    };
    let copied = loader(&site.socket(), options, key(&model, 1)).attach().unwrap();
    assert!(
        matches!(copied, Loaded::Copied { released: true, .. }),
        "{copied:?}"
    );
    assert_eq!(site.status()[0]["state"], "released");
    drop(first);
    assert_eq!(first_bytes(&touch, second.model()), expected);
    assert_intact(&second, &model, 1);
    let copy = copied.model();
    assert_eq!(first_bytes(&touch, copy), expected);
    drop(second);
    assert_eq!(first_bytes(&touch, copy), expected);
    drop(copied);
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    // What the driver keeps for small allocations of a context may stay with that context.
    wait_until("the device is as before", || used() <= before + 2);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cycles_of_attach_and_detach_leave_memory_and_descriptors_flat() {
    let (_device, _opened) = open();
    let (site, model) = (Site::on("cuda"), model("llama"));
    let _launcher = site.preload(&model, 1, &[]);
    let (socket, key) = (site.socket(), key(&model, 1));
    let cycle = || drop(attach_at(&socket, &key));
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    cycle();
    let (before, open) = (used(), descriptors());
    for _ in 0..10_000 {
        cycle();
    }
    assert_eq!((used(), descriptors()), (before, open));
    for _ in 0..200 {
        let ran = site.attach(&model, 1, &["--all"]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }
    assert_eq!((used(), descriptors()), (before, open));
    wait_until("no lease is left", || site.status()[0]["leases"] == 0);
}

fn attach_at(socket: &Path, key: &weightd_core::content::Key) -> Loaded<Weights> {
    let options = AttachOptions::new(our_uid().unwrap());
    loader(socket, options, key.clone()).attach().unwrap()
}
