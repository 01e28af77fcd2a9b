//! Engines that publish on an NVIDIA GPU, by hand and one at a time, since these watch the device's memory:
//! `cargo test -p weightd --test e2e gpu -- --ignored --test-threads 1`.

use crate::checkpoints::*;
use crate::engine::*;
use crate::gpu::{processes, used};
use crate::harness::*;
use rustix::process::Signal;
use std::path::PathBuf;
use weightd_blocking::{Binding, Contents, Endpoint, Filling, PublishFailed, Published, Publisher};
use weightd_core::content::{Dtype, Key};
use weightd_core::machine::{AttachOptions, PublishError};
use weightd_gpu::Device;
use weightd_socket::credentials::our_uid;

/// A daemon that takes what is published to it, and its device.
fn serve(site: &Site, more: &[&str]) -> (Running, PathBuf, Device) {
    let device = Device::cuda().expect("an NVIDIA GPU")[0];
    let mut serve = site.start(site.weightd(&[&["serve"], more].concat()));
    assert!(serve.line().starts_with("SERVING"), "{}", serve.log());
    let socket = site.socket();
    (serve, socket, device)
}

/// What an engine makes of the checkpoint when it does this to it.
fn key_of(processing: &str) -> Key {
    Key {
        processing: processing.to_owned(),
        ..key(&model("llama"), 1)
    }
}

fn binding(socket: &std::path::Path, key: &Key) -> Binding {
    let digest = || Ok([7; 32]);
    let options = AttachOptions::new(our_uid().unwrap());
    Binding::with(Endpoint::socket(socket).unwrap(), options, key.clone(), digest)
}

/// One large tensor, whose bytes are what they are, and a small one that tells contents apart.
fn publish_large(publisher: &Publisher, bytes: u64, mark: u8) -> Result<Published, PublishFailed> {
    let mut contents = Contents::new();
    contents.parameter("large", Dtype::U8, &[bytes]).unwrap();
    contents.parameter("small", Dtype::U8, &[4]).unwrap();
    publisher.publish(contents, |filling: &Filling| {
        filling.offset("large", bytes)?;
        filling.write("small", &[mark; 4])
    })
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_an_engine_publishes_on_the_device_is_mapped_by_the_next_and_kept_by_who_has_the_old() {
    let site = Site::on("cuda");
    let (mut serve, socket, device) = serve(&site, &[]);
    let _opened = device.open().unwrap();

    let source: Vec<u8> = (0..3_000_000u32).map(|at| (at * 31 + at / 251) as u8).collect();
    let mut contents = Contents::new();
    contents
        .parameter("a", Dtype::U8, &[source.len() as u64])
        .unwrap();
    contents.alias("b", "a");
    let first = Publisher::with(binding(&socket, &key_of("first")), device);
    let published = first
        .publish(contents.clone(), |filling: &Filling| filling.write("a", &source))
        .unwrap();

    let second = Publisher::with(binding(&socket, &key_of("second")), device);
    let other: Vec<u8> = source.iter().map(|byte| !byte).collect();
    let replaced = second
        .publish(contents, |filling: &Filling| filling.write("a", &other))
        .unwrap();
    assert_ne!(published.generation, replaced.generation);
    assert!(replaced.lease.is_some());

    let loader = weightd_blocking::Loader::from(binding(&socket, &key_of("second")));
    let mapped = loader.attach().unwrap();
    assert_eq!(mapped.generation(), Some(replaced.generation));
    for name in ["a", "b"] {
        assert_eq!(*mapped.model().get(name).unwrap().fetch().unwrap(), other);
    }
    // Whoever mapped the first keeps it.
    assert_eq!(*published.weights.get("a").unwrap().fetch().unwrap(), source);
    let old = weightd_blocking::Loader::from(binding(&socket, &key_of("first")));
    let refused = old.attach().unwrap_err().to_string();
    assert!(
        refused.contains("processing (asked for first, served second)"),
        "{refused}"
    );
    serve.signal(Signal::INT);
    assert_eq!(serve.code(), 130);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_device_that_cannot_hold_both_keeps_the_old_or_drops_it_first_as_the_daemon_was_told() {
    for (more, drops) in [(&[][..], false), (&["--replace", "drop-first"], true)] {
        let site = Site::on("cuda");
        let (mut serve, socket, device) = serve(&site, more);
        let opened = device.open().unwrap();
        let (free, _) = device.memory().unwrap().unwrap();
        let bytes = free / 10 * 6;
        let publish = |processing: &str, mark: u8| {
            let publisher = Publisher::with(binding(&socket, &key_of(processing)), device);
            publish_large(&publisher, bytes, mark)
        };
        let first = publish("first", 1).unwrap().generation;
        let second = publish("second", 2);
        let status = site.status();
        let generation = status[0]["generation"].as_str().unwrap();
        let attach = |processing: &str| {
            let loader = weightd_blocking::Loader::from(binding(&socket, &key_of(processing)));
            let attached = loader.attach().unwrap();
            attached.model().get("small").unwrap().fetch().unwrap().to_vec()
        };
        if drops {
            assert_eq!(generation, second.unwrap().generation.to_string());
            assert_eq!(attach("second"), [2; 4]);
        } else {
            let error = second.unwrap_err();
            assert!(
                matches!(error, PublishFailed::Publish(PublishError::OutOfMemory { .. })),
                "{error}"
            );
            assert!(error.to_string().contains("--replace drop-first"), "{error}");
            assert_eq!(generation, first.to_string());
            assert_eq!(attach("first"), [1; 4]);
        }
        drop(opened);
        serve.signal(Signal::INT);
        assert_eq!(serve.code(), 130);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_was_published_costs_its_bytes_once_and_its_publisher_may_end() {
    let before = used();
    let site = Site::on("cuda");
    let (mut serve, _, _) = serve(&site, &[]);
    let mut publisher = std::process::Command::new(std::env::current_exe().unwrap());
    publisher
        .args(["--exact", "gpu_publisher::publisher_body", "--ignored"])
        .env(
            "WEIGHTD_TEST_SOCKET",
            site.status()[0]["socket"].as_str().unwrap(),
        );
    assert!(publisher.status().unwrap().success());
    assert_eq!(site.status()[0]["state"], "serving");
    assert_eq!(processes(), [""; 0]);
    wait_until("the weights alone are left", || {
        let grown = used() - before;
        (1024..=1026).contains(&grown)
    });
    serve.signal(Signal::INT);
    assert_eq!(serve.code(), 130);
    wait_until("the device is as before", || used() == before);
}

#[test]
#[ignore = "the body of another process"]
fn publisher_body() {
    let Some(socket) = std::env::var_os("WEIGHTD_TEST_SOCKET").map(PathBuf::from) else {
        return;
    };
    let device = Device::cuda().unwrap()[0];
    let publisher = Publisher::with(binding(&socket, &key_of("body")), device);
    publish_large(&publisher, (1 << 30) - 512, 3).unwrap();
}
