//! Content that is served from this process: a vault and a server, each in a thread of its own.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;
use tempfile::TempDir;
use weightd_blocking::Clock;
use weightd_blocking::channel::Channel;
use weightd_blocking::driver::Driver;
use weightd_blocking::serve::{ServerProcess, serve};
use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{Dtype, Key, Manifest, Role};
use weightd_core::machine::{HandoverEvent, Held, Limits, Origin, Vault};
use weightd_core::peer::Peer;
use weightd_core::wire::message::{ContentInfo, DaemonInfo, Expects, Publish, RegionInfo};
use weightd_gpu::Device;
use weightd_socket::connect::{connect, pair};
use weightd_socket::credentials::our_uid;
use weightd_socket::listen::Pending;
use weightd_socket::lock::Lock;
use weightd_socket::path::{control_path, socket_path};

/// A daemon with content, until the process ends.
#[derive(Debug)]
pub struct Resident {
    /// The daemon's socket.
    pub socket: PathBuf,
    /// The key that its content has.
    pub key: Key,
    _dir: TempDir,
    _lock: Lock,
}

impl Resident {
    /// Serves `tensors` on `device`, all in one region whose bytes are zero.
    ///
    /// # Panics
    /// When any part of it fails.
    pub fn serve(device: &Device, key: &Key, tensors: &[(String, Vec<u64>)]) -> Resident {
        let dir = tempfile::tempdir().expect("a directory");
        let socket = socket_path(dir.path(), &device.uuid(), None, None, Role::Target).expect("a path");
        let lock = Lock::acquire(&socket).expect("the lock");
        let pending = Pending::bind(&lock).expect("a socket");
        let info = DaemonInfo {
            socket: socket.display().to_string(),
            global_rank: 0,
            device_uuid: device.uuid(),
            no_release: false,
            publish: None,
            key: key.clone(),
        };
        let held = Held {
            info,
            lock: duplicate(&lock),
            listener: duplicate(&pending),
        };
        let control = start_server(dir.path());
        let mut channel = start_vault(held, &control);
        publish(&mut channel, device, key, tensors);
        pending.publish(&lock).expect("the name");
        Resident {
            socket,
            key: key.clone(),
            _dir: dir,
            _lock: lock,
        }
    }
}

fn duplicate(descriptor: impl AsFd) -> OwnedFd {
    descriptor.as_fd().try_clone_to_owned().expect("a descriptor")
}

fn start_server(dir: &Path) -> PathBuf {
    let control = control_path(dir, 1).expect("a path");
    let lock = Lock::acquire(&control).expect("the control lock");
    let listener = Pending::bind(&lock)
        .expect("a socket")
        .publish(&lock)
        .expect("its name");
    let path = control.clone();
    thread::spawn(move || {
        let (never, _open) = pair().expect("a pair of sockets");
        let process = ServerProcess {
            control: listener,
            control_path: &path,
            version: "bench",
            limits: Limits::default(),
        };
        serve(process, never, |_, _| {}).expect("the server serves");
        drop(lock);
    });
    control
}

fn start_vault(held: Held<OwnedFd>, control: &Path) -> Channel {
    let (ours, theirs) = pair().expect("a pair of sockets");
    let (server, peer) = connect(control).expect("the control socket");
    let uid = our_uid().expect("a user");
    thread::spawn(move || {
        let clock = Clock::start();
        let pid = std::process::id();
        let mut driver = Driver::new(Vault::new(pid, 1, [held])).expect("a driver");
        driver
            .add(clock.now(), server, Origin::Server, peer)
            .expect("the server");
        driver
            .add(clock.now(), theirs, Origin::Loader, Peer { pid, uid })
            .expect("the loader");
        loop {
            let turn = driver.turn(clock.now()).expect("the vault turns");
            driver.wait(clock.until(turn.wake_at)).expect("the vault waits");
        }
    });
    Channel::new(ours).expect("a channel")
}

fn publish(channel: &mut Channel, device: &Device, key: &Key, tensors: &[(String, Vec<u64>)]) {
    let (publication, descriptors) = publication(device, key, tensors);
    channel.machine_mut().publish(publication, descriptors);
    let events = channel.settle().expect("an answer");
    assert!(
        matches!(events[..], [HandoverEvent::Published { .. }]),
        "{events:?}"
    );
}

/// `tensors` (bf16) in one region of `device` whose bytes are zero, as a loader hands them over.
///
/// # Panics
/// When the device has no room.
pub fn publication(device: &Device, key: &Key, tensors: &[(String, Vec<u64>)]) -> (Publish, Vec<OwnedFd>) {
    let bytes = |shape: &[u64]| shape.iter().product::<u64>() * 2;
    let total: u64 = tensors
        .iter()
        .map(|(_, shape)| bytes(shape).next_multiple_of(256))
        .sum();
    let export = device
        .allocate(total)
        .expect("a region")
        .export()
        .expect("its descriptor");
    let mut builder = ManifestBuilder::new();
    let region = Region {
        handle: export.handle,
        bytes: total,
        device: device.uuid(),
        legacy: None,
    };
    let region = builder.region(region);
    let mut offset = 0;
    for (name, shape) in tensors {
        let kind = TensorKind::Parameter;
        let spec = TensorSpec {
            kind,
            persistent: true,
            dtype: Dtype::BF16,
            shape,
            strides: None,
            region,
            offset,
        };
        builder.tensor(name, spec);
        offset += bytes(shape).next_multiple_of(256);
    }
    let manifest: Manifest = builder.finish().expect("a manifest");
    let encoded = manifest.encode();
    let content = ContentInfo {
        manifest_bytes: encoded.len() as u64,
        regions: vec![RegionInfo {
            handle: export.handle,
            bytes: total,
        }],
        tensors: manifest.tensors().len() as u32,
        aliases: 0,
    };
    let sealed = weightd_gpu::sealed(&encoded).expect("a sealed manifest");
    let publication = Publish {
        daemon: 0,
        generation: None,
        expects: Expects::Empty,
        key: key.clone(),
        content,
    };
    (publication, vec![sealed, export.fd])
}
