//! How long a daemon is away when its server or its launcher is killed, and what a client sees of that,
//! beside a fresh `weightd preload` of the same checkpoint from the page cache. On host memory:
//!
//! `cargo build --release -p weightd && cargo bench -p weightd-tests --bench restart`
//!
//! WEIGHTD names the binary where it is another one. Each kill is an event of its own, of which the slowest
//! matter, so this is no criterion benchmark.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};
use std::env;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};
use weightd_blocking::request::{RequestError, request};
use weightd_core::machine::AskError;
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{DaemonStatus, GetState, GetStatus};
use weightd_socket::connect::{ConnectError, connect};
use weightd_socket::path::list;

const KILLS: usize = 50;
const PRELOADS: usize = 20;
/// Between two kills: a server that dies before it was armed is started after a pause.
const CALM: Duration = Duration::from_millis(50);
const PATIENCE: Span = Span::secs(30);

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
            dir: model.with_extension("sockets"),
            model: model.clone(),
            daemons,
        };
        measure(&site);
    }
    println!("\nload average {}", load_average());
}

fn measure(site: &Site) {
    // The first one also fills the page cache.
    site.preload().0.end();
    let mut fresh = Vec::new();
    for _ in 0..PRELOADS {
        let (launcher, took) = site.preload();
        fresh.push(took);
        launcher.end();
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
    launcher.end();
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

fn say(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() * percent).div_ceil(100) - 1].as_secs_f64() * 1e3;
    println!(
        "{what}: p50 {:.2} ms, p95 {:.2} ms, max {:.2} ms ({} times)",
        at(50),
        at(95),
        at(100),
        times.len()
    );
}

/// Where a model is served.
struct Site {
    dir: PathBuf,
    model: PathBuf,
    daemons: usize,
}

struct Daemon {
    socket: PathBuf,
    status: DaemonStatus,
}

struct Launcher(Child);

impl Site {
    /// A launcher that is ready, and what that took.
    fn preload(&self) -> (Launcher, Duration) {
        let log = self.dir.with_extension("log");
        let start = Instant::now();
        let mut child = Command::new(weightd())
            .args(["preload", "--device", "cpu", "--model"])
            .arg(&self.model)
            .arg("--socket-dir")
            .arg(&self.dir)
            .arg(format!("--data-parallel-size={}", self.daemons))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).expect("a log"))
            .spawn()
            .expect("weightd starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("it is piped");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        let took = start.elapsed();
        let said = || fs::read_to_string(&log).unwrap_or_default();
        assert!(line.starts_with("READY "), "{line:?}, {}", said());
        (Launcher(child), took)
    }

    /// Every daemon, once no loader works any more.
    fn settled(&self) -> Vec<Daemon> {
        let daemon = |socket: PathBuf| Daemon {
            status: status(&socket),
            socket,
        };
        loop {
            let sockets = list(&self.dir).expect("the socket directory");
            let daemons: Vec<Daemon> = sockets.into_iter().map(daemon).collect();
            let known = |daemon: &Daemon| daemon.status.info.key.checkpoint.digest.is_some();
            if daemons.len() == self.daemons && daemons.iter().all(known) {
                return daemons;
            }
            sleep(CALM);
        }
    }
}

impl Daemon {
    fn get_state(&self) -> GetState {
        GetState {
            key: self.status.info.key.clone(),
            is_reload: false,
        }
    }
}

impl Launcher {
    fn kill(&mut self) {
        self.0.kill().expect("the launcher lives");
        self.0.wait().expect("the launcher is ours");
    }

    fn end(mut self) {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process id"), Signal::TERM).expect("the launcher lives");
        self.0.wait().expect("the launcher is ours");
    }
}

fn status(socket: &Path) -> DaemonStatus {
    match request(socket, GetStatus {}, PATIENCE) {
        Ok(Message::DaemonStatus(status)) => status,
        other => panic!("{other:?}"),
    }
}

fn weightd() -> PathBuf {
    let beside = || {
        let ours = env::current_exe().expect("this program");
        ours.ancestors().nth(2).expect("target/release").join("weightd")
    };
    env::var_os("WEIGHTD").map_or_else(beside, PathBuf::from)
}

/// A checkpoint of `count` tensors of `bytes` each.
fn write_checkpoint(dir: &Path, count: usize, bytes: usize) -> PathBuf {
    fs::create_dir(dir).expect("a directory");
    let config = r#"{"architectures": ["PlainModel"], "model_type": "plain"}"#;
    fs::write(dir.join("config.json"), config).expect("config.json");
    let entry = |number: usize| {
        let (shape, start) = (bytes / 2, number * bytes);
        format!(
            r#""model.layers.{number}.weight":{{"dtype":"BF16","shape":[{shape}],"data_offsets":[{start},{}]}}"#,
            start + bytes
        )
    };
    let mut header = format!("{{{}}}", (0..count).map(entry).collect::<Vec<_>>().join(","));
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut file = File::create(dir.join("model.safetensors")).expect("model.safetensors");
    file.write_all(&(header.len() as u64).to_le_bytes())
        .expect("room");
    file.write_all(header.as_bytes()).expect("room");
    let tensor: Vec<u8> = (0..bytes).map(|index| (index * 31 % 251) as u8).collect();
    for _ in 0..count {
        file.write_all(&tensor).expect("room");
    }
    file.sync_all().expect("room");
    dir.to_owned()
}

fn load_average() -> String {
    let averages = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    averages.split(' ').take(3).collect::<Vec<_>>().join(" ")
}
