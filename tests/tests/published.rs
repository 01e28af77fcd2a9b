//! Content with every kind of tensor: one process publishes it, another serves it, and this one,
//! which holds the vault, maps it.
//!
//! The ignored tests are the bodies of the other processes, and do nothing when run by themselves.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use weightd_blocking::Clock;
use weightd_blocking::channel::Channel;
use weightd_blocking::client::{Engine, attach};
use weightd_blocking::driver::Driver;
use weightd_blocking::serve::{ServerProcess, serve};
use weightd_checkpoint::{Checkpoint, KeyOptions, Rank};
use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{DeviceUuid, Dtype, HandleKind, Key, Manifest, Role};
use weightd_core::machine::{
    AttachOptions, Fault, Held, Limits, Origin, Outcome, PublishEvent, Vault, VaultEvent,
};
use weightd_core::peer::Peer;
use weightd_core::wire::message::{ContentInfo, DaemonInfo, Expects, Publish, RegionInfo};
use weightd_gpu::{Device, Weights};
use weightd_socket::connect::{connect, pair};
use weightd_socket::credentials::our_uid;
use weightd_socket::listen::Pending;
use weightd_socket::lock::Lock;
use weightd_socket::path::{control_path, socket_path};

/// The path of the control socket, for a child.
const CONTROL: &str = "WEIGHTD_TEST_CONTROL";

/// The sizes of the two regions, in bytes.
const BYTES: [u64; 2] = [4096, 512];

fn key() -> Key {
    let checkpoint = Checkpoint::open(&weightd_tests::checkpoint("qwen3")).unwrap();
    let rank = Rank { dp: 0, pp: 0, tp: 0 };
    KeyOptions::default()
        .key(&checkpoint, checkpoint.identity(), rank, Role::Target)
        .unwrap()
}

/// What region `number` holds.
fn bytes_of(number: usize) -> Vec<u8> {
    (0..BYTES[number])
        .map(|at| (at * 31 + at / 251 + number as u64) as u8)
        .collect()
}

/// Parameters, buffers (one of them not persistent), a strided and an overlapping view, a scalar,
/// an empty tensor, an alias and an alias of that, attributes; in two regions.
fn manifest(device: DeviceUuid) -> Manifest {
    let mut builder = ManifestBuilder::new();
    for bytes in BYTES {
        let handle = HandleKind::Memfd;
        builder.region(Region {
            handle,
            bytes,
            device,
            legacy: None,
        });
    }
    let plain = TensorSpec {
        kind: TensorKind::Parameter,
        persistent: true,
        dtype: Dtype::BF16,
        shape: &[32, 16],
        strides: None,
        region: 0,
        offset: 0,
    };
    let buffer = TensorSpec {
        kind: TensorKind::Buffer,
        region: 1,
        ..plain
    };
    builder.tensor("qkv.weight", plain);
    builder.tensor(
        "q.weight",
        TensorSpec {
            shape: &[16, 16],
            ..plain
        },
    );
    builder.tensor(
        "even_columns",
        TensorSpec {
            shape: &[32, 8],
            strides: Some(&[16, 2]),
            ..plain
        },
    );
    builder.tensor(
        "scale",
        TensorSpec {
            dtype: Dtype::F32,
            shape: &[],
            offset: 1024,
            ..plain
        },
    );
    builder.tensor(
        "nothing",
        TensorSpec {
            shape: &[0, 16],
            offset: 2048,
            ..plain
        },
    );
    builder.tensor(
        "running_mean",
        TensorSpec {
            dtype: Dtype::F32,
            shape: &[16],
            ..buffer
        },
    );
    let scratch = TensorSpec {
        dtype: Dtype::I64,
        shape: &[8],
        offset: 256,
        persistent: false,
        ..buffer
    };
    builder.tensor("inv_freq", scratch);
    builder.alias("head.weight", "qkv.weight");
    builder.alias("output.weight", "head.weight");
    builder.attr("has_own_embed_tokens", false);
    builder.attr("has_own_lm_head", true);
    builder.finish().unwrap()
}

#[test]
fn content_of_every_kind_arrives_whole_in_another_process() {
    let temp = tempfile::tempdir().unwrap();
    let device = Device::host(0).uuid();
    let socket = socket_path(temp.path(), &device, None, None, Role::Target).unwrap();
    let lock = Lock::acquire(&socket).unwrap();
    let pending = Pending::bind(&lock).unwrap();
    let control = control_path(temp.path(), 1).unwrap();
    let control_lock = Lock::acquire(&control).unwrap();
    let listener = Pending::bind(&control_lock)
        .unwrap()
        .publish(&control_lock)
        .unwrap();
    let held = Held {
        info: DaemonInfo {
            socket: socket.display().to_string(),
            global_rank: 0,
            device_uuid: device,
            no_release: false,
            key: key(),
        },
        lock: lock.as_fd().try_clone_to_owned().unwrap(),
        listener: pending.as_fd().try_clone_to_owned().unwrap(),
    };

    let clock = Clock::start();
    let mut driver = Driver::new(Vault::new(std::process::id(), 7, [held])).unwrap();
    let _server = Process::start("server_body", &control, listener);
    let (connection, peer) = connect(&control).unwrap();
    driver.add(clock.now(), connection, Origin::Server, peer).unwrap();
    let (ours, theirs) = pair().unwrap();
    let publisher = Process::start("publisher_body", &control, theirs);
    let (pid, uid) = (publisher.0.id(), our_uid().unwrap());
    driver
        .add(clock.now(), ours, Origin::Loader, Peer { pid, uid })
        .unwrap();
    serve_until_armed(&mut driver, &clock);
    pending.publish(&lock).unwrap();

    let attached = attach(&socket, AttachOptions::new(uid), key(), &mut Mapper).unwrap();
    let generation = attached.generation();
    assert_eq!((generation.epoch, generation.number), (7, 1));
    assert_eq!(
        attached.outcome,
        Outcome::Mapped {
            generation,
            leased: true
        }
    );
    let (weights, expected) = (&attached.weights, manifest(device));
    assert_eq!(weights.manifest(), &expected);
    assert_eq!(weights.bytes(), BYTES.iter().sum::<u64>());
    for tensor in expected.tensors() {
        let view = weights.get(tensor.name).unwrap();
        let memory = view.host().unwrap();
        let got: Vec<u8> = view.runs(memory).flatten().copied().collect();
        assert_eq!(got, elements(&tensor), "{}", tensor.name);
    }
    let address = |name: &str| weights.get(name).unwrap().address();
    for alias in ["head.weight", "output.weight"] {
        assert_eq!(address(alias), address("qkv.weight"));
    }
    assert_eq!(address("even_columns"), address("q.weight"));
    assert_eq!(address("scale"), address("qkv.weight") + 1024);
}

/// The elements of a tensor in row-major order, one by one from its strides.
fn elements(tensor: &weightd_core::content::manifest::Tensor<'_>) -> Vec<u8> {
    let (memory, width) = (bytes_of(tensor.region), tensor.dtype.bits() / 8);
    let count: u64 = tensor.shape.iter().product();
    let mut elements = Vec::new();
    for index in 0..count {
        let (mut rest, mut at) = (index, 0);
        for (size, stride) in tensor.shape.iter().zip(tensor.strides).rev() {
            at += rest % size * stride;
            rest /= size;
        }
        let start = (tensor.offset + at * width) as usize;
        elements.extend_from_slice(&memory[start..start + width as usize]);
    }
    elements
}

fn serve_until_armed(driver: &mut Driver<Vault<OwnedFd>>, clock: &Clock) {
    loop {
        let turn = driver.turn(clock.now()).unwrap();
        for event in turn.events {
            match event {
                VaultEvent::Armed { complete: true } => return,
                VaultEvent::LoadFailed { why } | VaultEvent::ServerGone { why } => panic!("{why}"),
                _ => {}
            }
        }
        driver.wait(clock.until(turn.wake_at)).unwrap();
    }
}

#[test]
#[ignore = "the body of another process"]
fn server_body() {
    let Some(control_path) = std::env::var_os(CONTROL).map(PathBuf::from) else {
        return;
    };
    let process = ServerProcess {
        control: stdin(),
        control_path: &control_path,
        version: "test",
        limits: Limits::default(),
    };
    let (never, _other_end) = pair().unwrap();
    serve(process, never, |_| {}).unwrap();
}

#[test]
#[ignore = "the body of another process"]
fn publisher_body() {
    if std::env::var_os(CONTROL).is_none() {
        return;
    }
    let device = Device::host(0);
    let encoded = manifest(device.uuid()).encode();
    let mut descriptors = vec![weightd_gpu::sealed(&encoded).unwrap()];
    let mut regions = Vec::new();
    for (number, bytes) in BYTES.into_iter().enumerate() {
        let region = device.allocate(bytes).unwrap();
        region.write(0, &bytes_of(number)).unwrap();
        let export = region.export().unwrap();
        regions.push(RegionInfo {
            handle: export.handle,
            bytes,
        });
        descriptors.push(export.fd);
    }
    let content = ContentInfo {
        manifest_bytes: encoded.len() as u64,
        regions,
        tensors: manifest(device.uuid()).tensors().len() as u32,
        aliases: manifest(device.uuid()).aliases().len() as u32,
    };
    let publish = Publish {
        daemon: 0,
        generation: None,
        expects: Expects::Empty,
        key: key(),
        content,
    };
    let mut channel = Channel::new(stdin()).unwrap();
    channel.machine_mut().publish(publish, descriptors);
    let events = channel.settle().unwrap();
    assert!(
        matches!(events[..], [PublishEvent::Published { daemon: 0, .. }]),
        "{events:?}"
    );
}

fn stdin() -> OwnedFd {
    std::io::stdin().as_fd().try_clone_to_owned().unwrap()
}

/// A process that runs an ignored test of this file; killed when dropped.
struct Process(Child);

impl Process {
    fn start(body: &str, control: &Path, stdin: OwnedFd) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", body, "--ignored", "--nocapture"])
            .env(CONTROL, control)
            .stdin(Stdio::from(stdin))
            .stdout(Stdio::null());
        Process(command.spawn().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Mapper;

impl Engine for Mapper {
    fn digest(&mut self) -> Result<[u8; 32], String> {
        Err("both sides have the same files".to_owned())
    }

    fn copy(&mut self, _weights: &Weights) -> Result<(), Fault> {
        Err(Fault::Other("mapping copies nothing".to_owned()))
    }
}
