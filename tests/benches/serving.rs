//! What an engine waits for: get_state through a real socket, and a whole attach, on host memory.
//! Server, vault and engine share this process's cores.

use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use weightd_blocking::Clock;
use weightd_blocking::Loaded;
use weightd_blocking::channel::Channel;
use weightd_blocking::driver::Driver;
use weightd_blocking::request::request;
use weightd_core::machine::{AttachOptions, Held, Limits, Origin, Server, Vault, VaultEvent};
use weightd_core::peer::Peer;
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{DaemonInfo, GetState};
use weightd_gpu::Device;
use weightd_gpu::Weights;
use weightd_socket::connect::pair;
use weightd_socket::credentials::our_uid;
use weightd_socket::listen::Pending;
use weightd_socket::lock::Lock;
use weightd_socket::message::{receive, send};
use weightd_tests::{Resident, key, loader, publication, shapes};

/// Connect, ask, receive the descriptors of manifest and region, close.
fn get_state(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("get_state");
    for (number, tensors) in [10, 100_000].into_iter().enumerate() {
        let device = Device::host(number as u32);
        let resident = Resident::serve(&device, &key(), &shapes::many(tensors, &[128]));
        group.bench_function(format!("{tensors} tensors"), |bencher| {
            bencher.iter(|| {
                let ask = GetState {
                    key: resident.key.clone(),
                    is_reload: false,
                };
                black_box(request(&resident.socket, ask, Span::secs(5)).expect("an answer"))
            });
        });
    }
    group.finish();
}

/// What the server itself spends on a get_state: its turn, from a request that has arrived to the
/// descriptors that have left.
fn get_state_in_the_server(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("get_state, the server's own time");
    for tensors in [10, 100_000] {
        let mut inline = Inline::serve(&shapes::many(tensors, &[128]));
        group.bench_function(format!("{tensors} tensors"), |bencher| {
            bencher.iter_custom(|iterations| (0..iterations).map(|_| inline.answer()).sum());
        });
    }
    group.finish();
}

/// A server and its vault, both turned by this thread.
struct Inline {
    clock: Clock,
    server: Driver<Server<OwnedFd>>,
    _vault: Driver<Vault<OwnedFd>>,
    request: Vec<u8>,
    peer: Peer,
}

impl Inline {
    fn serve(tensors: &[(String, Vec<u64>)]) -> Inline {
        let (clock, device, uid) = (Clock::start(), Device::host(90), our_uid().expect("a user"));
        let peer = Peer {
            pid: std::process::id(),
            uid,
        };
        let server = Server::new(clock.now(), "bench", peer.pid, uid, Limits::default());
        let mut server = Driver::new(server).expect("a driver");
        let info = DaemonInfo {
            socket: String::new(),
            global_rank: 0,
            device_uuid: device.uuid(),
            no_release: false,
            publish: None,
            key: key(),
        };
        let dir = tempfile::tempdir().expect("a directory");
        let lock = Lock::acquire(&dir.path().join("weightd.sock")).expect("a lock");
        let listener = Pending::bind(&lock).expect("a socket");
        let duplicate = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().expect("a descriptor");
        let held = Held {
            info,
            lock: duplicate(lock.as_fd()),
            listener: duplicate(listener.as_fd()),
        };
        let mut vault = Driver::new(Vault::new(peer.pid, 1, [held])).expect("a driver");
        let (ours, theirs) = pair().expect("sockets");
        vault
            .add(clock.now(), ours, Origin::Server, peer)
            .expect("the server");
        server
            .add(clock.now(), theirs, Origin::Control, peer)
            .expect("the vault");
        let (ours, theirs) = pair().expect("sockets");
        vault
            .add(clock.now(), ours, Origin::Loader, peer)
            .expect("the loader");
        let mut channel = Channel::new(theirs).expect("a channel");
        let (publication, descriptors) = publication(&device, &key(), tensors);
        channel.machine_mut().publish(publication, descriptors);
        loop {
            channel.turn();
            let armed = vault.turn(clock.now()).expect("the vault turns").events;
            server.turn(clock.now()).expect("the server turns");
            if armed
                .iter()
                .any(|event| matches!(event, VaultEvent::Armed { complete: true }))
            {
                break;
            }
        }
        let request = Message::from(GetState {
            key: key(),
            is_reload: false,
        });
        let request = request.frame(1, 0).expect("a request");
        Inline {
            clock,
            server,
            _vault: vault,
            request,
            peer,
        }
    }

    /// A new client asks; how long the server takes to answer.
    fn answer(&mut self) -> Duration {
        let (client, accepted) = pair().expect("sockets");
        self.server
            .add(self.clock.now(), accepted, Origin::Daemon(0), self.peer)
            .expect("a client");
        send(&client, &self.request, &[]).expect("the request is sent");
        let start = Instant::now();
        self.server.turn(self.clock.now()).expect("the server turns");
        let took = start.elapsed();
        let (mut buffer, mut descriptors) = ([0; 4096], Vec::new());
        let received = receive(&client, &mut buffer, &mut descriptors).expect("the answer is there");
        assert!(
            received.bytes > 20 && descriptors.len() == 2,
            "content: manifest and region"
        );
        drop(client);
        self.server.turn(self.clock.now()).expect("the server turns");
        took
    }
}

/// From before the connect until every name is resolved.
fn attaching(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attach");
    let cases = [(195, 65_536), (5_000, 4_096), (100_000, 256)];
    for (number, (tensors, elements)) in cases.into_iter().enumerate() {
        let device = Device::host(10 + number as u32);
        let listed = shapes::many(tensors, &[elements]);
        let resident = Resident::serve(&device, &key(), &listed);
        group.bench_function(format!("{tensors} tensors"), |bencher| {
            bencher.iter_with_large_drop(|| {
                let attached = attach_once(&resident);
                for (name, _) in &listed {
                    black_box(attached.model().get(name).expect("every name").address());
                }
                attached
            });
        });
    }
    group.finish();
}

fn attach_once(resident: &Resident) -> Loaded<Weights> {
    let options = AttachOptions::new(our_uid().expect("a user"));
    let loader = loader(&resident.socket, options, &resident.key);
    loader.attach().expect("attached")
}

criterion_group!(benches, get_state, get_state_in_the_server, attaching);
criterion_main!(benches);
