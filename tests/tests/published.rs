//! A launcher in this process, a server and a publisher in others: what one publishes, others map.
//!
//! The ignored tests are the bodies of the other processes, and do nothing when run by themselves.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use weightd_blocking::Clock;
use weightd_blocking::Loaded;
use weightd_blocking::channel::Channel;
use weightd_blocking::driver::Driver;
use weightd_blocking::request::{RequestError, request};
use weightd_blocking::serve::{ServerProcess, serve};
use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{DeviceUuid, Dtype, HandleKind, Manifest, Role};
use weightd_core::machine::{
    AskError, AttachOptions, HandoverEvent, Held, Limits, Origin, Vault, VaultEvent,
};
use weightd_core::peer::Peer;
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{
    Confinement, ContentInfo, DaemonInfo, ErrorCode, Expects, GetStatus, Publish, RegionInfo, Stop,
};
use weightd_gpu::Device;
use weightd_socket::connect::{connect, pair};
use weightd_socket::credentials::our_uid;
use weightd_socket::listen::Pending;
use weightd_socket::lock::Lock;
use weightd_socket::path::{control_path, socket_path};
use weightd_tests::{key, loader};

/// The path of the control socket, for a child.
const CONTROL: &str = "WEIGHTD_TEST_CONTROL";

/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The sizes of the two regions, in bytes.
const BYTES: [u64; 2] = [4096, 512];

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

/// A launcher's part in this process, with a server of its own, and a publisher that has published
/// to the first daemon.
struct Node {
    driver: Driver<Vault<OwnedFd>>,
    names: Vec<(Lock, Pending)>,
    server: Process,
    _dir: TempDir,
}

impl Node {
    fn start(daemons: u32) -> Node {
        let dir = tempfile::tempdir().unwrap();
        let names: Vec<_> = (0..daemons).map(|daemon| name(dir.path(), daemon)).collect();
        let held = (0..).zip(&names).map(|(daemon, name)| held(daemon, name));
        let vault = Vault::new(std::process::id(), 7, held);
        let (server, control) = Process::server(dir.path());
        let (clock, mut driver) = (Clock::start(), Driver::new(vault).unwrap());
        let (connection, peer) = connect(&control).unwrap();
        driver.add(clock.now(), connection, Origin::Server, peer).unwrap();
        let (ours, theirs) = pair().unwrap();
        let publisher = Process::start("publisher_body", &control, theirs);
        let (pid, uid) = (publisher.0.id(), our_uid().unwrap());
        driver
            .add(clock.now(), ours, Origin::Loader, Peer { pid, uid })
            .unwrap();
        turn_until_armed_with_the_first(&mut driver, &clock);
        Node {
            driver,
            names,
            server,
            _dir: dir,
        }
    }
}

fn turn_until_armed_with_the_first(driver: &mut Driver<Vault<OwnedFd>>, clock: &Clock) {
    let mut stored = false;
    loop {
        let turn = driver.turn(clock.now()).unwrap();
        for event in turn.events {
            match event {
                VaultEvent::Stored { daemon: 0, .. } => stored = true,
                VaultEvent::Armed { .. } if stored => return,
                VaultEvent::LoadFailed { why } | VaultEvent::ServerGone { why } => panic!("{why}"),
                _ => {}
            }
        }
        driver.wait(clock.until(turn.wake_at)).unwrap();
    }
}

fn name(dir: &Path, daemon: u32) -> (Lock, Pending) {
    let device = Device::host(daemon).uuid();
    let lock = Lock::acquire(&socket_path(dir, &device, None, None, Role::Target).unwrap()).unwrap();
    let pending = Pending::bind(&lock).unwrap();
    (lock, pending)
}

fn held(daemon: u32, (lock, pending): &(Lock, Pending)) -> Held<OwnedFd> {
    Held {
        info: DaemonInfo {
            socket: lock.socket().display().to_string(),
            global_rank: daemon,
            device_uuid: Device::host(daemon).uuid(),
            no_release: false,
            publish: None,
            key: key(),
        },
        lock: lock.as_fd().try_clone_to_owned().unwrap(),
        listener: pending.as_fd().try_clone_to_owned().unwrap(),
    }
}

#[test]
fn a_server_ends_when_its_launcher_dies_before_everything_was_published() {
    let mut node = Node::start(2);
    drop(node.driver);
    assert!(node.server.end().success());
}

#[test]
fn a_server_that_waits_for_its_launcher_does_not_stop_for_a_passer_by() {
    let dir = tempfile::tempdir().unwrap();
    let (_server, control) = Process::server(dir.path());
    match request(&control, Stop {}, Span::secs(60)) {
        Err(RequestError::Ask {
            error: AskError::Failed { code, .. },
            ..
        }) => {
            assert_eq!(code, ErrorCode::Busy);
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        request(&control, GetStatus {}, Span::secs(60)),
        Ok(Message::ServerStatus(status)) if status.launcher_pid == 0 && status.daemons == 0
    ));
}

#[test]
fn content_of_every_kind_arrives_whole_in_another_process() {
    let mut node = Node::start(1);
    let (lock, pending) = node.names.remove(0);
    pending.publish(&lock).unwrap();
    let (socket, device) = (lock.socket(), Device::host(0).uuid());
    let uid = our_uid().unwrap();

    let attached = loader(socket, AttachOptions::new(uid), &key()).attach().unwrap();
    let generation = attached.generation().unwrap();
    assert_eq!((generation.epoch, generation.number), (7, 1));
    assert!(
        matches!(attached, Loaded::Mapped { lease: Some(_), .. }),
        "{attached:?}"
    );
    let (weights, expected) = (attached.model(), manifest(device));
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
        confinement: Confinement::default(),
    };
    let (never, _other_end) = pair().unwrap();
    serve(process, never, |_, _| {}).unwrap();
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
        checksums: false,
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
        matches!(events[..], [HandoverEvent::Published { daemon: 0, .. }]),
        "{events:?}"
    );
}

fn stdin() -> OwnedFd {
    std::io::stdin().as_fd().try_clone_to_owned().unwrap()
}

/// A process that runs an ignored test of this file; killed when dropped.
struct Process(Child);

impl Process {
    /// A server behind a control socket, and that socket's path.
    fn server(dir: &Path) -> (Process, PathBuf) {
        let control = control_path(dir, 1).unwrap();
        let lock = Lock::acquire(&control).unwrap();
        let listener = Pending::bind(&lock).unwrap().publish(&lock).unwrap();
        (Process::start("server_body", &control, listener), control)
    }

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

impl Process {
    /// How it ends by itself.
    fn end(&mut self) -> ExitStatus {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "it does not end");
            sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
