//! Daemons in processes of their own, for benchmarks that watch them from outside.

use rustix::process::{Pid, Signal, kill_process};
use std::env;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use weightd_blocking::request::request;
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{DaemonStatus, GetState, GetStatus};
use weightd_socket::path::list;

/// Between two looks.
const CALM: Duration = Duration::from_millis(50);
/// Longer than any answer takes.
pub const PATIENCE: Span = Span::secs(30);

/// Says how these times are spread.
pub fn say(what: &str, mut times: Vec<Duration>) {
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
pub struct Site {
    pub bin: PathBuf,
    pub dir: PathBuf,
    pub model: PathBuf,
    pub daemons: usize,
    /// What else `weightd preload` is told.
    pub more: Vec<String>,
}

pub struct Daemon {
    pub socket: PathBuf,
    pub status: DaemonStatus,
}

pub struct Launcher(Child);

impl Site {
    /// A launcher that is ready, and what that took.
    pub fn preload(&self) -> (Launcher, Duration) {
        let log = self.dir.with_extension("log");
        let start = Instant::now();
        let mut child = Command::new(&self.bin)
            .args(["preload", "--device", "cpu", "--model"])
            .arg(&self.model)
            .arg("--socket-dir")
            .arg(&self.dir)
            .arg(format!("--data-parallel-size={}", self.daemons))
            .args(&self.more)
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
    pub fn settled(&self) -> Vec<Daemon> {
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
    pub fn get_state(&self) -> GetState {
        GetState {
            key: self.status.info.key.clone(),
            is_reload: false,
        }
    }
}

impl Launcher {
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    pub fn kill(&mut self) {
        self.0.kill().expect("the launcher lives");
        self.0.wait().expect("the launcher is ours");
    }
}

/// It ends in order, and with it its server.
impl Drop for Launcher {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw);
            kill_process(pid.expect("a process id"), Signal::TERM).expect("the launcher lives");
            self.0.wait().expect("the launcher is ours");
        }
    }
}

pub fn status(socket: &Path) -> DaemonStatus {
    match request(socket, GetStatus {}, PATIENCE) {
        Ok(Message::DaemonStatus(status)) => status,
        other => panic!("{other:?}"),
    }
}

pub fn weightd() -> PathBuf {
    let beside = || {
        let ours = env::current_exe().expect("this program");
        ours.ancestors().nth(2).expect("target/release").join("weightd")
    };
    env::var_os("WEIGHTD").map_or_else(beside, PathBuf::from)
}

/// A checkpoint of `count` tensors of `bytes` each.
pub fn write_checkpoint(dir: &Path, count: usize, bytes: usize) -> PathBuf {
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

pub fn load_average() -> String {
    let averages = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    averages.split(' ').take(3).collect::<Vec<_>>().join(" ")
}
