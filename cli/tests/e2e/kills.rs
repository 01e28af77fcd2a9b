//! kill -9 at every step, by seeds: whoever dies and whenever, what is mapped stays, what is said is true,
//! and the next launcher serves.
//!
//! `WEIGHTD_KILL_SEED=N` runs one seed, and `WEIGHTD_KILL_ROUNDS=N` that many from there or from 0 on.
//! A seed decides what is tried; what it meets depends on the machine, so one that failed may need some runs.

mod plan;

use crate::checkpoints::*;
use crate::engine::*;
use crate::harness::*;
use plan::{Act, Kill, Plan, Seen, Victim};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{panicking, sleep};
use std::time::{Duration, Instant};
use weightd_blocking::Loaded;
use weightd_gpu::Weights;

/// As many as take a minute: an engine waits some seconds for a daemon that is gone.
const ROUNDS: u64 = 60;
/// A moment that does not come is not waited for longer.
const LONGEST_MOMENT: Duration = Duration::from_millis(250);
/// The exit code of [`Running::code`] for kill -9.
const KILLED: i32 = -9;

#[test]
fn whoever_is_killed_and_whenever_nothing_is_lost_and_the_next_launcher_serves() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let first = number("WEIGHTD_KILL_SEED");
    let rounds = number("WEIGHTD_KILL_ROUNDS").unwrap_or(if first.is_some() { 1 } else { ROUNDS });
    let first = first.unwrap_or(0);
    let fails = |seed: &u64| catch_unwind(AssertUnwindSafe(|| round(*seed))).is_err();
    let failed: Vec<u64> = (first..first + rounds).filter(fails).collect();
    assert!(
        failed.is_empty(),
        "{} of {rounds} rounds failed, run each with WEIGHTD_KILL_SEED: {failed:?}",
        failed.len()
    );
}

fn round(seed: u64) {
    let start = Instant::now();
    let mut round = Round::new(seed);
    if round.plan.act != Act::Start {
        round.serve();
    }
    if round.plan.act == Act::Adopt {
        round.kill_launcher();
    }
    let mut client = round.begin();
    for kill in std::mem::take(&mut round.kills) {
        round.strike(&kill, &client);
    }
    match round.plan.act {
        Act::Start | Act::Adopt => round.has_started(client),
        Act::Attach => round.has_attached(&mut client),
        Act::Release => round.has_released(&mut client),
        Act::Stop => round.has_stopped(&mut client),
    }
    round.nothing_mapped_is_lost();
    round.a_launcher_serves();
    round.what_is_served_is_right();
    round.all_ends();
    let (act, killed) = (round.plan.act, round.killed.len());
    eprintln!("seed {seed}: {act:?}, {killed} killed, {:.1?}", start.elapsed());
}

/// A daemon, as `weightd status` shows it.
#[derive(Clone, Debug, PartialEq)]
struct Daemon {
    socket: String,
    server: u32,
    generation: String,
    released: bool,
    rank: u64,
    draft: bool,
}

/// What was there before the kills.
struct Before {
    daemons: Vec<Daemon>,
    launcher: u32,
    server: u32,
    mapped: Loaded<Weights>,
    /// The engine heard of its lease: leased again, or lost.
    told: Arc<AtomicBool>,
    holder: Option<Running>,
    /// Open descriptors of launcher and server, where all was loaded.
    descriptors: Option<[usize; 2]>,
}

struct Round {
    plan: Plan,
    kills: Vec<Kill>,
    model: PathBuf,
    speculative: Vec<String>,
    before: Option<Before>,
    killed: Vec<u32>,
    /// One of those was a child of the launcher that was about to start.
    killed_its_child: bool,
    /// A release was acknowledged.
    released: bool,
    /// All that launchers said, the last one last, and whether that leads.
    launchers: Vec<Running>,
    leads: bool,
    /// The last field: whatever still runs in it ends with it.
    site: Site,
}

impl Round {
    fn new(seed: u64) -> Round {
        let mut plan = Plan::of(seed);
        let speculative = plan.draft.map(|draft| {
            let config = json!({ "method": "eagle3", "model": model(draft) });
            ["--speculative-config".to_owned(), config.to_string()]
        });
        Round {
            kills: std::mem::take(&mut plan.kills),
            model: model(plan.model),
            speculative: speculative.into_iter().flatten().collect(),
            plan,
            before: None,
            killed: Vec::new(),
            killed_its_child: false,
            released: false,
            launchers: Vec::new(),
            leads: false,
            site: Site::new(),
        }
    }

    /// A launcher that serves, an engine that has mapped, and perhaps one that holds.
    fn serve(&mut self) {
        let mut launcher = self.preload();
        launcher.ready();
        let daemons = self.all_daemons();
        let server = launcher.child("server");
        let descriptors = (self.plan.act != Act::Attach).then(|| {
            launcher.has_loaded();
            [launcher.pid(), server].map(descriptors)
        });
        let mapped = map(&self.site, &self.model, self.plan.tp);
        let told = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&told);
        let lease = mapped.lease().unwrap();
        lease.on_event(move |_| tell.store(true, Ordering::Release));
        let holder = self.plan.holder.then(|| {
            let command = self.on_model("attach", &["--all", "--hold", "--json"]);
            let mut holder = self.site.start(command);
            for _ in 0..self.plan.tp {
                assert!(holder.line().contains("generation"), "{}", holder.log());
            }
            holder
        });
        self.before = Some(Before {
            daemons,
            launcher: launcher.pid(),
            server,
            mapped,
            told,
            holder,
            descriptors,
        });
        self.launchers.push(launcher);
        self.leads = true;
    }

    fn begin(&self) -> Running {
        let ranks: &[&str] = if self.plan.all {
            &["--all"]
        } else {
            &["--rank", "0"]
        };
        match self.plan.act {
            Act::Start | Act::Adopt => self.preload(),
            Act::Attach => self.site.start(self.on_model("attach", &["--all", "--verify"])),
            Act::Release => self
                .site
                .start(self.site.weightd(&[&["release"], ranks].concat())),
            Act::Stop => self.site.start(self.site.weightd(&["stop"])),
        }
    }

    fn preload(&self) -> Running {
        self.site.start(self.on_model("preload", &["--log", "debug"]))
    }

    fn on_model(&self, subcommand: &str, more: &[&str]) -> Command {
        let speculative = self.speculative.iter().map(String::as_str);
        let more: Vec<&str> = speculative.chain(more.iter().copied()).collect();
        self.site.on_model(subcommand, &self.model, self.plan.tp, &more)
    }

    /// Kills whom the plan says, when it says.
    fn strike(&mut self, kill: &Kill, client: &Running) {
        let starts = matches!(self.plan.act, Act::Start | Act::Adopt);
        let launcher = if starts {
            client
        } else {
            self.launchers.last().unwrap()
        };
        let child = |name| launcher.children(name).first().map(|pid| (*pid, true));
        let before = self.before.as_ref().map(|before| (before.server, false));
        // The process, and whether it is the launcher's child.
        let victim = || match kill.victim {
            Victim::Launcher => Some((launcher.pid(), false)),
            Victim::Client => Some((client.pid(), false)),
            Victim::Loader => child("loader"),
            Victim::Server => child("server").or(before),
        };
        let log = || {
            let heard = self.launchers.iter().chain(starts.then_some(client));
            heard.map(Running::log).collect::<String>()
        };
        let said = log().lines().count();
        let is_seen = || match kill.moment.seen {
            Seen::Nothing => true,
            Seen::Victim => victim().is_some(),
            Seen::File(is_it) => self.files().iter().any(|name| is_it(name)),
            Seen::Lines(more) => log().lines().count() >= said + more,
            Seen::Words(words, times) => {
                let new = log();
                let with = new.lines().skip(said).filter(|line| line.contains(words));
                with.count() >= times
            }
        };
        let until = Instant::now() + LONGEST_MOMENT;
        while !is_seen() && is_alive(&client.pid()) && Instant::now() < until {
            sleep(Duration::from_micros(100));
        }
        // Not to wait for anything: the moment is what is tried.
        sleep(kill.moment.later);
        let Some((victim, is_child)) = victim().filter(|(victim, _)| is_alive(victim)) else {
            return;
        };
        signal(victim, Signal::KILL);
        self.killed_its_child |= starts && is_child;
        self.killed.push(victim);
    }

    fn kill_launcher(&mut self) {
        let launcher = self.launchers.last_mut().unwrap();
        launcher.kill();
        self.killed.push(launcher.pid());
        self.leads = false;
        if !self.plan.hasty {
            let leads = |daemon: &Value| daemon["launcher_pid"] != Value::Null;
            wait_until("the server has noticed", || !self.status().iter().any(leads));
        }
    }

    /// A launcher is ready, was killed, or says on one line that a child of its own was.
    fn has_started(&mut self, mut launcher: Running) {
        let line = launcher.line();
        let pid = launcher.pid();
        if line.starts_with("READY ") {
            self.leads = !self.killed.contains(&pid);
            if !self.leads {
                assert_eq!(launcher.code(), KILLED);
            }
        } else if launcher.code() != KILLED || !self.killed.contains(&pid) {
            assert!(self.killed_its_child, "{}", launcher.log());
            assert_eq!(launcher.code(), 1);
            launcher.error();
            self.nothing_is_left();
        }
        self.launchers.push(launcher);
    }

    /// An engine gets all, unless nobody is left to serve it.
    fn has_attached(&mut self, client: &mut Running) {
        match client.code() {
            0 => {}
            1 => {
                let error = client.error();
                assert!(self.killed_pair(), "{error}");
            }
            code => assert!(code == KILLED && self.killed.contains(&client.pid()), "{code}"),
        }
        self.launcher_leads_or_was_killed();
    }

    /// A release that is acknowledged was done. One that was not, is not or is.
    fn has_released(&mut self, client: &mut Running) {
        match client.code() {
            0 => self.released = true,
            1 => {
                let error = client.error();
                assert!(!self.killed.is_empty(), "{error}");
            }
            code => assert!(code == KILLED && self.killed.contains(&client.pid()), "{code}"),
        }
        self.launcher_leads_or_was_killed();
    }

    /// Stop is done when it says so, whoever died of those that it stopped.
    fn has_stopped(&mut self, client: &mut Running) {
        match client.code() {
            0 => {}
            KILLED if self.killed.contains(&client.pid()) => {
                let again = self.site.run(&["stop"]);
                assert_eq!(again.code, Some(0), "{again:?}");
            }
            code => panic!("{code}, {}", client.log()),
        }
        let launcher = self.launchers.last_mut().unwrap();
        match launcher.code() {
            0 => {}
            code => assert!(
                code == KILLED && self.killed.contains(&launcher.pid()),
                "{code}, {}",
                launcher.log()
            ),
        }
        self.leads = false;
        self.nothing_is_left();
    }

    fn launcher_leads_or_was_killed(&mut self) {
        let launcher = self.launchers.last_mut().unwrap();
        self.leads = !self.killed.contains(&launcher.pid());
        if self.leads {
            assert_eq!(launcher.child.try_wait().unwrap(), None, "{}", launcher.log());
        } else {
            assert_eq!(launcher.code(), KILLED);
        }
    }

    fn killed_pair(&self) -> bool {
        let before = self.before.as_ref().unwrap();
        let others = self.killed.iter().filter(|pid| **pid != before.launcher);
        self.killed.contains(&before.launcher) && others.count() > 0
    }

    /// No process but the engine that holds, and no name.
    fn nothing_is_left(&self) {
        let holder = self.before.as_ref().and_then(|before| before.holder.as_ref());
        let holder: Vec<u32> = holder.map(Running::pid).into_iter().collect();
        wait_until("all processes are gone", || self.site.processes() == holder);
        assert_eq!(self.site.left(), [""; 0]);
    }

    /// Whoever mapped has what the checkpoint has, and was told of the daemon's end or it serves on.
    fn nothing_mapped_is_lost(&self) {
        let Some(before) = &self.before else {
            return;
        };
        assert_intact(&before.mapped, &self.model, self.plan.tp);
        let was_told = || before.told.load(Ordering::Acquire);
        if self.killed.contains(&before.server) || !is_alive(&before.server) {
            wait_until("the engine is told that its daemon is lost", was_told);
        } else if was_told() {
            wait_until("what the engine was told is true", || !is_alive(&before.server));
        } else {
            let generation = before.mapped.generation().unwrap().to_string();
            let same = |daemon: &Value| {
                daemon["generation"] == *generation
                    && daemon["role"] == "target"
                    && daemon["global_rank"] == 0
            };
            assert!(
                self.status().iter().any(same) || was_told(),
                "{:?}",
                self.status()
            );
        }
    }

    /// The launcher that leads serves all again, or the next one does.
    fn a_launcher_serves(&mut self) {
        if self.leads {
            self.all_daemons();
            if self.plan.one_more {
                self.kill_launcher();
            }
        }
        if !self.leads {
            let mut launcher = self.preload();
            launcher.ready();
            self.launchers.push(launcher);
            self.leads = true;
        }
    }

    fn what_is_served_is_right(&self) {
        let now = self.all_daemons();
        let mut may_be_released = false;
        if let Some(before) = &self.before {
            let same = now
                .iter()
                .zip(&before.daemons)
                .filter(|(now, before)| now.generation == before.generation);
            let same = same.count();
            assert!(same == 0 || same == now.len(), "a part is fresh: {now:?}");
            if self.must_be_the_same() {
                assert_eq!(same, now.len(), "{now:?}, before {:?}", before.daemons);
                if !self.killed.contains(&before.server) {
                    assert!(now.iter().all(|daemon| daemon.server == before.server), "{now:?}");
                }
            }
            may_be_released = same > 0 && self.plan.act == Act::Release;
        }
        for daemon in &now {
            let chosen = may_be_released && (self.plan.all || daemon.rank == 0);
            assert!(chosen || !daemon.released, "{daemon:?}");
            assert!(
                daemon.released || !(chosen && self.released),
                "{daemon:?} came back"
            );
            self.attach(daemon);
        }
    }

    /// Somebody held the content all the time, and not all of it was released.
    fn must_be_the_same(&self) -> bool {
        let Some(before) = &self.before else {
            return false;
        };
        let launcher_died = self.killed.contains(&before.launcher);
        let all_released = self.plan.act == Act::Release && (self.plan.all || self.plan.tp == 1);
        match self.plan.act {
            Act::Stop => false,
            _ if !launcher_died => true,
            _ => !self.killed.contains(&before.server) && !all_released,
        }
    }

    /// What a daemon serves is right, down to the bytes, and what it released is refused.
    fn attach(&self, daemon: &Daemon) {
        let rank = daemon.rank.to_string();
        let mut more = vec!["--verify", "--rank", &rank];
        more.extend(daemon.draft.then_some("--draft"));
        let ran = finish(self.on_model("attach", &more));
        if daemon.released {
            let error = ran.error(1);
            assert!(error.contains("was released"), "{error}");
        } else {
            assert_eq!(ran.code, Some(0), "{ran:?}");
        }
    }

    /// Engines end, nothing of them is left, and a stop leaves nothing at all.
    fn all_ends(&mut self) {
        self.nothing_mapped_is_lost();
        let launcher = self.launchers.last_mut().unwrap();
        if let Some(Before {
            mapped,
            holder,
            server,
            descriptors: before,
            ..
        }) = self.before.take()
        {
            drop(mapped);
            if let Some(mut holder) = holder {
                for _ in 0..if is_alive(&server) { 0 } else { self.plan.tp } {
                    let line = holder.line();
                    let told = ["leased_again", "daemon_lost"]
                        .iter()
                        .any(|event| line.contains(event));
                    assert!(told, "{line:?} {}", holder.log());
                }
                holder.signal(Signal::TERM);
                assert_eq!(holder.code(), 143);
            }
            if let Some(before) = before {
                let now = [
                    launcher.pid(),
                    launcher.children("server").first().copied().unwrap_or(server),
                ];
                for (pid, before) in now.into_iter().zip(before).filter(|(pid, _)| is_alive(pid)) {
                    wait_until("nobody holds more descriptors than before", || {
                        descriptors(pid) <= before
                    });
                }
            }
        }
        let count = self.all_daemons().len();
        let ran = self.site.run(&["stop"]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert!(
            ran.stdout.starts_with(&format!("stopped {count} daemon")),
            "{ran:?}"
        );
        let launcher = self.launchers.last_mut().unwrap();
        assert_eq!(launcher.code(), 0, "{}", launcher.log());
        self.site.assert_clean();
    }

    /// What `weightd status` knows, also while some daemons do not answer.
    fn status(&self) -> Vec<Value> {
        let ran = self.site.run(&["status", "--json"]);
        ran.stdout
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// Every daemon, once they all answer.
    fn all_daemons(&self) -> Vec<Daemon> {
        let count = self.plan.daemons();
        let mut status = Vec::new();
        wait_until("all daemons answer", || {
            status = self.status();
            status.len() == count
        });
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let daemon = |daemon: &Value| Daemon {
            socket: text(&daemon["socket"]),
            server: daemon["pid"].as_u64().unwrap() as u32,
            generation: text(&daemon["generation"]),
            released: daemon["state"] == "released",
            rank: daemon["global_rank"].as_u64().unwrap(),
            draft: daemon["role"] == "draft",
        };
        status.iter().map(daemon).collect()
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.site.dir()).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.collect()
    }
}

impl Drop for Round {
    /// What is to be known of a round that failed.
    fn drop(&mut self) {
        if !panicking() {
            return;
        }
        eprintln!("{:?}\nkilled {:?}", self.plan, self.killed);
        for launcher in &self.launchers {
            eprintln!("launcher {} said:\n{}", launcher.pid(), launcher.log());
        }
        eprintln!("left: {:?}, {:?}", self.site.left(), self.site.processes());
    }
}

/// How many descriptors a process holds; 0 where only root may count them.
fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}
