//! What is true whatever happened.

use super::acts::publisher;
use super::looks::hex;
use super::{Daemon, World};
use crate::chaos::plan::{Act, Step};
use crate::harness::*;

impl World {
    /// The launcher that leads serves all again, or the next one does.
    pub(super) fn a_launcher_serves(&mut self, one_more: bool) {
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
    pub(super) fn follows(
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
    pub(super) fn everybody_knows(&mut self) {
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
    pub(super) fn has_content(&mut self) {
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
    pub(super) fn is_right(&self, daemon: &Daemon) {
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
