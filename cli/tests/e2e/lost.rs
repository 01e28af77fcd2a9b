//! Engines that cannot import, and content that nobody can import any more.

use crate::checkpoints::*;
use crate::harness::*;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open};
use serde_json::Value;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use weightd_blocking::channel::Channel;
use weightd_blocking::request::request;
use weightd_checkpoint::{Checkpoint, KeyOptions, Rank, ShardingOptions};
use weightd_core::content::manifest::{LegacyHandle, ManifestBuilder, Region};
use weightd_core::content::{DeviceUuid, Generation, HandleKind, Key};
use weightd_core::machine::HandoverEvent;
use weightd_core::plan::placement::Parallel;
use weightd_core::time::Span;
use weightd_core::wire::frame::{HEADER_BYTES, Header};
use weightd_core::wire::message::{
    ContentInfo, Digest, Expects, Message, Publish, RegionInfo, Report, State,
};
use weightd_socket::connect::pair;
use weightd_socket::message::{receive, send};

/// The bytes of every region that a test publishes.
pub const BYTES: u64 = 8192;

/// A manifest over one region of host memory.
fn manifest(bytes: u64, device: DeviceUuid) -> Vec<u8> {
    manifest_of(Region {
        handle: HandleKind::Memfd,
        bytes,
        device,
        legacy: None,
    })
}

fn manifest_of(region: Region) -> Vec<u8> {
    let mut builder = ManifestBuilder::new();
    builder.region(region);
    builder.finish().unwrap().encode()
}

fn info(manifest: &[u8]) -> ContentInfo {
    let handle = HandleKind::Memfd;
    ContentInfo {
        manifest_bytes: manifest.len() as u64,
        regions: vec![RegionInfo { handle, bytes: BYTES }],
        tensors: 0,
        aliases: 0,
        checksums: false,
    }
}

fn region() -> OwnedFd {
    weightd_gpu::sealed(&[7; BYTES as usize]).unwrap()
}

/// What a probe of this content answers.
fn probe(content: ContentInfo, device_uuid: DeviceUuid, descriptors: &[OwnedFd]) -> Message {
    let (ours, theirs) = pair().unwrap();
    let generation = Generation { epoch: 1, number: 2 };
    let state = State {
        generation,
        device_uuid,
        content,
    };
    let bytes = Message::from(state).frame(1, descriptors.len()).unwrap();
    let descriptors: Vec<_> = descriptors.iter().map(std::os::fd::AsFd::as_fd).collect();
    assert_eq!(send(&ours, &bytes, &descriptors).unwrap(), bytes.len());
    let mut command = Command::new(env!("CARGO_BIN_EXE_weightd"));
    command.arg("probe").stdin(Stdio::from(theirs));
    let ran = finish(command);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let mut answer = [0; 4096];
    let received = receive(&ours, &mut answer, &mut Vec::new()).unwrap();
    let header = Header::decode(&answer).unwrap().unwrap();
    assert_eq!(received.bytes, HEADER_BYTES + header.body);
    Message::decode(header.kind, &answer[HEADER_BYTES..received.bytes]).unwrap()
}

#[test]
fn a_probe_tells_memory_that_works_from_memory_that_does_not_and_from_what_it_cannot_know() {
    let here = DeviceUuid([3; 16]);
    let sealed = |bytes: &[u8]| weightd_gpu::sealed(bytes).unwrap();
    let good = manifest(BYTES, here);
    let answer = probe(info(&good), here, &[sealed(&good), region()]);
    assert!(matches!(answer, Message::Reported(_)), "{answer:?}");

    // What is not as it was stated cannot be used by anyone: a region, its device, a number of tensors.
    let (larger, elsewhere) = (manifest(BYTES + 1, here), manifest(BYTES, DeviceUuid([4; 16])));
    let more = ContentInfo {
        tensors: 1,
        ..info(&good)
    };
    for (content, manifest) in [
        (info(&larger), &larger),
        (info(&elsewhere), &elsewhere),
        (more, &good),
    ] {
        let answer = probe(content, here, &[sealed(manifest), region()]);
        let Message::Report(report) = &answer else {
            panic!("{answer:?}")
        };
        assert!(
            report
                .import_failed
                .contains("not of the content that the daemon stated"),
            "{report:?}"
        );
    }

    // No device of this machine has this name, whatever became of the memory.
    let handle = HandleKind::CudaIpc;
    let unknown = manifest_of(Region {
        handle,
        bytes: BYTES,
        device: here,
        legacy: Some(LegacyHandle {
            handle: [0; 64],
            offset: 0,
        }),
    });
    let content = ContentInfo {
        regions: vec![RegionInfo { handle, bytes: BYTES }],
        ..info(&unknown)
    };
    let answer = probe(content, here, &[sealed(&unknown)]);
    let Message::Failure(failure) = &answer else {
        panic!("{answer:?}")
    };
    assert!(failure.message.contains("CUDA"), "{failure:?}");
}

#[test]
fn an_engine_that_cannot_import_for_reasons_of_its_own_changes_nothing() {
    let (site, model) = (Site::new(), model("qwen3"));
    let mut launcher = site.preload(&model, 1, &[]);
    wait_until("the loader is gone", || launcher.children("loader").is_empty());
    let generation = |status: &Value| status["generation"].as_str().unwrap().to_owned();
    let before = generation(&site.status()[0]);
    let socket = site.socket();
    let report = Report {
        daemon: 0,
        generation: before.parse().unwrap(),
        import_failed: "no address space left for me".to_owned(),
    };
    let answer = request(&socket, report, Span::secs(60)).unwrap();
    assert!(matches!(answer, Message::Reported(_)), "{answer:?}");
    let verdict = format!(
        "rank 0: generation {before} can be imported, so nothing changes; the engine said: no address space"
    );
    wait_until("the launcher has tried", || launcher.log().contains(&verdict));
    wait_until("the probe is gone", || launcher.children("probe").is_empty());
    assert_eq!(generation(&site.status()[0]), before);
    assert!(launcher.children("loader").is_empty());
    assert!(!launcher.log().contains("daemon lost"), "{}", launcher.log());
    site.attach_verified(&model, 1);
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    let log = launcher.log();
    assert_eq!(log.matches("could not import").count(), 1, "{log}");
    site.assert_clean();
}

/// Two replicas, so that there are two daemons.
const REPLICAS: [&str; 2] = ["--data-parallel-size", "2"];

/// A launcher whose loader was replaced, before it had published anything, by this test: what the
/// test publishes to the launcher is served, with digests where they are wanted at once. The channel
/// ends with what is returned. `None` where a
/// sandbox does not let a process take its child's descriptors: pidfd_getfd(2).
pub fn published_by_us(
    site: &Site,
    model: &Path,
    digests: bool,
    publish: impl Fn(&mut Channel, u32, Key),
) -> Option<(Running, Channel)> {
    let mut launcher = site.start(site.on_model("preload", model, 1, &REPLICAS));
    let loader = launcher.child("loader");
    signal(loader, Signal::STOP);
    let process = pidfd_open(Pid::from_raw(loader as i32).unwrap(), PidfdFlags::empty()).unwrap();
    let channel = pidfd_getfd(&process, 0, PidfdGetfdFlags::empty());
    signal(loader, Signal::KILL);
    let channel = match channel {
        Err(Errno::PERM | Errno::NOSYS) => {
            eprintln!("not tested: this system does not allow pidfd_getfd");
            return None;
        }
        channel => channel.unwrap(),
    };
    let mut channel = Channel::new(channel).unwrap();
    let checkpoint = Checkpoint::open(model).unwrap();
    let digest = checkpoint
        .digest(&Default::default(), &Default::default())
        .unwrap();
    for daemon in 0..2 {
        let world = Parallel {
            tensor: 1,
            pipeline: 1,
            data: 2,
        };
        let options = KeyOptions::new(ShardingOptions::new(world));
        let rank = Rank {
            dp: daemon,
            pp: 0,
            tp: 0,
        };
        let key = options.key(&checkpoint, checkpoint.identity(), rank);
        publish(&mut channel, daemon, key.unwrap());
        if digests {
            channel.machine_mut().digest(Digest { daemon, digest });
        }
        let events = channel.settle().unwrap();
        assert!(
            matches!(events[..], [HandoverEvent::Published { .. }]),
            "{events:?}"
        );
    }
    launcher.ready();
    Some((launcher, channel))
}

fn publish(channel: &mut Channel, daemon: u32, key: Key, content: ContentInfo, descriptors: Vec<OwnedFd>) {
    let publication = Publish {
        daemon,
        generation: None,
        expects: Expects::Empty,
        key,
        content,
    };
    channel.machine_mut().publish(publication, descriptors);
}

/// State and generation of each daemon, by rank.
fn states(site: &Site) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let mut status = site.status();
    status.sort_by_key(|daemon| daemon["global_rank"].as_u64());
    status
        .iter()
        .map(|daemon| (text(&daemon["state"]), text(&daemon["generation"])))
        .collect()
}

fn replica(site: &Site, model: &Path, more: &[&str]) -> Ran {
    site.attach(model, 1, &[&REPLICAS[..], more].concat())
}

/// An engine that waits until it is served.
#[track_caller]
fn is_served(site: &Site, model: &Path, rank: &str) {
    let ran = replica(site, model, &["--rank", rank, "--wait", "60"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
}

#[test]
fn content_that_nobody_can_import_is_loaded_afresh_and_only_that() {
    let site = Site::new();
    let model = large_checkpoint(&site.path().join("model"), 256 << 20);
    let host = |daemon: u32| weightd_gpu::Device::host(daemon).uuid();
    let served = published_by_us(&site, &model, true, |channel, daemon, key| {
        // That of daemon 1 is larger than its memory.
        let manifest = manifest(BYTES + u64::from(daemon), host(daemon));
        let descriptors = vec![weightd_gpu::sealed(&manifest).unwrap(), region()];
        publish(channel, daemon, key, info(&manifest), descriptors);
    });
    let Some((mut launcher, channel)) = served else {
        return;
    };
    drop(channel);
    let before = states(&site);
    is_served(&site, &model, "0");

    // Meanwhile the checkpoint is not there.
    let away = site.path().join("away");
    fs::rename(&model, &away).unwrap();
    let ran = replica(&site, &away, &["--rank", "1"]);
    assert!(ran.error(1).contains("malformed"), "{ran:?}");
    wait_until("the launcher has tried to load", || {
        launcher.log().contains("rank 1: loading afresh failed: ")
    });
    let lost = ("lost".to_owned(), before[1].1.clone());
    assert_eq!(states(&site), [before[0].clone(), lost]);
    let ran = replica(&site, &away, &["--rank", "1"]);
    assert!(ran.error(1).contains("the device lost generation"), "{ran:?}");

    fs::rename(&away, &model).unwrap();
    wait_until("it is loaded", || {
        launcher.log().contains("rank 1: loaded afresh")
    });
    is_served(&site, &model, "1");
    let after = states(&site);
    assert_eq!(after[0], before[0], "who lost nothing serves on");
    assert_eq!(after[1].0, "serving");
    assert_ne!(after[1].1, before[1].1);
    let log = launcher.log();
    assert_eq!(log.matches("rank 1: daemon lost").count(), 1, "{log}");
    assert!(!log.contains("rank 0: daemon lost"), "{log}");
    assert!(!log.contains("rank 0: loaded afresh"), "{log}");
    assert!(!log.contains("re-armed"), "{log}");
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    site.assert_clean();
}

#[test]
fn memory_that_was_its_publishers_own_is_loaded_afresh_when_the_publisher_ends() {
    let site = Site::new();
    let model = large_checkpoint(&site.path().join("model"), 256 << 20);
    let served = published_by_us(&site, &model, true, |channel, daemon, key| {
        let manifest = manifest(BYTES, DeviceUuid([daemon as u8; 16]));
        let mut content = info(&manifest);
        let mut descriptors = vec![weightd_gpu::sealed(&manifest).unwrap()];
        match daemon {
            0 => descriptors.push(region()),
            _ => content.regions[0].handle = HandleKind::CudaIpc,
        }
        publish(channel, daemon, key, content, descriptors);
    });
    let Some((launcher, channel)) = served else { return };
    let before = states(&site);
    drop(channel);
    wait_until("it is loaded", || {
        launcher.log().contains("rank 1: loaded afresh")
    });
    is_served(&site, &model, "1");
    let after = states(&site);
    assert_eq!(after[0], before[0]);
    assert_ne!(after[1].1, before[1].1);
}

#[test]
fn a_digest_that_its_loader_did_not_live_to_hand_over_is_made_up_for_from_the_same_files_alone() {
    let site = Site::new();
    let model = large_checkpoint(&site.path().join("model"), 256 << 20);
    let other = copy_of(&model, &site.path().join("other"));
    let weights = File::options().write(true).open(other.join("model.safetensors"));
    weights.unwrap().write_all_at(&[1], 100 << 20).unwrap();
    if !is_steady(&model) || !is_steady(&other) {
        eprintln!("not tested: on this file system no digest is ever late");
        return;
    }
    let served = published_by_us(&site, &model, false, |channel, daemon, key| {
        let manifest = manifest(BYTES, weightd_gpu::Device::host(daemon).uuid());
        let descriptors = vec![weightd_gpu::sealed(&manifest).unwrap(), region()];
        publish(channel, daemon, key, info(&manifest), descriptors);
    });
    let Some((mut launcher, channel)) = served else {
        return;
    };
    // Meanwhile other weights lie there.
    let away = site.path().join("away");
    fs::rename(&model, &away).unwrap();
    fs::rename(&other, &model).unwrap();
    let before = states(&site);
    drop(channel);
    let missing = "rank 0, rank 1: the checkpoint's digest is missing";
    wait_until("the launcher has tried", || {
        let log = launcher.log();
        log.contains(missing) && log.contains("changed since it was loaded")
    });
    launcher.says("the loader was killed by signal 9");
    let ran = replica(&site, &model, &["--rank", "0"]);
    assert_ne!(ran.code, Some(0), "they must not pass for what is held: {ran:?}");

    fs::rename(&model, &other).unwrap();
    fs::rename(&away, &model).unwrap();
    let copy = copy_of(&model, &site.path().join("copy"));
    is_served(&site, &copy, "0");
    is_served(&site, &copy, "1");
    let error = replica(&site, &other, &["--rank", "0"]).error(1);
    assert!(error.contains("checkpoint"), "{error}");
    assert_eq!(states(&site), before, "nothing was loaded again");
    launcher.signal(Signal::INT);
    assert_eq!(launcher.code(), 130);
    site.assert_clean();
}
