//! One socket directory and all that runs on it, step by step.

use super::engines::Engine;
use super::flood::Flood;
use super::plan::{Act, Blow, Comes, Era, How, Seen, Source, Step, Victim};
use super::trend::Trends;
use crate::checkpoints::*;
use crate::harness::*;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};
use weightd_checkpoint::Checkpoint;

/// A moment that does not come is not waited for longer.
const LONGEST_MOMENT: Duration = Duration::from_millis(250);
/// The exit code of [`Running::code`] for kill -9.
const KILLED: i32 = -9;
/// How many engines may stay.
const ENGINES: usize = 3;
/// A digest of each checkpoint, and what a step may have left half-written.
const REMEMBERED: usize = 8;

/// A daemon, as `weightd status` shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct Daemon {
    pub socket: String,
    pub server: u32,
    pub generation: String,
    pub state: String,
    pub rank: u32,
    pub draft: bool,
    /// The digest of what it serves, in hex, where it is known.
    pub digest: String,
    pub leases: usize,
    /// The generations that somebody leases.
    pub leased: Vec<String>,
}

impl Daemon {
    pub fn serves(&self, generation: &str) -> bool {
        self.state == "serving" && self.generation == generation
    }
}

/// A checkpoint, and by which digest its publications are known.
struct Model {
    dir: PathBuf,
    digest: [u8; 32],
    /// Whether its files say by their times when they change.
    steady: bool,
}

pub struct World {
    era: Era,
    /// Of a publishing era two with the same shapes, else one.
    models: Vec<Model>,
    /// What every command but a client's of one socket needs to be told.
    options: Vec<String>,
    engines: Vec<Engine>,
    holder: Option<Running>,
    /// Whoever launched and is still heard, the last one last.
    launchers: Vec<Running>,
    /// Who started the server, and so has its lines in its log, perhaps after its death.
    logs_to: u32,
    /// The last of them leads.
    leads: bool,
    /// Of this step.
    killed: Vec<u32>,
    /// One of those was a child of the launcher that was about to start.
    killed_its_child: bool,
    /// The socket directory was removed in this step.
    removed: bool,
    /// The last field but for this: whatever still runs in it ends with it.
    site: Site,
}

impl World {
    pub fn new(device: &'static str, era: Era) -> World {
        let site = Site::on(device);
        let dirs = match era.source {
            Source::Loader { model: name, .. } => vec![model(name)],
            Source::Publishers => {
                let one = copy_of(&model("llama"), &site.path().join("one"));
                vec![one.clone(), tuned(&one, &site.path().join("other"))]
            }
        };
        let digest = |dir: PathBuf| Model {
            digest: Checkpoint::open(&dir)
                .unwrap()
                .digest(&Default::default(), &Default::default())
                .unwrap(),
            steady: is_steady(&dir),
            dir,
        };
        let mut options = site.sharing(era.tp);
        if let Source::Loader {
            draft: Some(draft), ..
        } = era.source
        {
            let config = json!({ "method": "eagle3", "model": model(draft) });
            options.extend(["--speculative-config".to_owned(), config.to_string()]);
        }
        World {
            era,
            models: dirs.into_iter().map(digest).collect(),
            options,
            engines: Vec::new(),
            holder: None,
            launchers: Vec::new(),
            logs_to: 0,
            leads: false,
            killed: Vec::new(),
            killed_its_child: false,
            removed: false,
            site,
        }
    }

    /// Whatever a step does, afterwards a launcher serves, all that is served is right, and so is all that was
    /// mapped before.
    pub fn step(&mut self, step: &Step) {
        self.killed.clear();
        self.killed_its_child = false;
        self.removed = false;
        if step.act != Act::Start {
            self.a_launcher_serves(false);
            self.has_content();
        } else if self.leads {
            self.stop();
        }
        self.comes_and_goes(step);
        let before = match step.act {
            Act::Start => Vec::new(),
            _ => self.all_daemons(),
        };
        let leader = self.launchers.last().filter(|_| self.leads).map(Running::pid);
        if step.act == Act::Adopt {
            self.kill_launcher(step.hasty);
        }
        let flood = step.flood.clone().map(|dice| Flood::start(self.site.dir(), dice));
        let target = self.other_than_served(&before);
        let mut client = self.begin(step, &before, target);
        let standing: Vec<_> = step
            .blows
            .iter()
            .filter_map(|blow| self.strike(step, blow, &client, &before))
            .collect();
        for stands in standing {
            stands.join().unwrap();
        }
        let done = match step.act {
            Act::Start | Act::Adopt => self.has_started(client),
            Act::Stop => self.has_stopped(&mut client),
            act => self.has_done(act, &mut client, leader),
        };
        drop(flood);
        self.engines.iter().for_each(Engine::is_intact);
        self.a_launcher_serves(step.one_more && step.act != Act::Start);
        let now = self.all_daemons();
        if !before.is_empty() && step.act != Act::Stop {
            self.follows(step, &before, &now, leader, target, done);
        }
        self.everybody_knows();
        self.has_content();
        for daemon in &self.all_daemons() {
            self.is_right(daemon);
        }
    }

    /// What long-lived processes hold now.
    pub fn sample(&self, trends: &mut Trends) {
        let daemons = self.all_daemons();
        let leases = daemons.iter().map(|daemon| daemon.leases).sum();
        trends.sample("server", daemons[0].server, leases);
        trends.sample("launcher", self.launchers.last().unwrap().pid(), 0);
    }

    /// All ends, and nothing is left but what engines have mapped.
    pub fn end(mut self) {
        if self.leads {
            self.stop();
        }
        for engine in &self.engines {
            engine.is_intact();
        }
        self.lets_holder_go();
        self.site.assert_clean();
        let remembered = fs::read_dir(self.site.path().join("cache/weightd"));
        let remembered = remembered.map_or(0, Iterator::count);
        assert!(remembered <= REMEMBERED, "{remembered} files remember digests");
    }

    /// What is to be known of one that failed.
    pub fn tell(&self) {
        eprintln!("{:?}, killed {:?} in the last step", self.era, self.killed);
        for launcher in &self.launchers {
            eprintln!("launcher {} said:\n{}", launcher.pid(), launcher.log());
        }
        eprintln!("left: {:?}, {:?}", self.site.left(), self.site.processes());
    }
}

/// What is done in a step.
impl World {
    fn comes_and_goes(&mut self, step: &Step) {
        if step.one_goes && !self.engines.is_empty() {
            self.engines.remove(0);
        }
        match step.comes {
            _ if step.act == Act::Start => {}
            Some(Comes::Engine) if self.engines.len() < ENGINES => {
                let daemons = self.all_daemons();
                let targets: Vec<_> = daemons.iter().filter(|daemon| !daemon.draft).collect();
                let daemon = targets[self.engines.len() % targets.len()];
                let model = self.model_of(daemon);
                let digest = (self.publishes() || !model.steady).then_some(model.digest);
                let engine = Engine::map(daemon, &model.dir, self.era.tp, digest);
                engine.is_intact();
                self.engines.push(engine);
            }
            Some(Comes::Holder) => {
                self.lets_holder_go();
                let command = self.attach(&self.all_daemons(), &["--hold", "--json"]);
                let mut holder = self.site.start(command);
                assert!(holder.line().contains("generation"), "{}", holder.log());
                self.holder = Some(holder);
            }
            _ => {}
        }
    }

    fn lets_holder_go(&mut self) {
        if let Some(mut holder) = self.holder.take() {
            holder.signal(Signal::TERM);
            assert_eq!(holder.code(), 143, "{}", holder.log());
        }
    }

    fn begin(&self, step: &Step, before: &[Daemon], target: usize) -> Running {
        let ranks: &[&str] = if step.all { &["--all"] } else { &["--rank", "0"] };
        let command = match step.act {
            Act::Start | Act::Adopt => return self.launch(),
            Act::Attach => self.attach(before, &["--verify"]),
            Act::Publish => publisher(&self.site, &self.models[target].dir, self.era.tp),
            Act::Release => self.site.weightd(&[&["release"], ranks].concat()),
            Act::Scrub => self.site.weightd(&["scrub", "--json"]),
            Act::Stop => self.site.weightd(&["stop"]),
        };
        self.site.start(command)
    }

    fn launch(&self) -> Running {
        self.site.start(match self.era.source {
            Source::Publishers => {
                let tp = self.era.tp.to_string();
                let mut command = self.site.weightd(&["serve", "-tp", &tp, "--log", "debug"]);
                command.args(&self.options);
                command
            }
            Source::Loader { checksums, .. } => {
                let more: &[&str] = if checksums { &["--checksums"] } else { &[] };
                let more = [&["--log", "debug"], more].concat();
                self.on_model("preload", &self.models[0].dir, &more)
            }
        })
    }

    /// Attaches all ranks, or the one of which it is known what was published.
    fn attach(&self, daemons: &[Daemon], more: &[&str]) -> Command {
        let rank = daemons[0].rank.to_string();
        let ranks = if self.publishes() {
            vec!["--rank", &rank]
        } else {
            vec!["--all"]
        };
        let model = &self.model_of(&daemons[0]).dir;
        self.on_model("attach", model, &[&ranks[..], more].concat())
    }

    fn on_model(&self, subcommand: &str, model: &Path, more: &[&str]) -> Command {
        let options = self.options.iter().map(String::as_str);
        let more: Vec<&str> = options.chain(more.iter().copied()).collect();
        self.site.on_model(subcommand, model, self.era.tp, &more)
    }

    /// Strikes whom the plan says, when it says. Who stands still goes on by itself.
    fn strike(
        &mut self,
        step: &Step,
        blow: &Blow,
        client: &Running,
        before: &[Daemon],
    ) -> Option<JoinHandle<()>> {
        let starts = matches!(step.act, Act::Start | Act::Adopt);
        let launcher = if starts {
            client
        } else {
            self.launchers.last().unwrap()
        };
        let child = |name| launcher.children(name).first().map(|pid| (*pid, true));
        let server = before.first().map(|daemon| (daemon.server, false));
        // The process, and whether it is the launcher's child.
        let victim = || match blow.victim {
            Victim::Names => None,
            Victim::Launcher => Some((launcher.pid(), false)),
            Victim::Client => Some((client.pid(), false)),
            Victim::Holder => self.holder.as_ref().map(|holder| (holder.pid(), false)),
            Victim::Loader => child("loader"),
            Victim::Server => child("server").or(server),
        };
        let heard = || self.launchers.iter().chain(starts.then_some(client));
        let said: Vec<u64> = heard().map(Running::log_bytes).collect();
        let new = || {
            let heard = heard().zip(&said);
            heard
                .map(|(running, from)| running.log_from(*from))
                .collect::<String>()
        };
        let is_seen = || match blow.moment.seen {
            Seen::Nothing => true,
            Seen::Victim => victim().is_some(),
            Seen::File(is_it) => self.files().iter().any(|name| is_it(name)),
            Seen::Lines(more) => new().lines().count() >= more,
            Seen::Words(words, times) => new().lines().filter(|line| line.contains(words)).count() >= times,
        };
        let until = Instant::now() + LONGEST_MOMENT;
        while !is_seen() && is_alive(&client.pid()) && Instant::now() < until {
            sleep(Duration::from_micros(100));
        }
        // Not to wait for anything: the moment is what is tried.
        sleep(blow.moment.later);
        if blow.victim == Victim::Names {
            self.remove_names();
            return None;
        }
        let (victim, is_child) = victim().filter(|(victim, _)| is_alive(victim))?;
        match blow.how {
            How::Kill => {
                signal(victim, Signal::KILL);
                self.killed_its_child |= starts && is_child;
                self.killed.push(victim);
                None
            }
            How::Stand(time) => {
                signal(victim, Signal::STOP);
                Some(spawn(move || {
                    sleep(time);
                    signal(victim, Signal::CONT);
                }))
            }
        }
    }

    /// All at once: who finds the half of them may say so.
    fn remove_names(&mut self) {
        let gone = self.site.path().join("gone");
        if fs::rename(self.site.dir(), &gone).is_ok() {
            fs::remove_dir_all(gone).unwrap();
            self.removed = true;
        }
    }

    fn kill_launcher(&mut self, hasty: bool) {
        let launcher = self.launchers.last_mut().unwrap();
        launcher.kill();
        self.killed.push(launcher.pid());
        self.leads = false;
        if !hasty {
            let leads = |daemon: &Value| daemon["launcher_pid"] != Value::Null;
            wait_until("the server has noticed", || !self.status().iter().any(leads));
        }
    }

    /// Stops all, with nobody in the way.
    fn stop(&mut self) {
        let count = self.all_daemons().len();
        let ran = self.site.run(&["stop"]);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert!(
            ran.stdout.starts_with(&format!("stopped {count} daemon")),
            "{ran:?}"
        );
        let launcher = self.launchers.last_mut().unwrap();
        assert_eq!(launcher.code(), 0, "{}", launcher.log());
        self.leads = false;
        self.nothing_is_left();
    }
}

/// How it may end.
impl World {
    /// A launcher is ready, was killed, or says on one line that a child of its own was, or that a name is gone.
    fn has_started(&mut self, mut launcher: Running) -> bool {
        let line = launcher.line();
        let pid = launcher.pid();
        if line.starts_with("READY ") || line.starts_with("SERVING ") {
            self.leads = !self.killed.contains(&pid);
            if !self.leads {
                assert_eq!(launcher.code(), KILLED);
            }
        } else if launcher.code() != KILLED || !self.killed.contains(&pid) {
            assert!(self.killed_its_child || self.removed, "{}", launcher.log());
            assert_eq!(launcher.code(), 1);
            launcher.error();
            self.nothing_is_left();
        }
        self.launchers.push(launcher);
        true
    }

    /// A client did what it is for, or was killed, or says on one line why not: somebody was killed, or names are gone.
    /// An engine attaches unless names are gone or that was launcher and server.
    fn has_done(&mut self, act: Act, client: &mut Running, leader: Option<u32>) -> bool {
        let code = client.code();
        let died = |pid: u32| self.killed.contains(&pid);
        let holder = self.holder.as_ref().map(Running::pid);
        let is_server = |pid| ![leader, holder, Some(client.pid())].contains(&Some(pid));
        let excused = match act {
            Act::Attach => died(leader.unwrap()) && self.killed.iter().any(|pid| is_server(*pid)),
            _ => !self.killed.is_empty(),
        };
        let excused = excused || self.removed;
        assert!(
            code == 0
                || if code == KILLED {
                    died(client.pid())
                } else {
                    excused
                },
            "{code}: {}",
            client.log()
        );
        if code == 1 {
            client.error();
        }
        let launcher = self.launchers.last_mut().unwrap();
        self.leads = !self.killed.contains(&launcher.pid());
        if self.leads {
            assert_eq!(launcher.child.try_wait().unwrap(), None, "{}", launcher.log());
        } else {
            assert_eq!(launcher.code(), KILLED);
        }
        code == 0
    }

    /// Stop is done when it says so, whoever died of those that it stopped.
    fn has_stopped(&mut self, client: &mut Running) -> bool {
        match client.code() {
            0 => {}
            KILLED if self.killed.contains(&client.pid()) => {
                let again = self.site.run(&["stop"]);
                assert_eq!(again.code, Some(0), "{again:?}");
            }
            code => panic!("{code}, {}", client.log()),
        }
        let launcher = self.launchers.last_mut().unwrap();
        let code = launcher.code();
        assert!(
            code == 0 || (code == KILLED && self.killed.contains(&launcher.pid())),
            "{code}, {}",
            launcher.log()
        );
        self.leads = false;
        self.nothing_is_left();
        true
    }

    /// No process but the engine that holds, and no name.
    fn nothing_is_left(&self) {
        let holder: Vec<u32> = self.holder.iter().map(Running::pid).collect();
        wait_until("all processes are gone", || self.site.processes() == holder);
        assert_eq!(self.site.left(), [""; 0]);
    }
}

/// What is true whatever happened.
impl World {
    /// The launcher that leads serves all again, or the next one does.
    fn a_launcher_serves(&mut self, one_more: bool) {
        if self.leads {
            self.all_daemons();
            if one_more {
                self.kill_launcher(true);
            }
        }
        if !self.leads {
            let mut launcher = self.launch();
            let line = launcher.line();
            assert!(
                line.starts_with("READY ") || line.starts_with("SERVING "),
                "{line:?}, {}",
                launcher.log()
            );
            self.launchers.push(launcher);
            self.leads = true;
        }
        let server = self.all_daemons()[0].server;
        let last = self.launchers.last().unwrap();
        if last.children("server").contains(&server) {
            self.logs_to = last.pid();
        }
        // The others say nothing any more.
        let (last, logs_to) = (last.pid(), self.logs_to);
        self.launchers
            .retain(|launcher| [last, logs_to].contains(&launcher.pid()));
    }

    /// What is served after a step follows from what was served before it.
    fn follows(
        &self,
        step: &Step,
        before: &[Daemon],
        now: &[Daemon],
        leader: Option<u32>,
        target: usize,
        done: bool,
    ) {
        let chosen = |daemon: &Daemon| step.act == Act::Release && (step.all || daemon.rank == 0);
        let launcher_died = self.killed.iter().any(|pid| Some(*pid) == leader);
        let server_died = self.killed.contains(&before[0].server);
        let all_chosen = before.iter().filter(|daemon| !daemon.draft).all(chosen);
        // Somebody held the content all the time, and not all of it was released.
        let is_kept = !launcher_died || !(server_died || all_chosen || self.removed);
        let pairs = || before.iter().zip(now);
        let same = pairs()
            .filter(|(before, now)| before.generation == now.generation)
            .count();
        // A server that was not armed with all yet is adopted with what it has.
        let may_be_mixed = self.publishes() || (launcher_died && server_died);
        assert!(
            may_be_mixed || [0, now.len()].contains(&same),
            "a part is fresh: {now:?}"
        );
        for (before, now) in pairs() {
            assert_eq!((&before.socket, before.rank), (&now.socket, now.rank));
            let is_same = before.generation == now.generation;
            let is_published = step.act == Act::Publish && now.digest == hex(&self.models[target].digest);
            if is_kept {
                assert!(is_same || is_published, "{now:?} after {before:?}");
            }
            if done && step.act == Act::Publish && is_kept {
                assert!(is_published, "{now:?} after {before:?}");
            }
            if is_same {
                let is_released = now.state == "released";
                assert!(chosen(now) || !is_released, "{now:?} after {before:?}");
                assert!(is_released || !(chosen(now) && done), "{now:?} came back");
            }
            if is_kept
                && !server_died
                && !self.removed
                && !self.killed.contains(&now.server)
                && is_alive(&before.server)
            {
                assert_eq!(now.server, before.server);
            }
        }
    }

    /// Engines that stay lease what they have mapped, or know that it is lost.
    fn everybody_knows(&mut self) {
        let mut engines = std::mem::take(&mut self.engines);
        for engine in &mut engines {
            engine.knows(|| self.all_daemons());
        }
        self.engines = engines;
        self.holder.take_if(|holder| self.killed.contains(&holder.pid()));
        if let Some(holder) = &mut self.holder {
            assert_eq!(holder.child.try_wait().unwrap(), None, "{}", holder.log());
        }
    }

    /// What was released, or is not there, is loaded or published again.
    fn has_content(&mut self) {
        let is_served = |daemon: &Daemon| daemon.state == "serving";
        if self.all_daemons().iter().all(is_served) {
            return;
        }
        if !self.publishes() {
            self.stop();
            self.a_launcher_serves(false);
        }
        if !self.all_daemons().iter().all(is_served) {
            assert!(self.publishes(), "what is loaded afresh is released");
            let publish = publisher(&self.site, &self.models[0].dir, self.era.tp);
            let ran = finish(publish);
            assert_eq!(ran.code, Some(0), "{ran:?}");
        }
        assert!(self.all_daemons().iter().all(is_served));
    }

    /// What a daemon serves is right, down to the bytes, and nothing else is got there.
    fn is_right(&self, daemon: &Daemon) {
        let rank = daemon.rank.to_string();
        let mut more = vec!["--verify", "--rank", &rank];
        more.extend(daemon.draft.then_some("--draft"));
        let served = self.model_of(daemon);
        for model in &self.models {
            let ran = finish(self.on_model("attach", &model.dir, &more));
            if model.digest == served.digest {
                assert_eq!(ran.code, Some(0), "{ran:?}");
            } else {
                assert!(ran.error(1).contains("checkpoint"), "{ran:?}");
            }
        }
    }
}

/// Looking.
impl World {
    fn publishes(&self) -> bool {
        self.era.source == Source::Publishers
    }

    /// Which model a daemon serves.
    fn model_of(&self, daemon: &Daemon) -> &Model {
        if !self.publishes() {
            return &self.models[0];
        }
        let is_its = |model: &&Model| hex(&model.digest) == daemon.digest;
        self.models.iter().find(is_its).unwrap()
    }

    /// Which model is not the one that the first daemon serves, where there are two.
    fn other_than_served(&self, daemons: &[Daemon]) -> usize {
        let served = daemons.first().map(|daemon| daemon.digest.clone());
        let other = |model: &Model| Some(hex(&model.digest)) != served;
        self.models.iter().position(other).unwrap_or(0)
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
        let count = self.era.daemons();
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
            state: text(&daemon["state"]),
            rank: daemon["global_rank"].as_u64().unwrap() as u32,
            draft: daemon["role"] == "draft",
            digest: text(&daemon["key"]["checkpoint"]["digest"]),
            leases: daemon["leases"].as_u64().unwrap() as usize,
            leased: daemon["activity"]["leased_generations"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|leased| text(&leased["generation"]))
                .collect(),
        };
        status.iter().map(daemon).collect()
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.site.dir()).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.collect()
    }
}

/// A model with the same shapes as `of`, and one other bit.
fn tuned(of: &Path, to: &Path) -> PathBuf {
    let tuned = copy_of(of, to);
    let files = fs::read_dir(&tuned).unwrap().map(|entry| entry.unwrap().path());
    let weights = files.filter(|path| path.extension().is_some_and(|end| end == "safetensors"));
    let last = weights.max().unwrap();
    let mut bytes = fs::read(&last).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&last, bytes).unwrap();
    tuned
}

/// A process that publishes all ranks of a model: [`super::publisher_body`].
fn publisher(site: &Site, model: &Path, tp: u32) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "chaos::publisher_body", "--ignored", "--nocapture"])
        .env("WEIGHTD_SOCKET_DIR", site.dir())
        .env("WEIGHTD_CHAOS_SITE", site.path())
        .env("WEIGHTD_CHAOS_MODEL", model)
        .env("WEIGHTD_CHAOS_TP", tp.to_string());
    command
}

fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
