//! Content that is served from this process: a vault and a server, each in a thread of its own.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tempfile::TempDir;
use weightd_blocking::Clock;
use weightd_blocking::channel::Channel;
use weightd_blocking::driver::Driver;
use weightd_blocking::serve::{ServerProcess, serve};
use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{Dtype, Generation, Key, Manifest, Role};
use weightd_core::machine::{HandoverEvent, Held, Limits, Origin, Vault, VaultEvent};
use weightd_core::peer::Peer;
use weightd_core::wire::message::{
    Confinement, ContentInfo, DaemonInfo, Expects, Holds, Publish, RegionInfo, Replace,
};
use weightd_gpu::Device;
use weightd_socket::connect::{connect, pair};
use weightd_socket::credentials::our_uid;
use weightd_socket::listen::Pending;
use weightd_socket::lock::Lock;
use weightd_socket::path::{control_path, socket_path};

/// Runs a server until its `signals` become readable.
pub type Serve = fn(ServerProcess<'_>, OwnedFd) -> io::Result<()>;

/// What is served, and by whom.
#[derive(Debug)]
pub struct Residence<'a> {
    /// Where the sockets are.
    pub dir: &'a Path,
    /// The device of the weights.
    pub device: Device,
    /// The daemon's key.
    pub key: Key,
    /// Whether clients may publish, and what gives way to what they do.
    pub publish: Option<Replace>,
    /// Whether releases are refused.
    pub no_release: bool,
    /// What clients may claim.
    pub limits: Limits,
    /// The server.
    pub serve: Serve,
}

/// A daemon, until this is dropped.
pub struct Resident {
    /// The daemon's socket.
    pub socket: PathBuf,
    /// The key that it was defined with.
    pub key: Key,
    serve: Serve,
    limits: Limits,
    server: Option<Server>,
    /// The loader's channel to the vault.
    channel: Channel,
    vault: Launcher,
    lock: Lock,
    /// Until the socket has its name.
    pending: Option<Pending>,
    control: OwnedFd,
    control_lock: Lock,
    _dir: Option<TempDir>,
}

impl Resident {
    /// Serves `tensors` on `device`, all in one region whose bytes are zero.
    ///
    /// # Panics
    /// When any part of it fails.
    pub fn serve(device: &Device, key: &Key, tensors: &[(String, Vec<u64>)]) -> Resident {
        let dir = tempfile::tempdir().expect("a directory");
        let mut resident = Resident::start(Residence {
            dir: dir.path(),
            device: *device,
            key: key.clone(),
            publish: None,
            no_release: false,
            limits: Limits::default(),
            serve: |process, signals| serve(process, signals, |_, _| {}),
        });
        let (publication, descriptors) = publication(device, key, tensors);
        resident.load(publication, descriptors);
        resident._dir = Some(dir);
        resident
    }

    /// A daemon that holds nothing. If clients may publish, its socket has its name already.
    ///
    /// # Panics
    /// When any part of it fails.
    pub fn start(residence: Residence<'_>) -> Resident {
        let Residence { dir, device, key, .. } = residence;
        let socket = socket_path(dir, &device.uuid(), None, None, Role::Target).expect("a path");
        let lock = Lock::acquire(&socket).expect("the lock");
        let pending = Pending::bind(&lock).expect("a socket");
        let info = DaemonInfo {
            socket: socket.display().to_string(),
            global_rank: 0,
            device_uuid: device.uuid(),
            no_release: residence.no_release,
            publish: residence.publish,
            key: key.clone(),
        };
        let held = Held {
            info,
            lock: duplicate(&lock),
            listener: duplicate(&pending),
        };
        let (vault, channel) = Launcher::start(held);
        let control = control_path(dir, 1).expect("a path");
        let control_lock = Lock::acquire(&control).expect("the control lock");
        let listener = Pending::bind(&control_lock).expect("a socket");
        let mut resident = Resident {
            socket,
            key,
            serve: residence.serve,
            limits: residence.limits,
            server: None,
            channel,
            vault,
            lock,
            pending: Some(pending),
            control: listener.publish(&control_lock).expect("its name"),
            control_lock,
            _dir: None,
        };
        resident.start_server();
        if residence.publish.is_some() {
            resident.give_name();
        }
        resident
    }

    /// Starts the server, or another one, and waits until it serves all that the vault holds.
    ///
    /// # Panics
    /// When it does not.
    pub fn start_server(&mut self) {
        let path = self.control_lock.socket();
        let listener = duplicate(&self.control);
        self.server = Some(Server::start(self.serve, listener, path, self.limits));
        let (server, peer) = connect(path).expect("the control socket");
        self.vault.with(move |vault| {
            let now = vault.clock.now();
            let added = vault.driver.add(now, server, Origin::Server, peer);
            added.expect("the server");
        });
        self.wait_until_armed();
    }

    /// The server dies. Who connects meanwhile waits for the next.
    pub fn kill_server(&mut self) {
        self.server = None;
    }

    /// Has a loader hand over content in place of what there is, and gives the socket its name.
    ///
    /// # Panics
    /// When any part of it fails.
    pub fn load(&mut self, publication: Publish, descriptors: Vec<OwnedFd>) -> Generation {
        let expects = match self.holds() {
            Holds::Content(generation) => Expects::Generation(generation),
            _ => Expects::Empty,
        };
        let publication = Publish {
            expects,
            ..publication
        };
        self.channel.machine_mut().publish(publication, descriptors);
        let events = self.channel.settle().expect("an answer");
        let [HandoverEvent::Published { generation, .. }] = events[..] else {
            panic!("{events:?}")
        };
        if self.server.is_some() {
            self.wait_until_armed();
        }
        self.give_name();
        generation
    }

    /// The loader, to say something; the next [`settle`](Channel::settle) sends it.
    pub fn loader(&mut self) -> &mut Channel {
        &mut self.channel
    }

    /// What the vault holds.
    pub fn holds(&self) -> Holds {
        self.vault
            .with(|vault| vault.driver.machine().holds(0).expect("a daemon"))
    }

    /// The device loses what the vault holds.
    pub fn lose(&self) {
        self.vault.with(|vault| {
            let machine = vault.driver.machine_mut();
            if let Some(Holds::Content(generation)) = machine.holds(0) {
                machine.lost(0, generation);
            }
        });
    }

    /// What the vault has told its launcher so far.
    pub fn events(&self) -> Vec<VaultEvent> {
        self.vault.with(|vault| vault.events.clone())
    }

    fn give_name(&mut self) {
        if let Some(pending) = self.pending.take() {
            pending.publish(&self.lock).expect("the name");
        }
    }

    fn wait_until_armed(&self) {
        for _ in 0..60_000 {
            if self.vault.with(|vault| vault.driver.machine().is_armed()) {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!("no server takes what the vault holds: {:?}", self.events());
    }
}

impl fmt::Debug for Resident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resident")
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

fn duplicate(descriptor: impl AsFd) -> OwnedFd {
    descriptor.as_fd().try_clone_to_owned().expect("a descriptor")
}

/// A server in a thread. It ends, and all that it has is closed, when this is dropped.
struct Server {
    /// The other end of what it takes for signals.
    signals: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(serve: Serve, control: OwnedFd, path: &Path, limits: Limits) -> Server {
        let (ours, theirs) = pair().expect("a pair of sockets");
        let path = path.to_owned();
        let thread = thread::spawn(move || {
            let process = ServerProcess {
                control,
                control_path: &path,
                version: "test",
                limits,
                confinement: Confinement::default(),
            };
            serve(process, theirs).expect("the server serves");
        });
        Server {
            signals: Some(ours),
            thread: Some(thread),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.signals.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "the server fails");
        }
    }
}

/// A vault in a thread, which ends when this is dropped.
struct Launcher {
    requests: Option<Sender<Request>>,
    /// A word on it says that there is a request, or that there will be none.
    wakes: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

type Request = Box<dyn FnOnce(&mut Inside) + Send>;

/// What a vault's thread has.
struct Inside {
    clock: Clock,
    driver: Driver<Vault<OwnedFd>>,
    events: Vec<VaultEvent>,
}

impl Launcher {
    fn start(held: Held<OwnedFd>) -> (Launcher, Channel) {
        let (ours, theirs) = pair().expect("a pair of sockets");
        let (wakes, woken) = pair().expect("a pair of sockets");
        let (requests, incoming) = channel();
        let uid = our_uid().expect("a user");
        let thread = thread::spawn(move || {
            let clock = Clock::start();
            let pid = std::process::id();
            let mut driver = Driver::new(Vault::new(pid, 1, [held])).expect("a driver");
            driver
                .add(clock.now(), theirs, Origin::Loader, Peer { pid, uid })
                .expect("the loader");
            let inside = Inside {
                clock,
                driver,
                events: Vec::new(),
            };
            inside.run(&incoming, &woken);
        });
        let launcher = Launcher {
            requests: Some(requests),
            wakes: Some(wakes),
            thread: Some(thread),
        };
        (launcher, Channel::new(ours).expect("a channel"))
    }

    /// Does this in the vault's thread.
    fn with<T: Send + 'static>(&self, ask: impl FnOnce(&mut Inside) -> T + Send + 'static) -> T {
        let (answers, answer) = channel();
        let request = move |vault: &mut Inside| drop(answers.send(ask(vault)));
        let requests = self.requests.as_ref().expect("it runs until it is dropped");
        requests.send(Box::new(request)).expect("the vault turns");
        let wakes = self.wakes.as_ref().expect("it runs until it is dropped");
        rustix::io::write(wakes, b"!").expect("a word");
        answer.recv().expect("the vault answers")
    }
}

impl Inside {
    fn run(mut self, requests: &Receiver<Request>, woken: &OwnedFd) {
        self.driver.watch(woken).expect("a descriptor");
        loop {
            let turn = self.driver.turn(self.clock.now()).expect("the vault turns");
            self.events.extend(turn.events);
            let _ = rustix::io::read(woken, &mut [0; 64]);
            match requests.try_recv() {
                Ok(request) => {
                    request(&mut self);
                    continue;
                }
                Err(std::sync::mpsc::TryRecvError::Disconnected) => return,
                Err(std::sync::mpsc::TryRecvError::Empty) => {}
            }
            self.driver
                .wait(self.clock.until(turn.wake_at))
                .expect("the vault waits");
        }
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        drop((self.requests.take(), self.wakes.take()));
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking(), "the vault fails");
        }
    }
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
        checksums: false,
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
