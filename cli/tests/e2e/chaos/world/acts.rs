//! What is done in a step.

use super::{Daemon, ENGINES, LONGEST_MOMENT, World};
use crate::chaos::engines::Engine;
use crate::chaos::plan::{Act, Blow, Comes, How, Seen, Source, Step, Victim};
use crate::harness::*;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

impl World {
    pub(super) fn comes_and_goes(&mut self, step: &Step) {
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

    pub(super) fn lets_holder_go(&mut self) {
        if let Some(mut holder) = self.holder.take() {
            holder.signal(Signal::TERM);
            assert_eq!(holder.code(), 143, "{}", holder.log());
        }
    }

    pub(super) fn begin(&self, step: &Step, before: &[Daemon], target: usize) -> Running {
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

    pub(super) fn launch(&self) -> Running {
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
    pub(super) fn attach(&self, daemons: &[Daemon], more: &[&str]) -> Command {
        let rank = daemons[0].rank.to_string();
        let ranks = if self.publishes() {
            vec!["--rank", &rank]
        } else {
            vec!["--all"]
        };
        let model = &self.model_of(&daemons[0]).dir;
        self.on_model("attach", model, &[&ranks[..], more].concat())
    }

    pub(super) fn on_model(&self, subcommand: &str, model: &Path, more: &[&str]) -> Command {
        let options = self.options.iter().map(String::as_str);
        let more: Vec<&str> = options.chain(more.iter().copied()).collect();
        self.site.on_model(subcommand, model, self.era.tp, &more)
    }

    /// Strikes whom the plan says, when it says. Who stands still goes on by itself.
    pub(super) fn strike(
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
    pub(super) fn remove_names(&mut self) {
        let gone = self.site.path().join("gone");
        if fs::rename(self.site.dir(), &gone).is_ok() {
            fs::remove_dir_all(gone).unwrap();
            self.removed = true;
        }
    }

    pub(super) fn kill_launcher(&mut self, hasty: bool) {
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
    pub(super) fn stop(&mut self) {
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

/// A process that publishes all ranks of a model: [`publisher_body`](crate::chaos::publisher_body).
pub(super) fn publisher(site: &Site, model: &Path, tp: u32) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "chaos::publisher_body", "--ignored", "--nocapture"])
        .env("WEIGHTD_SOCKET_DIR", site.dir())
        .env("WEIGHTD_CHAOS_SITE", site.path())
        .env("WEIGHTD_CHAOS_MODEL", model)
        .env("WEIGHTD_CHAOS_TP", tp.to_string());
    command
}
