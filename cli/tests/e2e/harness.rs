//! What the tests share: a place to serve in, launchers, engines, and the end of both.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use weightd_gpu::Device;

/// Longer than anything takes on a busy machine; a test that waits this long has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// A directory of its own with a socket directory in it. What runs on it ends with it.
pub struct Site {
    root: PathBuf,
    /// None where the site is another process's.
    _temp: Option<TempDir>,
    device: &'static str,
    logs: AtomicU32,
}

/// How a command ended.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A process whose output is read as it comes.
pub struct Running {
    pub child: Child,
    stdout: Receiver<String>,
    stderr: PathBuf,
}

impl Site {
    /// On host memory, also on a machine with GPUs.
    pub fn new() -> Site {
        Site::on("cpu")
    }

    /// On devices of this kind.
    pub fn on(device: &'static str) -> Site {
        let temp = tempfile::tempdir().unwrap();
        Site {
            root: temp.path().to_owned(),
            _temp: Some(temp),
            device,
            logs: AtomicU32::new(0),
        }
    }

    /// That of the process which started this one, by its [`path`](Site::path).
    pub fn at(root: PathBuf, device: &'static str) -> Site {
        Site {
            root,
            _temp: None,
            device,
            logs: AtomicU32::new(0),
        }
    }

    /// The device of each of so many ranks: all share the first one, where it is a GPU.
    pub fn devices(&self, ranks: u32) -> Vec<Device> {
        match self.device {
            "cpu" => (0..ranks).map(Device::host).collect(),
            _ => vec![Device::cuda().unwrap()[0]; ranks as usize],
        }
    }

    /// What a command needs to be told for that.
    pub fn sharing(&self, ranks: u32) -> Vec<String> {
        match self.device {
            "cpu" => Vec::new(),
            _ => vec!["--ranks-per-device".to_owned(), ranks.to_string()],
        }
    }

    /// Room for files of the test.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// The socket directory.
    pub fn dir(&self) -> PathBuf {
        self.root.join("sockets")
    }

    /// `weightd` with these arguments, in this site's socket directory unless they name another.
    pub fn weightd(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weightd"));
        command
            .args(args)
            .args(["--device", self.device])
            .env("WEIGHTD_SOCKET_DIR", self.dir())
            .env("XDG_CACHE_HOME", self.root.join("cache"))
            .env_remove("WEIGHTD_LOG")
            .stdin(Stdio::null());
        command
    }

    /// Runs a command to its end.
    pub fn run(&self, args: &[&str]) -> Ran {
        finish(self.weightd(args))
    }

    /// Runs a command that must succeed, and returns its lines as JSON.
    #[track_caller]
    pub fn json(&self, args: &[&str]) -> Vec<Value> {
        let ran = self.run(args);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.stdout
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// What `weightd status --json` says of each daemon that answered.
    #[track_caller]
    pub fn status(&self) -> Vec<Value> {
        let mut daemons = self.json(&["status", "--json"]);
        daemons.retain(has_answered);
        daemons
    }

    /// The socket of the first daemon.
    #[track_caller]
    pub fn socket(&self) -> PathBuf {
        PathBuf::from(self.status()[0]["socket"].as_str().unwrap())
    }

    /// The generation of each daemon.
    pub fn generations(&self) -> Vec<Value> {
        let status = self.status();
        status.iter().map(|daemon| daemon["generation"].clone()).collect()
    }

    /// `weightd attach` as an engine of this model, in this world.
    pub fn attach(&self, model: &Path, tp: u32, more: &[&str]) -> Ran {
        finish(self.on_model("attach", model, tp, more))
    }

    /// An attach that must be good, down to the bytes.
    #[track_caller]
    pub fn attach_verified(&self, model: &Path, tp: u32) {
        let ran = self.attach(model, tp, &["--all", "--verify"]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }

    /// The same for one rank.
    #[track_caller]
    pub fn attach_verified_rank(&self, model: &Path, tp: u32, rank: u32) {
        let ran = self.attach(model, tp, &["--rank", &rank.to_string(), "--verify"]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }

    /// A command that takes a model.
    pub fn on_model(&self, subcommand: &str, model: &Path, tp: u32, more: &[&str]) -> Command {
        let (model, tp) = (model.to_str().unwrap(), tp.to_string());
        let mut args = vec![subcommand, "--model", model, "--tensor-parallel-size", &tp];
        args.extend(more);
        self.weightd(&args)
    }

    /// Starts a process.
    pub fn start(&self, mut command: Command) -> Running {
        let number = self.logs.fetch_add(1, Ordering::Relaxed);
        let stderr = self.root.join(format!("stderr-{number}"));
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(File::create(&stderr).unwrap())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (send, stdout) = channel();
        thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| send.send(line)));
        Running {
            child,
            stdout,
            stderr,
        }
    }

    /// A launcher, and what it serves, ready.
    #[track_caller]
    pub fn preload(&self, model: &Path, tp: u32, more: &[&str]) -> Running {
        let mut launcher = self.start(self.on_model("preload", model, tp, more));
        launcher.ready();
        launcher
    }

    /// The server of a launcher that was killed, when it has noticed.
    #[track_caller]
    pub fn orphan(&self, model: &Path, tp: u32, more: &[&str]) -> u32 {
        let mut launcher = self.preload(model, tp, more);
        launcher.has_loaded();
        let server = launcher.child("server");
        launcher.kill();
        wait_until("the server has noticed", || {
            let status = self.status();
            status.iter().all(|daemon| daemon["launcher_pid"] == Value::Null)
        });
        server
    }

    /// What `weightd status` and `weightd stop` print where there is none.
    pub fn no_daemons(&self) -> String {
        format!("no daemons in {}\n", self.dir().display())
    }

    /// What lies in the socket directory, but for the lock files that may stay.
    pub fn left(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.dir()) else {
            return Vec::new();
        };
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names
            .filter(|name| !name.ends_with(".sock.lock") || name.starts_with("weightd-control"))
            .collect()
    }

    /// Every living process that was started for this site, by whomever. The environment of ours that keep
    /// their memory to themselves is root's to read; a server is known by its arguments, and the others end with
    /// those that started them.
    pub fn processes(&self) -> Vec<u32> {
        let dir = self.dir().display().to_string();
        let read = |pid: &u32, what: &str| fs::read(format!("/proc/{pid}/{what}")).unwrap_or_default();
        let ours = format!("WEIGHTD_SOCKET_DIR={dir}").into_bytes();
        let is_ours = |pid: &u32| {
            let (environment, arguments) = (read(pid, "environ"), read(pid, "cmdline"));
            let mut variables = environment.split(|byte| *byte == 0);
            let mut arguments = arguments.split(|byte| *byte == 0);
            variables.any(|variable| variable == ours)
                || arguments.any(|argument| argument.starts_with(dir.as_bytes()))
        };
        all_pids().into_iter().filter(is_ours).filter(is_alive).collect()
    }

    /// No socket and no process is left.
    #[track_caller]
    pub fn assert_clean(&self) {
        wait_until("all processes are gone", || self.processes().is_empty());
        assert_eq!(self.left(), [""; 0]);
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if self._temp.is_none() {
            return;
        }
        for pid in self.processes() {
            signal(pid, Signal::KILL);
        }
    }
}

impl Running {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line on stdout; empty at its end.
    #[track_caller]
    pub fn line(&mut self) -> String {
        match self.stdout.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => String::new(),
            Err(RecvTimeoutError::Timeout) => panic!("waited in vain for a line: {}", self.log()),
        }
    }

    /// Waits for READY; fails with what was logged when that does not come.
    #[track_caller]
    pub fn ready(&mut self) -> String {
        let line = self.line();
        assert!(line.starts_with("READY "), "{line:?}, {}", self.log());
        // What it logged before is written a moment later, unless it logs no such lines.
        let until = Instant::now() + Duration::from_millis(500);
        while !self.log().contains("serving on ") && Instant::now() < until {
            sleep(Duration::from_millis(5));
        }
        line
    }

    /// What it has said on stderr.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.stderr).unwrap()
    }

    /// How much it has said there.
    pub fn log_bytes(&self) -> u64 {
        fs::metadata(&self.stderr).unwrap().len()
    }

    /// What it has said there from this byte on.
    pub fn log_from(&self, byte: u64) -> String {
        let mut file = File::open(&self.stderr).unwrap();
        file.seek(SeekFrom::Start(byte)).unwrap();
        let mut log = Vec::new();
        file.read_to_end(&mut log).unwrap();
        String::from_utf8_lossy(&log).into_owned()
    }

    /// Waits until it has logged this: a log is written a moment after what it tells of.
    #[track_caller]
    pub fn says(&self, text: &str) {
        let until = Instant::now() + PATIENCE;
        while !self.log().contains(text) {
            assert!(Instant::now() < until, "{text:?} is not in {}", self.log());
            sleep(Duration::from_millis(5));
        }
    }

    /// What its one line of error says.
    #[track_caller]
    pub fn error(&self) -> String {
        the_error(&self.log())
    }

    /// Waits for the end of a launcher that must not start; what it says.
    #[track_caller]
    pub fn refused(mut self) -> String {
        assert_eq!(self.code(), 1, "{}", self.log());
        self.error()
    }

    pub fn signal(&self, which: Signal) {
        signal(self.pid(), which);
    }

    /// Kills it, at once.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// How it ended by itself.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let mut ended = None;
        wait_until("the process ends", || {
            ended = self.child.try_wait().unwrap();
            ended.is_some()
        });
        ended.unwrap()
    }

    /// The exit code, or 128 and the number of the signal, negative, where a signal ended it.
    #[track_caller]
    pub fn code(&mut self) -> i32 {
        let status = self.wait();
        status.code().unwrap_or_else(|| -status.signal().unwrap())
    }

    /// Its children that were started as `weightd NAME`.
    pub fn children(&self, name: &str) -> Vec<u32> {
        let ours = |pid: &u32| parent(*pid) == Some(self.pid()) && arg0(*pid) == format!("weightd {name}");
        all_pids().into_iter().filter(ours).collect()
    }

    /// Waits until its loader is gone and was waited for, so that all it said was heard.
    #[track_caller]
    pub fn has_loaded(&self) {
        wait_until("only the server is left", || {
            let children = all_pids()
                .into_iter()
                .filter(|pid| parent(*pid) == Some(self.pid()));
            children.collect::<Vec<_>>() == self.children("server")
        });
    }

    /// Its one child of that name, when there is one.
    #[track_caller]
    pub fn child(&self, name: &str) -> u32 {
        let mut found = Vec::new();
        wait_until("the child is there", || {
            found = self.children(name);
            !found.is_empty()
        });
        assert_eq!(found.len(), 1);
        found[0]
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Ran {
        Ran {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl Ran {
    /// The one line of error; the command must have failed with this code.
    #[track_caller]
    pub fn error(&self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{self:?}");
        the_error(&self.stderr)
    }
}

/// Whether a daemon said itself what `weightd status --json` says of it.
pub fn has_answered(daemon: &Value) -> bool {
    daemon.get("version").is_some()
}

/// Runs a command to its end.
pub fn finish(mut command: Command) -> Ran {
    command.output().unwrap().into()
}

/// These words, and behind them `command`, which they run with its arguments and in its environment.
pub fn run_by(words: &[&str], command: &Command) -> Command {
    let mut by = Command::new(words[0]);
    by.args(&words[1..])
        .arg(command.get_program())
        .args(command.get_args())
        .stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => by.env(name, value),
            None => by.env_remove(name),
        };
    }
    by
}

#[track_caller]
fn the_error(log: &str) -> String {
    let errors: Vec<&str> = log.lines().filter(|line| line.starts_with("weightd: ")).collect();
    assert_eq!(errors.len(), 1, "{log}");
    assert!(log.ends_with(&format!("{}\n", errors[0])), "{log}");
    errors[0].to_owned()
}

/// Waits for a condition that must come true.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "waited in vain until {what}");
        sleep(Duration::from_millis(5));
    }
}

pub fn signal(pid: u32, which: Signal) {
    // It may have ended by itself.
    let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), which);
}

/// Whether a process runs or could; one that ended and was not waited for does not.
pub fn is_alive(pid: &u32) -> bool {
    stat(*pid).is_some_and(|stat| !stat.starts_with('Z') && !stat.starts_with('X'))
}

fn all_pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap();
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect()
}

/// The fields of /proc/PID/stat from the third (the state) on: proc(5).
fn stat(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(stat.rsplit_once(") ")?.1.to_owned())
}

fn parent(pid: u32) -> Option<u32> {
    stat(pid)?.split(' ').nth(1)?.parse().ok()
}

/// What lists of processes call it.
pub fn name_of(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
    name.trim_end().to_owned()
}

fn arg0(pid: u32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let first = line.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(first).into_owned()
}
