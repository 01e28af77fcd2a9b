//! The launcher's life: start, READY, supervise, end.

mod ending;
mod names;
mod server;

use super::adoption::{self, Past};
use super::children::{ServerProcess, Work, probe, spawn_loader};
use super::daemons::Daemons;
use super::ending::Ending;
use super::probing::Prober;
use super::recovery::{Recovery, Suspect, Verdict};
use super::store::Store;
use super::telling::Telling;
use super::{Setup, Source, cannot};
use crate::error::CliError;
use crate::health::Board;
use crate::logs::{DaemonName, about, end_progress};
use crate::output::say;
use crate::signals::Signals;
use names::Names;
use server::Server;
use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::OwnedFd;
use std::process::{Child, ExitCode};
use std::time::Instant;
use tracing::{info, warn};
use weightd_blocking::Clock;
use weightd_blocking::driver::{Driver, Watch};
use weightd_core::content::Role;
use weightd_core::machine::{Origin, Vault, VaultEvent};
use weightd_core::peer::Peer;
use weightd_core::wire::message::{DaemonId, Holds};
use weightd_socket::connect::pair;
use weightd_socket::credentials::our_uid;

pub struct Launcher {
    setup: Setup,
    clock: Clock,
    driver: Driver<Vault<OwnedFd>>,
    signals: Signals,
    signalled: Watch,
    daemons: Daemons,
    names: Names,
    server: Server,
    loader: Option<Loading>,
    ending: Ending,
    load_failure: Option<String>,
    recovery: Recovery,
    prober: Prober,
    telling: Telling,
    /// The sockets have their names: from then on a failure ends nothing that serves.
    serving: bool,
    /// All is loaded and the server has it, which nobody was told yet.
    announces: bool,
    ready: bool,
    /// Copies of what the vault holds, with the service manager.
    store: Option<Store>,
    /// A second signal came along with the first.
    hurried: bool,
}

struct Loading {
    child: Child,
    work: Work,
}

/// Why the launcher ends.
enum End {
    Signal,
    Asked,
    Failed(String),
}

impl Launcher {
    /// Starts the server, and a loader where there is something to load; or goes on with what was inherited.
    /// Whatever was started ends when this fails, or when what it returns is dropped; a server that is to be
    /// adopted goes on when this fails.
    pub fn start(
        setup: Setup,
        daemons: Daemons,
        past: Past,
        store: Option<Store>,
        signals: Signals,
    ) -> Result<Launcher, CliError> {
        let board = Board::new(daemons.claims.iter().map(|claim| &claim.info));
        let names = (0..).zip(&daemons.claims);
        let names: Vec<String> = names
            .map(|(daemon, claim)| DaemonName::new(daemon, Some(&claim.info)).to_string())
            .collect();
        adoption::say(&past, &names);
        let (pid, epoch) = (std::process::id(), getrandom::u64().map_err(CliError::failure)?);
        let control = daemons
            .control
            .ends()
            .map_err(cannot("copy the control socket"))?;
        let serving = !matches!(past, Past::None);
        let (vault, follower) = match past {
            Past::None => {
                let held = daemons.held().map_err(cannot("copy sockets and locks"))?;
                (Vault::new(pid, epoch, held), None)
            }
            Past::Store(inheritance) => (Vault::inheriting(pid, epoch, inheritance), None),
            Past::Server(inheritance, connection) => {
                let server = inheritance.server.as_ref().map_or(0, |server| server.pid);
                (
                    Vault::inheriting(pid, epoch, inheritance),
                    Some((server, connection)),
                )
            }
        };
        let clock = Clock::start();
        let mut driver = Driver::new(vault.with_control(control)).map_err(cannot("wait for processes"))?;
        let signalled = driver.watch(&signals).map_err(cannot("wait for signals"))?;
        let mut process = None;
        if let Some((pid, connection)) = follower {
            let uid = our_uid().map_err(CliError::failure)?;
            driver
                .add(clock.now(), connection, Origin::Server, Peer { pid, uid })
                .map_err(CliError::failure)?;
            process = Some(ServerProcess::adopted(pid, &daemons.control.path));
        }
        let has_server = process.is_some();
        let mut launcher = Launcher {
            setup,
            clock,
            driver,
            signals,
            signalled,
            daemons,
            names: Names::new(Instant::now()),
            server: Server::new(process),
            loader: None,
            ending: Ending::default(),
            load_failure: None,
            recovery: Recovery::default(),
            prober: Prober::default(),
            telling: Telling::new(board),
            serving,
            announces: false,
            ready: false,
            store,
            hurried: false,
        };
        if !has_server {
            launcher.start_server()?;
        }
        if serving {
            launcher.go_on()?;
        } else {
            launcher.start_loader(Work::Everything)?;
        }
        Ok(launcher)
    }

    /// From here on all is ours that was another launcher's. What it had not loaded, or lost, is loaded now; what
    /// clients publish is waited for.
    fn go_on(&mut self) -> Result<(), CliError> {
        self.leave_names(self.store.as_ref().is_some_and(Store::lasts));
        self.daemons.write_owners()?;
        if self.setup.model().is_none() {
            return Ok(());
        }
        let now = Instant::now();
        for daemon in 0..self.daemons.claims.len() as DaemonId {
            if let Some(Holds::Empty | Holds::Lost(_)) = self.driver.machine().holds(daemon) {
                about!(warn, self.name(daemon), "its content is gone; loading it afresh");
                self.recovery.lost(now, daemon);
            }
        }
        if self.without_digest().is_some() {
            self.look_for_digests("the launcher before this one ended too early");
        }
        Ok(())
    }

    /// Runs until a signal, a request or a failure ends it; leaves no socket and no process.
    pub fn run(mut self) -> Result<ExitCode, CliError> {
        let end = self.supervise();
        if let Some(store) = &mut self.store {
            store.manager().tell("STOPPING=1");
        }
        let end = end?;
        let in_order = self.end_children();
        if matches!(end, End::Asked)
            && let Some(store) = &mut self.store
        {
            // Nobody goes on with it, and the locks must be free.
            store.clear();
            self.daemons.leave_names(false);
        }
        self.say_end(&end);
        match end {
            End::Failed(why) => Err(CliError::Failure(why)),
            _ if !in_order => Ok(ExitCode::FAILURE),
            End::Signal => Ok(self.signals.exit_code()),
            End::Asked if self.ready => Ok(ExitCode::SUCCESS),
            End::Asked => Err(CliError::failure("asked to stop before all weights were loaded")),
        }
    }

    fn supervise(&mut self) -> Result<End, CliError> {
        loop {
            let turn = self.driver.turn(self.clock.now()).map_err(CliError::failure)?;
            for event in turn.events {
                if let Some(end) = self.handle(event) {
                    return Ok(end);
                }
            }
            if turn.watched.contains(&self.signalled) {
                let count = self.signals.take();
                self.hurried = count > 1;
                if count > 0 {
                    return Ok(End::Signal);
                }
            }
            self.ending.reap();
            let now = Instant::now();
            // Before anything begins the next turn: what became readable is said once.
            self.tell_manager(now, &turn.watched)?;
            if let Some((process, end)) = self.server.end.take_if(|(_, end)| turn.watched.contains(end)) {
                self.driver.unwatch(end, &process).map_err(CliError::failure)?;
                self.driver.machine_mut().server_ended();
                continue;
            }
            let starts_server = self.server.restart_at.is_some_and(|at| at <= now);
            if starts_server {
                // It is reached by one of the names.
                self.names.look_now(now);
            }
            if self.look_after_names(now)? {
                continue;
            }
            if starts_server {
                self.start_server()?;
                continue;
            }
            // Names that are gone cannot be given to sockets.
            if self.announces && self.names.are_there() {
                self.announce()?;
                continue;
            }
            if self.recover(now) {
                continue;
            }
            let (can_try, can_load) = (self.prober.is_idle(), self.loader.is_none());
            let wake_at = [
                self.server.restart_at,
                Some(self.names.look_at()),
                self.prober.wake_at(),
                self.recovery.wake_at(can_try, can_load),
                self.store.as_mut().and_then(|store| store.wake_at(now)),
            ];
            let left = wake_at.into_iter().flatten().min();
            let left = left.map(|at| at.saturating_duration_since(now));
            let timeout = self.clock.until(turn.wake_at).into_iter().chain(left).min();
            self.driver.wait(timeout).map_err(CliError::failure)?;
        }
    }

    /// Whether names stay for a launcher that gets copies of what is behind them, however we end.
    fn leave_names(&mut self, leaves: bool) {
        self.daemons.leave_names(leaves);
        self.driver.machine_mut().names_stay(leaves);
    }

    /// Keeps the service manager up to date: what it stores for us, and whether all is well.
    fn tell_manager(&mut self, now: Instant, watched: &[Watch]) -> Result<(), CliError> {
        let Some(store) = &mut self.store else {
            return Ok(());
        };
        store.done(&mut self.driver, watched).map_err(CliError::failure)?;
        let armed = self.driver.machine().is_armed();
        store.manager().watchdog(now, armed);
        // Nobody could go on with names that nobody has yet.
        if self.serving {
            let kept = store.lasts();
            store.keep(&mut self.driver, now).map_err(CliError::failure)?;
            if kept && !store.lasts() {
                self.leave_names(false);
            }
        }
        Ok(())
    }

    /// Looks after what an engine could not import and what is lost; true when that did something.
    fn recover(&mut self, now: Instant) -> bool {
        let probed = self.prober.turn(&mut self.driver, now);
        let mut moved = probed.is_some();
        if let Some((suspect, verdict)) = probed {
            self.judge(suspect, verdict);
        }
        if self.prober.is_idle()
            && let Some(suspect) = self.recovery.next_suspect(now)
        {
            moved = true;
            let name = self.name(suspect.daemon);
            let probe = probe(&self.setup.log);
            if let Err(error) = self.prober.start(&mut self.driver, now, suspect, probe) {
                about!(warn, name, "cannot try the import: {error}; nothing changes");
            }
        }
        if self.recovery.is_load_due(now) {
            self.end_digesting();
        }
        if self.loader.is_none() {
            let lost = self.recovery.next_load(now);
            if !lost.is_empty() {
                moved = true;
                if let Err(error) = self.start_loader(Work::Afresh(lost.clone())) {
                    self.not_loaded(&lost, &error.to_string());
                }
            }
        }
        if self.loader.is_none()
            && self.recovery.next_digest(now)
            && let Some((daemons, files)) = self.without_digest()
        {
            moved = true;
            if let Err(error) = self.start_loader(Work::Digest(daemons, files)) {
                self.look_for_digests(&error.to_string());
            }
        }
        moved
    }

    /// An import that works here failed for the engine's own reasons.
    fn judge(&mut self, suspect: Suspect, verdict: Verdict) {
        let Suspect {
            daemon,
            generation,
            why: said,
        } = suspect;
        let name = self.name(daemon);
        match verdict {
            Verdict::Works => about!(
                info,
                name,
                "generation {generation} can be imported, so nothing changes; the engine said: {said}"
            ),
            Verdict::Unclear(why) => about!(
                warn,
                name,
                "whether generation {generation} can be imported is unclear, so nothing changes: {why}; the engine said: {said}"
            ),
            Verdict::Lost(why) => {
                about!(
                    warn,
                    name,
                    "generation {generation} cannot be imported: {why}; the engine said: {said}"
                );
                self.driver.machine_mut().lost(daemon, generation);
            }
        }
    }

    fn not_loaded(&mut self, daemons: &[DaemonId], why: &str) {
        if let Some(pause) = self.recovery.load_ended(Instant::now(), daemons) {
            let (names, seconds) = (self.names(daemons), pause.as_secs());
            warn!(
                daemons = names,
                "{names}: loading afresh failed: {why}; trying again in {seconds} s"
            );
        }
    }

    /// The daemons that hold weights whose digest no loader handed over, and the files that those were
    /// read from; where they differ, those of one kind. Without such files there is always a digest.
    fn without_digest(&self) -> Option<(Vec<DaemonId>, [u8; 32])> {
        let vault = self.driver.machine();
        let files = |daemon: DaemonId| {
            let (_, checkpoint) = (vault.content(daemon)?, &vault.info(daemon)?.key.checkpoint);
            checkpoint.files.filter(|_| checkpoint.digest.is_none())
        };
        let daemons = || 0..self.daemons.claims.len() as DaemonId;
        let first = daemons().find_map(files)?;
        let same = daemons().filter(|daemon| files(*daemon) == Some(first));
        Some((same.collect(), first))
    }

    /// A loader is over; what it left open is made up for.
    fn look_for_digests(&mut self, why: &str) {
        let Some((daemons, _)) = self.without_digest() else {
            return self.recovery.digests_known();
        };
        let pause = self.recovery.digest_missing(Instant::now());
        let (names, seconds) = (self.names(&daemons), pause.as_secs());
        warn!(
            daemons = names,
            "{names}: the checkpoint's digest is missing, so engines that read it from other files wait: {why}; trying again in {seconds} s"
        );
    }

    fn handle(&mut self, event: VaultEvent) -> Option<End> {
        match event {
            VaultEvent::Armed { complete } => {
                // It is also armed with what was loaded afresh.
                if std::mem::take(&mut self.server.deaths) > 0 {
                    self.telling.board.rearmed();
                    info!("re-armed: the server serves again");
                }
                if complete && !self.ready {
                    self.announces = true;
                    self.names.look_now(Instant::now());
                }
            }
            VaultEvent::ServerGone { why } => return self.server_gone(&why),
            VaultEvent::LoaderGone => return self.loader_gone(),
            VaultEvent::LoadFailed { why } => self.load_failure = Some(why),
            VaultEvent::Progress { daemon, done, total } => {
                let name = self.name(daemon);
                self.telling.loading(name, daemon, done, total);
            }
            VaultEvent::Loaded(loaded) => {
                let name = self.name(loaded.daemon);
                self.telling.loaded(name, loaded);
            }
            VaultEvent::Stored { daemon, generation } => {
                let afresh = self.recovery.stored(daemon);
                let how = if afresh { "loaded afresh, " } else { "" };
                about!(info, self.name(daemon), "{how}holding generation {generation}");
            }
            VaultEvent::Published {
                daemon,
                generation,
                replaced,
                tensors,
                bytes,
            } => {
                let instead = replaced.map_or_else(String::new, |old| format!(", instead of {old}"));
                self.echo(
                    daemon,
                    format_args!(
                        "published: holding generation {generation}, {tensors} tensors, {bytes} bytes{instead}"
                    ),
                );
            }
            VaultEvent::Lost { daemon, generation } => {
                let then = match self.setup.source {
                    Source::Checkpoint { .. } => {
                        self.recovery.lost(Instant::now(), daemon);
                        "loading it afresh"
                    }
                    Source::Publishers { .. } => "nothing is served there until it is published again",
                };
                about!(
                    warn,
                    self.name(daemon),
                    "daemon lost: generation {generation} is gone from its device; {then}"
                );
            }
            VaultEvent::Released { daemon, generation } => {
                self.echo(daemon, format_args!("released generation {generation}"));
            }
            VaultEvent::ImportFailed {
                daemon,
                generation,
                why,
            } => {
                let (name, said) = (self.name(daemon), "an engine could not import generation");
                match self.is_echo() {
                    true => about!(debug, name, "{said} {generation}: {why}"),
                    false => about!(warn, name, "{said} {generation}: {why}"),
                }
                let suspect = Suspect {
                    daemon,
                    generation,
                    why,
                };
                self.recovery.suspect(Instant::now(), suspect);
            }
            VaultEvent::StopRequested => return Some(End::Asked),
        }
        None
    }

    /// What others may know of this launcher.
    pub fn board(&self) -> Board {
        self.telling.board.clone()
    }

    /// Says what the server says as well.
    fn echo(&self, daemon: DaemonId, line: fmt::Arguments<'_>) {
        let name = self.name(daemon);
        match self.is_echo() {
            true => about!(debug, name, "{line}"),
            false => about!(info, name, "{line}"),
        }
    }

    /// Whether what the server says as well is in our log already, and said better: it knows which process did it, and when
    /// all of it is done. One that was adopted says so to the log of the launcher that started it.
    fn is_echo(&self) -> bool {
        matches!(self.server.process, Some(ServerProcess::Child(_)))
    }

    fn name(&self, daemon: DaemonId) -> DaemonName {
        DaemonName::new(daemon, self.driver.machine().info(daemon))
    }

    fn names(&self, daemons: &[DaemonId]) -> String {
        let names: Vec<_> = daemons
            .iter()
            .map(|daemon| self.name(*daemon).to_string())
            .collect();
        names.join(", ")
    }

    /// All serve: sockets get their names, and whoever started us gets one line.
    fn announce(&mut self) -> Result<(), CliError> {
        match self.daemons.publish() {
            Ok(()) => {}
            Err(error) if error.is_name_gone() => {
                self.names.look_now(Instant::now());
                return Ok(());
            }
            Err(error) => return Err(CliError::failure(error)),
        }
        self.announces = false;
        if !self.serving {
            self.serving = true;
            self.leave_names(self.store.as_ref().is_some_and(Store::lasts));
        }
        self.ready = true;
        self.telling.board.ready();
        for (daemon, claim) in (0..).zip(&self.daemons.claims) {
            let name = DaemonName::new(daemon, Some(&claim.info));
            about!(info, name, "serving on {}", claim.info.socket);
        }
        let parallel = self.setup.parallel();
        let keys = || self.daemons.claims.iter().map(|claim| &claim.info.key);
        let roles: BTreeSet<_> = keys().map(|key| key.role).collect();
        let ranks = keys().filter(|key| key.role == Role::Target).count();
        let state = match self.setup.source {
            Source::Checkpoint { .. } => "READY",
            // With weights or without: whoever publishes can come now, and whoever asks is answered.
            Source::Publishers { .. } => "SERVING",
        };
        // A closed stdout is no reason to stop serving.
        let _ = say(format_args!(
            "{state} node {}/{} ranks {} roles {} dir {}",
            parallel.node_rank,
            parallel.nnodes,
            ranks,
            roles.len(),
            self.setup.dir.display()
        ));
        if let Some(store) = &mut self.store {
            store.manager().tell("READY=1");
        }
        Ok(())
    }

    /// Nothing of what clients publish is loaded.
    fn start_loader(&mut self, work: Work) -> Result<(), CliError> {
        let Source::Checkpoint { model, checksums } = &self.setup.source else {
            return Ok(());
        };
        let failed = cannot("start the loader");
        let uid = our_uid().map_err(CliError::failure)?;
        let (ours, theirs) = pair().map_err(&failed)?;
        let child = spawn_loader(
            model,
            self.setup.told.place.device,
            *checksums,
            &work,
            theirs,
            &self.setup.log,
        )
        .map_err(&failed)?;
        let peer = Peer { pid: child.id(), uid };
        if let Err(error) = self.driver.add(self.clock.now(), ours, Origin::Loader, peer) {
            self.ending.leave(child);
            return Err(failed(error));
        }
        self.loader = Some(Loading { child, work });
        Ok(())
    }

    /// Ends a loader that has nothing left to do but a digest, which another one can make up for.
    fn end_digesting(&mut self) {
        let is_loaded = self.driver.machine().is_loaded();
        if let Some(Loading { child, work }) = &mut self.loader
            && match work {
                Work::Everything => is_loaded,
                Work::Afresh(_) => false,
                Work::Digest(..) => true,
            }
        {
            *work = Work::Digest(Vec::new(), [0; 32]);
            let _ = child.kill();
        }
    }

    fn loader_gone(&mut self) -> Option<End> {
        let Loading { child, work } = self.loader.take()?;
        end_progress();
        let failure = self.load_failure.take();
        let how = match failure {
            // It may have been given up for what it sent.
            Some(_) => self.ending.kill(child),
            None => self.ending.end(child),
        };
        match work {
            Work::Everything if !self.driver.machine().is_loaded() => {
                return Some(End::Failed(failure.unwrap_or_else(|| {
                    format!("the loader {how} before all weights were loaded; nothing is served")
                })));
            }
            Work::Afresh(daemons) => self.not_loaded(&daemons, failure.as_ref().unwrap_or(&how)),
            Work::Everything | Work::Digest(..) => {}
        }
        self.look_for_digests(&failure.unwrap_or_else(|| format!("the loader {how}")));
        None
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        self.end_children();
    }
}
