//! How each cost grows: with tensors in a daemon, with leases on a server, with daemons on a node. On host memory, the
//! daemons in processes of their own:
//!
//! `cargo build --release -p weightd && cargo bench -p weightd-tests --bench scale -- --svg benches/plots/scale.svg`
//!
//! `--bin DIR` names the directory of `weightd` where it is another one. What is printed as `growth` is the exponent
//! between the last two sizes: 0 where a cost stays the same, 1 where it grows with the size. CPU time of a server is what
//! the kernel says that its threads ran; the rest is seen from outside, on a machine that may have other work.

#[allow(dead_code)] // The other benchmarks use the rest.
mod launched;
mod plot;

use launched::{Daemon, Launcher, PATIENCE, Site, load_average, status, weightd, write_checkpoint};
use plot::{Panel, Series, svg};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};
use weightd_blocking::request::request;
use weightd_core::machine::AttachOptions;
use weightd_core::time::Span;
use weightd_core::wire::frame::HEADER_BYTES;
use weightd_core::wire::message::{GetState, Holds, Message, Watch};
use weightd_socket::credentials::our_uid;
use weightd_tests::loader;

const TENSORS: [usize; 5] = [10, 100, 1_000, 10_000, 100_000];
const LEASES: [usize; 5] = [5, 50, 500, 2_000, 5_000];
const DAEMONS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Repeats of what a table shows the median of.
const REPEATS: usize = 15;
/// Requests of which a server's own time is the mean.
const REQUESTS: u32 = 2_000;
/// Attaches a second that are asked for, and for how long.
const RATE: u32 = 1_000;
const SECONDS: u32 = 5;

fn main() {
    let mut args = std::env::args().skip(1);
    let (mut bin, mut to) = (weightd(), None);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--bin" => bin = PathBuf::from(args.next().expect("a directory")).join("weightd"),
            "--svg" => to = Some(PathBuf::from(args.next().expect("a file"))),
            // What cargo says.
            "--bench" => {}
            other => panic!("scale [--bin DIR] [--svg FILE], not {other}"),
        }
    }
    if !bin.exists() {
        println!("scale: not measured, since there is no {}", bin.display());
        return;
    }
    raise_descriptor_limit();
    println!("load average {}", load_average());
    let temp = tempfile::tempdir().expect("a directory");
    let mut panels = Vec::new();
    with_tensors(&bin, temp.path(), &mut panels);
    with_leases(&bin, temp.path(), &mut panels);
    with_daemons(&bin, temp.path(), &mut panels);
    println!("\nload average {}", load_average());
    if let Some(to) = to {
        // A benchmark runs in its package.
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let to = if root.exists() { root.join(to) } else { to };
        fs::write(&to, svg(&panels)).expect("the plot is written");
    }
}

fn with_tensors(bin: &Path, temp: &Path, panels: &mut Vec<Panel>) {
    let mut table = Table::new(
        "tensors",
        &[
            "READY, ms",
            "attach, ms",
            "get_state, us",
            "of that server, us",
            "server, KiB",
            "launcher, KiB",
        ],
    );
    for tensors in TENSORS {
        let model = write_checkpoint(&temp.join(format!("tensors-{tensors}")), tensors, 512);
        // Until then the times of the files are not believed.
        sleep(Duration::from_secs(3));
        let node = Node::start(bin, &model, 1);
        let (asked, server) = node.get_state();
        let attach = median(|| attach(&node.daemons[0]));
        table.row(
            tensors,
            &[
                node.ready.as_secs_f64() * 1e3,
                attach.as_secs_f64() * 1e3,
                asked,
                server,
                kib(node.server(), "VmRSS:"),
                kib(node.launcher.pid(), "VmRSS:"),
            ],
        );
        if tensors == 1_000 {
            at_rate(&node.daemons[0]);
        }
        drop(node);
    }
    table.print();
    panels.push(table.panel("a daemon with many tensors: time", "", &[0, 1, 2, 3]));
    panels.push(table.panel("a daemon with many tensors: memory", "KiB", &[4, 5]));
}

fn with_leases(bin: &Path, temp: &Path, panels: &mut Vec<Panel>) {
    let model = temp.join("tensors-10");
    let mut table = Table::new(
        "leases",
        &[
            "one more, us",
            "get_state, us",
            "of that server, us",
            "`weightd status`, ms",
            "/metrics, ms",
            "server, KiB",
            "server, descriptors",
        ],
    );
    let node = Node::start(bin, &model, 1);
    let mut leases = Vec::new();
    for count in LEASES {
        let more = count - leases.len();
        let start = Instant::now();
        leases.extend((0..more).map(|_| lease(&node.daemons[0])));
        let took = start.elapsed().as_secs_f64() * 1e6 / more as f64;
        let (asked, server) = node.get_state();
        table.row(
            count,
            &[
                took,
                asked,
                server,
                node.status_ms(),
                node.metrics_ms(),
                kib(node.server(), "VmRSS:"),
                descriptors(node.server()),
            ],
        );
        let held = status(&node.daemons[0].socket).leases;
        assert_eq!(held as usize, count, "every lease is held");
    }
    drop(leases);
    drop(node);
    table.print();
    panels.push(table.panel("a server with many leases: time", "", &[0, 1, 2, 3, 4]));
    panels.push(table.panel("a server with many leases: memory", "", &[5, 6]));
}

fn with_daemons(bin: &Path, temp: &Path, panels: &mut Vec<Panel>) {
    let model = temp.join("tensors-1000");
    let mut table = Table::new(
        "daemons",
        &[
            "READY, ms",
            "get_state, us",
            "of that server, us",
            "`weightd status`, ms",
            "/metrics, ms",
            "server, KiB",
            "launcher, KiB",
            "server, descriptors",
            "launcher, descriptors",
        ],
    );
    for daemons in DAEMONS {
        let ready = median(|| {
            let node = Node::start(bin, &model, daemons);
            let ready = node.ready;
            drop(node);
            ready
        });
        let node = Node::start(bin, &model, daemons);
        let (asked, server) = node.get_state();
        table.row(
            daemons,
            &[
                ready.as_secs_f64() * 1e3,
                asked,
                server,
                node.status_ms(),
                node.metrics_ms(),
                kib(node.server(), "VmRSS:"),
                kib(node.launcher.pid(), "VmRSS:"),
                descriptors(node.server()),
                descriptors(node.launcher.pid()),
            ],
        );
        drop(node);
    }
    table.print();
    panels.push(table.panel("a node with many daemons: time", "", &[0, 1, 2, 3, 4]));
    panels.push(table.panel("a node with many daemons: memory", "", &[5, 6, 7, 8]));
}

/// Attaches at a steady rate, as engines that start whenever they like.
fn at_rate(daemon: &Daemon) {
    let start = Instant::now();
    let pause = Duration::from_secs(1) / RATE;
    let mut took: Vec<Duration> = scope(|scope| {
        let engines = 4;
        let threads: Vec<_> = (0..engines)
            .map(|engine| {
                scope.spawn(move || {
                    let turns = (engine..RATE * SECONDS).step_by(engines as usize);
                    turns
                        .map(|turn| {
                            let due = start + pause * turn;
                            sleep(due.saturating_duration_since(Instant::now()));
                            attach(daemon);
                            due.elapsed()
                        })
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join().expect("attached"));
        joined.flatten().collect()
    });
    let rate = f64::from(RATE * SECONDS) / start.elapsed().as_secs_f64();
    took.sort_unstable();
    let at = |percent: usize| took[(took.len() * percent).div_ceil(100) - 1].as_secs_f64() * 1e3;
    println!(
        "{RATE} attaches a second of 1000 tensors for {SECONDS} s: {rate:.0} a second; from when each was due p50 {:.2} ms, p99 {:.2} ms, max {:.2} ms",
        at(50),
        at(99),
        at(100)
    );
}

/// A launcher with its daemons, which answers for health.
struct Node {
    bin: PathBuf,
    dir: PathBuf,
    launcher: Launcher,
    daemons: Vec<Daemon>,
    ready: Duration,
    port: u16,
}

impl Node {
    fn start(bin: &Path, model: &Path, daemons: usize) -> Node {
        let port = free_port();
        let site = Site {
            bin: bin.to_owned(),
            dir: model.with_extension("sockets"),
            model: model.to_owned(),
            daemons,
            more: vec!["--health-port".to_owned(), port.to_string()],
        };
        let (launcher, ready) = site.preload();
        Node {
            bin: bin.to_owned(),
            launcher,
            daemons: site.settled(),
            dir: site.dir,
            ready,
            port,
        }
    }

    fn server(&self) -> u32 {
        self.daemons[0].status.pid
    }

    /// In microseconds: the median until an answer has come, and the mean that the server ran for it. All daemons are
    /// asked in turn.
    fn get_state(&self) -> (f64, f64) {
        let asks: Vec<(&Path, GetState)> = self
            .daemons
            .iter()
            .map(|daemon| (daemon.socket.as_path(), daemon.get_state()))
            .collect();
        let before = ran(self.server());
        let mut took: Vec<Duration> = asks
            .iter()
            .cycle()
            .take(REQUESTS as usize)
            .map(|(socket, ask)| {
                let start = Instant::now();
                let answer = request(socket, ask.clone(), PATIENCE).expect("an answer");
                assert!(matches!(answer, Message::State(_)), "{answer:?}");
                start.elapsed()
            })
            .collect();
        let ran = (ran(self.server()) - before) / REQUESTS;
        took.sort_unstable();
        (took[took.len() / 2].as_secs_f64() * 1e6, ran.as_secs_f64() * 1e6)
    }

    fn status_ms(&self) -> f64 {
        let took = median(|| {
            let start = Instant::now();
            let mut command = Command::new(&self.bin);
            command.arg("status").arg("--socket-dir").arg(&self.dir);
            let ended = command.stdout(Stdio::null()).status().expect("weightd starts");
            assert!(ended.success());
            start.elapsed()
        });
        took.as_secs_f64() * 1e3
    }

    /// Answers are kept for half a second, which none of these is.
    fn metrics_ms(&self) -> f64 {
        let took = median(|| {
            sleep(Duration::from_millis(600));
            let start = Instant::now();
            let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("a launcher listens");
            let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
            stream.write_all(request).expect("it takes a request");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("an answer");
            let up = answer.lines().filter(|line| line.starts_with("weightd_up"));
            assert_eq!(up.filter(|line| line.ends_with(" 1")).count(), self.daemons.len());
            start.elapsed()
        });
        took.as_secs_f64() * 1e3
    }
}

/// From before the connect until everything is mapped.
fn attach(daemon: &Daemon) -> Duration {
    let options = AttachOptions {
        connect_timeout: Span::secs(60),
        ..AttachOptions::new(our_uid().expect("a user"))
    };
    let loader = loader(&daemon.socket, options, &daemon.status.info.key);
    let start = Instant::now();
    let attached = loader.attach().expect("attached");
    let took = start.elapsed();
    drop(attached);
    took
}

/// A lease on what the daemon serves, until the connection is dropped.
fn lease(daemon: &Daemon) -> UnixStream {
    let Holds::Content(generation) = daemon.status.holds else {
        panic!("a daemon without content");
    };
    let mut stream = UnixStream::connect(&daemon.socket).expect("a daemon listens");
    let message = Message::from(Watch {
        generation: Some(generation),
    });
    let request = message.frame(1, 0).expect("a request");
    stream.write_all(&request).expect("a daemon takes it");
    stream.read_exact(&mut [0; HEADER_BYTES]).expect("an answer");
    stream
}

fn median(mut measure: impl FnMut() -> Duration) -> Duration {
    let mut took: Vec<Duration> = (0..REPEATS).map(|_| measure()).collect();
    took.sort_unstable();
    took[REPEATS / 2]
}

/// How long all threads of a process have run.
fn ran(pid: u32) -> Duration {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the server lives");
    let ran = tasks.map(|task| {
        let stat = fs::read_to_string(task.expect("a thread").path().join("schedstat"));
        let stat = stat.expect("its times");
        stat.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0)
    });
    Duration::from_nanos(ran.sum())
}

fn kib(pid: u32, what: &str) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let line = status.lines().find(|line| line.starts_with(what));
    let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
    number.expect("its memory")
}

/// 0 where only root may count them.
fn descriptors(pid: u32) -> f64 {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0.0, |entries| entries.count() as f64)
}

fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    listener.local_addr().expect("its number").port()
}

/// As `weightd` does: each lease is a descriptor here as well.
fn raise_descriptor_limit() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let all = Rlimit {
        current: maximum,
        maximum,
    };
    setrlimit(Resource::Nofile, all).expect("a limit");
}

/// What was measured for each size.
struct Table {
    size: &'static str,
    columns: Vec<&'static str>,
    rows: Vec<(usize, Vec<f64>)>,
}

impl Table {
    fn new(size: &'static str, columns: &[&'static str]) -> Table {
        println!();
        Table {
            size,
            columns: columns.to_vec(),
            rows: Vec::new(),
        }
    }

    fn row(&mut self, size: usize, values: &[f64]) {
        eprintln!("{} {}: {values:.2?}", size, self.size);
        self.rows.push((size, values.to_vec()));
    }

    fn print(&self) {
        println!("| {} | {} |", self.size, self.columns.join(" | "));
        println!("|---{}|", "|---".repeat(self.columns.len()));
        for (size, values) in &self.rows {
            let values: Vec<String> = values.iter().map(|value| short(*value)).collect();
            println!("| {size} | {} |", values.join(" | "));
        }
        let growth: Vec<String> = (0..self.columns.len())
            .map(|column| format!("{:.2}", self.growth(column)))
            .collect();
        println!("| growth | {} |", growth.join(" | "));
    }

    fn growth(&self, column: usize) -> f64 {
        let [.., (less, before), (more, after)] = self.rows.as_slice() else {
            return 0.0;
        };
        (after[column] / before[column]).ln() / (*more as f64 / *less as f64).ln()
    }

    fn panel(&self, title: &str, unit: &str, columns: &[usize]) -> Panel {
        let series = |column: &usize| Series {
            name: format!("{} (growth {:.2})", self.columns[*column], self.growth(*column)),
            points: self
                .rows
                .iter()
                .map(|(size, values)| (*size as f64, values[*column]))
                .collect(),
        };
        Panel {
            title: title.to_owned(),
            x: self.size.to_owned(),
            y: unit.to_owned(),
            series: columns.iter().map(series).collect(),
        }
    }
}

/// Three digits or all of a whole number.
fn short(value: f64) -> String {
    match value {
        ..10.0 => format!("{value:.2}"),
        ..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}
