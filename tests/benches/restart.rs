//! How long a daemon is away when its server or its launcher is killed, and what a client sees of that,
//! beside a fresh `weightd preload` of the same checkpoint from the page cache. On host memory:
//!
//! `cargo build --release -p weightd && cargo bench -p weightd-tests --bench restart`
//!
//! WEIGHTD names the binary where it is another one. Each kill is an event of its own, of which the slowest
//! matter, so this is no criterion benchmark.

#[allow(dead_code)] // The other benchmarks use the rest.
mod launched;

use launched::{Daemon, PATIENCE, Site, load_average, say, status, weightd, write_checkpoint};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};
use weightd_blocking::request::{RequestError, request};
use weightd_core::machine::AskError;
use weightd_core::wire::Message;
use weightd_socket::connect::{ConnectError, connect};

const KILLS: usize = 50;
const PRELOADS: usize = 20;
/// Between two kills: a server that dies before it was armed is started after a pause.
const CALM: Duration = Duration::from_millis(50);

fn main() {
    if !weightd().exists() {
        println!("restart: not measured, since there is no {}", weightd().display());
        return;
    }
    println!("load average {}", load_average());
    let temp = tempfile::tempdir().expect("a directory");
    let few = write_checkpoint(&temp.path().join("few"), 195, 5 << 20);
    let many = write_checkpoint(&temp.path().join("many"), 5_000, 64 << 10);
    let small = write_checkpoint(&temp.path().join("small"), 5_000, 512);
    // Until then the times of the files are not believed, and loading digests them first.
    sleep(Duration::from_secs(5));
    for (name, model, daemons) in [
        ("195 tensors, 1.0 GB", &few, 1),
        ("5,000 tensors, 0.33 GB", &many, 1),
        ("64 daemons of 5,000 tensors, 2.6 MB each", &small, 64),
    ] {
        println!("\n{name}");
        let site = Site {
            bin: weightd(),
            dir: model.with_extension("sockets"),
            model: model.clone(),
            daemons,
            more: Vec::new(),
        };
        measure(&site);
    }
    println!("\nload average {}", load_average());
}

fn measure(site: &Site) {
    // The first one also fills the page cache.
    drop(site.preload());
    let mut fresh = Vec::new();
    for _ in 0..PRELOADS {
        let (launcher, took) = site.preload();
        fresh.push(took);
        drop(launcher);
    }
    say("fresh preload until READY", fresh);

    let (mut launcher, _) = site.preload();
    let daemons = site.settled();
    let times = |kill: fn(&[Daemon]) -> [Duration; 2]| (0..KILLS).map(|_| kill(&daemons)).collect();
    say_restarts("nobody killed", times(kill_nobody));
    say_restarts("server killed", times(kill_server));
    say_restarts(
        "nobody killed, beside clients",
        beside_clients(&daemons, || times(kill_nobody)).0,
    );
    let (restarts, seen) = beside_clients(&daemons, || times(kill_server));
    say_restarts("server killed, beside clients", restarts);
    seen.say();

    let (adoptions, seen) = beside_clients(&daemons, || {
        let mut adoptions = Vec::new();
        for _ in 0..PRELOADS {
            let start = Instant::now();
            launcher.kill();
            let (next, _) = site.preload();
            adoptions.push(start.elapsed());
            launcher = next;
            sleep(CALM);
        }
        adoptions
    });
    say(
        "launcher killed until the next is READY, beside clients",
        adoptions,
    );
    seen.say();
    drop(launcher);
}

/// Kills the server; the time until the first daemon has answered a get_state, and until all have.
fn kill_server(daemons: &[Daemon]) -> [Duration; 2] {
    sleep(CALM);
    let server = i32::try_from(status(&daemons[0].socket).pid).expect("a process id");
    let server = Pid::from_raw(server).expect("a process id");
    let server = pidfd_open(server, PidfdFlags::empty()).expect("the server lives");
    let start = Instant::now();
    pidfd_send_signal(&server, Signal::KILL).expect("the server is ours");
    // Whoever is answered after its end is answered by the next one.
    poll(&mut [PollFd::new(&server, PollFlags::IN)], None).expect("its end");
    ask_all(daemons, start)
}

/// The same where nobody is killed.
fn kill_nobody(daemons: &[Daemon]) -> [Duration; 2] {
    sleep(CALM);
    ask_all(daemons, Instant::now())
}

fn ask_all(daemons: &[Daemon], start: Instant) -> [Duration; 2] {
    let mut first = None;
    for daemon in daemons {
        request(&daemon.socket, daemon.get_state(), PATIENCE).expect("an answer");
        first.get_or_insert(start.elapsed());
    }
    [first.expect("a daemon"), start.elapsed()]
}

/// What clients saw while others were killed.
#[derive(Default)]
struct Seen {
    connects: Vec<Duration>,
    answers: Vec<Duration>,
    refused: usize,
    /// Connections that a dying server took along: asked again, as an engine does.
    broken: usize,
}

/// Runs `kills` beside a client that asks the first daemon again and again, and one that connects to it
/// every 0.2 ms.
fn beside_clients<T>(daemons: &[Daemon], kills: impl FnOnce() -> T) -> (T, Seen) {
    let (daemon, over) = (&daemons[0], AtomicBool::new(false));
    let is_over = || over.load(Ordering::Relaxed);
    thread::scope(|scope| {
        let connects = scope.spawn(|| {
            let (mut connects, mut refused) = (Vec::new(), 0);
            while !is_over() {
                let start = Instant::now();
                match connect(&daemon.socket) {
                    Ok(_) => connects.push(start.elapsed()),
                    Err(ConnectError::Absent { .. } | ConnectError::Busy { .. }) => refused += 1,
                    Err(error) => panic!("{error}"),
                }
                sleep(Duration::from_micros(200));
            }
            (connects, refused)
        });
        let asks = scope.spawn(|| {
            let mut seen = Seen::default();
            while !is_over() {
                let start = Instant::now();
                loop {
                    match request(&daemon.socket, daemon.get_state(), PATIENCE) {
                        Ok(Message::State(_)) => break seen.answers.push(start.elapsed()),
                        Err(RequestError::Connect(_)) => seen.refused += 1,
                        Err(RequestError::Ask {
                            error: AskError::Broken(_),
                            ..
                        }) => seen.broken += 1,
                        other => panic!("{other:?}"),
                    }
                }
            }
            seen
        });
        let killed = kills();
        over.store(true, Ordering::Relaxed);
        let (connects, refused) = connects.join().expect("the client that connects");
        let mut seen = asks.join().expect("the client that asks");
        seen.connects = connects;
        seen.refused += refused;
        (killed, seen)
    })
}

impl Seen {
    fn say(self) {
        let (refused, broken) = (self.refused, self.broken);
        say("  get_state meanwhile", self.answers);
        say("  connect meanwhile", self.connects);
        println!("  connects refused: {refused}; connections that ended with the server: {broken}");
    }
}

fn say_restarts(what: &str, restarts: Vec<[Duration; 2]>) {
    let (first, all): (Vec<_>, Vec<_>) = restarts.into_iter().map(|[first, all]| (first, all)).unzip();
    say(&format!("{what}, until the first daemon answers"), first);
    say(&format!("{what}, until all do"), all);
}
