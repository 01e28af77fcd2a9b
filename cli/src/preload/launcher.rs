//! The launcher's life: start, READY, supervise, end.

use super::children::{Work, describe, probe, spawn_loader, spawn_server};
use super::daemons::Daemons;
use super::probing::Prober;
use super::recovery::{Recovery, Suspect, Verdict};
use crate::args::PreloadArgs;
use crate::error::CliError;
use crate::output::say;
use crate::signals::Signals;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};
use tracing::{info, warn};
use weightd_blocking::Clock;
use weightd_blocking::driver::{Driver, Watch};
use weightd_core::content::Role;
use weightd_core::machine::{Origin, Vault, VaultEvent};
use weightd_core::peer::Peer;
use weightd_core::wire::message::{DaemonId, DaemonInfo};
use weightd_socket::connect::{connect, pair};
use weightd_socket::credentials::our_uid;

/// How long a server may take to end when it is asked.
const SERVER_ENDS_WITHIN: Duration = Duration::from_secs(3);
/// A server that dies before it was armed again is started after twice the pause before, up to a
/// limit.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How often progress is logged, for each rank.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

pub struct Launcher {
    args: PreloadArgs,
    log: String,
    dir: PathBuf,
    clock: Clock,
    driver: Driver<Vault<OwnedFd>>,
    signals: Signals,
    signalled: Watch,
    daemons: Daemons,
    server: Server,
    loader: Option<Loading>,
    load_failure: Option<String>,
    recovery: Recovery,
    prober: Prober,
    progress: BTreeMap<DaemonId, Instant>,
    ready: bool,
    /// A second signal came along with the first.
    hurried: bool,
}

struct Server {
    child: Option<Child>,
    /// Deaths since it was armed last.
    deaths: u32,
    restart_at: Option<Instant>,
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
    /// Starts server and loader. Whatever was started ends when this fails, or when what it
    /// returns is dropped.
    pub fn start(
        args: &PreloadArgs,
        log: &str,
        dir: &Path,
        daemons: Daemons,
        signals: Signals,
    ) -> Result<Launcher, CliError> {
        let epoch = getrandom::u64().map_err(CliError::failure)?;
        let held = daemons.held().map_err(CliError::failure)?;
        let vault = Vault::new(std::process::id(), epoch, held);
        let mut driver = Driver::new(vault).map_err(CliError::failure)?;
        let signalled = driver.watch(&signals).map_err(CliError::failure)?;
        let mut launcher = Launcher {
            args: args.clone(),
            log: log.to_owned(),
            dir: dir.to_owned(),
            clock: Clock::start(),
            driver,
            signals,
            signalled,
            daemons,
            server: Server {
                child: None,
                deaths: 0,
                restart_at: None,
            },
            loader: None,
            load_failure: None,
            recovery: Recovery::default(),
            prober: Prober::default(),
            progress: BTreeMap::new(),
            ready: false,
            hurried: false,
        };
        launcher.start_server()?;
        launcher.start_loader(Work::Everything)?;
        Ok(launcher)
    }

    /// Runs until a signal, a request or a failure ends it; leaves no socket and no process.
    pub fn run(mut self) -> Result<ExitCode, CliError> {
        let end = self.supervise()?;
        let in_order = self.end_children();
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
                if let Some(end) = self.handle(event)? {
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
            let now = Instant::now();
            if self.server.restart_at.is_some_and(|at| at <= now) {
                self.start_server()?;
                continue;
            }
            if self.recover(now) {
                continue;
            }
            let (can_try, can_load) = (self.prober.is_idle(), self.loader.is_none());
            let wake_at = [
                self.server.restart_at,
                self.prober.wake_at(now),
                self.recovery.wake_at(can_try, can_load),
            ];
            let left = wake_at.into_iter().flatten().min();
            let left = left.map(|at| at.saturating_duration_since(now));
            let timeout = self.clock.until(turn.wake_at).into_iter().chain(left).min();
            self.driver.wait(timeout).map_err(CliError::failure)?;
        }
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
            let probe = probe(&self.log);
            if let Err(error) = self.prober.start(&mut self.driver, now, suspect, probe) {
                warn!("{name}: cannot try the import: {error}; nothing changes");
            }
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
            Verdict::Works => info!(
                "{name}: generation {generation} can be imported, so nothing changes; the engine said: {said}"
            ),
            Verdict::Unclear(why) => warn!(
                "{name}: whether generation {generation} can be imported is unclear, so nothing changes: {why}; the engine said: {said}"
            ),
            Verdict::Lost(why) => {
                warn!("{name}: generation {generation} cannot be imported: {why}; the engine said: {said}");
                self.driver.machine_mut().lost(daemon, generation);
            }
        }
    }

    fn not_loaded(&mut self, daemons: &[DaemonId], why: &str) {
        if let Some(pause) = self.recovery.load_ended(Instant::now(), daemons) {
            let (names, seconds) = (self.names(daemons), pause.as_secs());
            warn!("{names}: loading afresh failed: {why}; trying again in {seconds} s");
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
            "{names}: the checkpoint's digest is missing, so engines that read it from other files wait: {why}; trying again in {seconds} s"
        );
    }

    fn handle(&mut self, event: VaultEvent) -> Result<Option<End>, CliError> {
        match event {
            VaultEvent::Armed { complete } if !self.ready => {
                if complete {
                    self.announce()?;
                }
            }
            VaultEvent::Armed { .. } => {
                // It is also armed with what was loaded afresh.
                if std::mem::take(&mut self.server.deaths) > 0 {
                    info!("re-armed: the server serves again");
                }
            }
            VaultEvent::ServerGone { why } => return Ok(self.server_gone(&why)),
            VaultEvent::LoaderGone => return Ok(self.loader_gone()),
            VaultEvent::LoadFailed { why } => self.load_failure = Some(why),
            VaultEvent::Progress { daemon, done, total } => self.log_progress(daemon, done, total),
            VaultEvent::Stored { daemon, generation } => {
                let afresh = self.recovery.stored(daemon);
                let how = if afresh { "loaded afresh, " } else { "" };
                info!("{}: {how}holding generation {generation}", self.name(daemon));
            }
            VaultEvent::Lost { daemon, generation } => {
                self.recovery.lost(Instant::now(), daemon);
                let name = self.name(daemon);
                warn!(
                    "{name}: daemon lost: generation {generation} is gone from its device; loading it afresh"
                );
            }
            VaultEvent::Released { daemon, generation } => {
                info!("{}: released generation {generation}", self.name(daemon));
            }
            VaultEvent::ImportFailed {
                daemon,
                generation,
                why,
            } => {
                let name = self.name(daemon);
                warn!("{name}: an engine could not import generation {generation}: {why:?}");
                let suspect = Suspect {
                    daemon,
                    generation,
                    why,
                };
                self.recovery.suspect(Instant::now(), suspect);
            }
            VaultEvent::StopRequested => return Ok(Some(End::Asked)),
        }
        Ok(None)
    }

    fn name(&self, daemon: DaemonId) -> String {
        let info = self.driver.machine().info(daemon);
        info.map_or_else(|| format!("daemon {daemon}"), rank_and_role)
    }

    fn names(&self, daemons: &[DaemonId]) -> String {
        let names: Vec<_> = daemons.iter().map(|daemon| self.name(*daemon)).collect();
        names.join(", ")
    }

    /// All serve: sockets get their names, and whoever started us gets one line.
    fn announce(&mut self) -> Result<(), CliError> {
        self.daemons.publish()?;
        self.ready = true;
        for claim in &self.daemons.claims {
            info!("{}: serving on {}", rank_and_role(&claim.info), claim.info.socket);
        }
        let parallel = &self.args.model.sharding.parallel;
        let keys = || self.daemons.claims.iter().map(|claim| &claim.info.key);
        let roles: BTreeSet<_> = keys().map(|key| key.role).collect();
        let ranks = keys().filter(|key| key.role == Role::Target).count();
        // A closed stdout is no reason to stop serving.
        let _ = say(format_args!(
            "READY node {}/{} ranks {} roles {} dir {}",
            parallel.node_rank,
            parallel.nnodes,
            ranks,
            roles.len(),
            self.dir.display()
        ));
        Ok(())
    }

    fn log_progress(&mut self, daemon: DaemonId, done: u64, total: u64) {
        let now = Instant::now();
        let last = self.progress.get(&daemon);
        if done < total && last.is_none_or(|last| now.duration_since(*last) >= PROGRESS_EVERY) {
            self.progress.insert(daemon, now);
            let name = self.name(daemon);
            let percent = 100.0 * done as f64 / total.max(1) as f64;
            info!(
                "{name}: loading, {:.2} of {:.2} GB ({percent:.0} %)",
                done as f64 / 1e9,
                total as f64 / 1e9
            );
        }
    }

    /// Before READY, a failure ends the start. After it, it counts as another death: the weights stay.
    fn start_server(&mut self) -> Result<(), CliError> {
        let Err(error) = self.try_start_server() else {
            return Ok(());
        };
        if let Some(mut child) = self.server.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if !self.ready {
            return Err(error);
        }
        self.restart_server(&error.to_string());
        Ok(())
    }

    fn try_start_server(&mut self) -> Result<(), CliError> {
        let failed = |error| CliError::Failure(format!("cannot start the server: {error}"));
        self.server.restart_at = None;
        let listener = self.daemons.control.listener.try_clone().map_err(failed)?;
        let child = spawn_server(&self.daemons.control.path, listener, &self.log).map_err(failed)?;
        self.server.child = Some(child);
        let (socket, peer) = connect(&self.daemons.control.path).map_err(CliError::failure)?;
        self.driver
            .add(self.clock.now(), socket, Origin::Server, peer)
            .map_err(CliError::failure)?;
        Ok(())
    }

    fn start_loader(&mut self, work: Work) -> Result<(), CliError> {
        let failed = |error| CliError::Failure(format!("cannot start the loader: {error}"));
        let uid = our_uid().map_err(CliError::failure)?;
        let (ours, theirs) = pair().map_err(failed)?;
        let mut child = spawn_loader(&self.args, &work, theirs, &self.log).map_err(failed)?;
        let peer = Peer { pid: child.id(), uid };
        if let Err(error) = self.driver.add(self.clock.now(), ours, Origin::Loader, peer) {
            let _ = child.kill();
            let _ = child.wait();
            return Err(failed(error));
        }
        self.loader = Some(Loading { child, work });
        Ok(())
    }

    /// Before READY, a death ends the start. After it, the next server gets all that the vault
    /// holds; engines queue at the listeners meanwhile.
    fn server_gone(&mut self, why: &str) -> Option<End> {
        let how = match self.server.child.take() {
            None => return None,
            Some(mut child) => {
                let _ = child.kill();
                child.wait().map_or_else(|error| error.to_string(), describe)
            }
        };
        let why = match why {
            "" => format!("it {how}"),
            why => format!("given up, since {why}"),
        };
        if !self.ready {
            return Some(End::Failed(format!("the server died before it was ready: {why}")));
        }
        self.restart_server(&format!("the server is gone: {why}"));
        None
    }

    fn restart_server(&mut self, why: &str) {
        let pause = match self.server.deaths {
            0 => Duration::ZERO,
            deaths => LONGEST_PAUSE.min(FIRST_PAUSE * 2u32.pow(deaths.min(10))),
        };
        self.server.deaths += 1;
        warn!("{why}; starting another in {} ms", pause.as_millis());
        self.server.restart_at = Some(Instant::now() + pause);
    }

    fn loader_gone(&mut self) -> Option<End> {
        let Loading { mut child, work } = self.loader.take()?;
        let failure = self.load_failure.take();
        if failure.is_some() {
            // It may have been given up for what it sent.
            let _ = child.kill();
        }
        let how = child.wait().map_or_else(|error| error.to_string(), describe);
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

    /// Ends everything in order: no more loading, then the server; the names go last, with the
    /// daemons. False where the server did not end and had to be killed.
    fn end_children(&mut self) -> bool {
        if let Some(Loading { mut child, .. }) = self.loader.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let Some(mut server) = self.server.child.take() else {
            return true;
        };
        let in_order = self.ask_server_to_end();
        if !in_order {
            warn!("the server (pid {}) did not end and was killed", server.id());
        }
        // Gone already, unless it did not listen.
        let _ = server.kill();
        let _ = server.wait();
        in_order
    }

    /// Lets the server answer whoever asked for the end. A second signal does not wait for it, and is
    /// no failure of the server's. False where it did not end.
    fn ask_server_to_end(&mut self) -> bool {
        let until = Instant::now() + SERVER_ENDS_WITHIN;
        self.driver.machine_mut().stop_server(self.clock.now());
        loop {
            let Ok(turn) = self.driver.turn(self.clock.now()) else {
                return false;
            };
            let gone = |event: &VaultEvent| matches!(event, VaultEvent::ServerGone { .. });
            let again = turn.watched.contains(&self.signalled) && self.signals.take() > 0;
            if turn.events.iter().any(gone) || again || self.hurried {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let wake_at = self.clock.until(turn.wake_at).map_or(left, |wake| wake.min(left));
            if self.driver.wait(Some(wake_at)).is_err() {
                return false;
            }
        }
    }
}

/// For a person: `rank 1`, or `rank 1 draft`.
fn rank_and_role(info: &DaemonInfo) -> String {
    let draft = if info.key.role == Role::Draft {
        " draft"
    } else {
        ""
    };
    format!("rank {}{draft}", info.global_rank)
}

impl Drop for Launcher {
    fn drop(&mut self) {
        self.end_children();
    }
}
