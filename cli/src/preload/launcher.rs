//! The launcher's life: start, READY, supervise, end.

use super::children::{describe, spawn_loader, spawn_server};
use super::daemons::Daemons;
use crate::args::PreloadArgs;
use crate::error::CliError;
use crate::output::say;
use crate::signals::Signals;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};
use tracing::{info, warn};
use weightd_blocking::Clock;
use weightd_blocking::driver::{Driver, Watch};
use weightd_core::machine::{Origin, Vault, VaultEvent};
use weightd_core::peer::Peer;
use weightd_core::wire::message::DaemonId;
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
    loader: Option<Child>,
    load_failure: Option<String>,
    progress: BTreeMap<DaemonId, Instant>,
    ready: bool,
}

struct Server {
    child: Option<Child>,
    /// Deaths since it was armed last.
    deaths: u32,
    restart_at: Option<Instant>,
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
            progress: BTreeMap::new(),
            ready: false,
        };
        launcher.start_server()?;
        launcher.start_loader()?;
        Ok(launcher)
    }

    /// Runs until a signal, a request or a failure ends it; leaves no socket and no process.
    pub fn run(mut self) -> Result<ExitCode, CliError> {
        match self.supervise()? {
            End::Signal => Ok(self.signals.exit_code()),
            End::Asked if self.ready => Ok(ExitCode::SUCCESS),
            End::Asked => Err(CliError::failure("asked to stop before all weights were loaded")),
            End::Failed(why) => Err(CliError::Failure(why)),
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
            if turn.watched.contains(&self.signalled) && self.signals.take() > 0 {
                return Ok(End::Signal);
            }
            let mut timeout = self.clock.until(turn.wake_at);
            if let Some(at) = self.server.restart_at {
                let left = at.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    self.start_server()?;
                    continue;
                }
                timeout = Some(timeout.map_or(left, |timeout| timeout.min(left)));
            }
            self.driver.wait(timeout).map_err(CliError::failure)?;
        }
    }

    fn handle(&mut self, event: VaultEvent) -> Result<Option<End>, CliError> {
        match event {
            VaultEvent::Armed { complete } if !self.ready => {
                if complete {
                    self.announce()?;
                }
            }
            VaultEvent::Armed { .. } => {
                self.server.deaths = 0;
                info!("re-armed: the server serves again");
            }
            VaultEvent::ServerGone { why } => return Ok(self.server_gone(&why)),
            VaultEvent::LoaderGone => return Ok(self.loader_gone()),
            VaultEvent::LoadFailed { why } => self.load_failure = Some(why),
            VaultEvent::Progress { daemon, done, total } => self.log_progress(daemon, done, total),
            VaultEvent::Stored { daemon, generation } => {
                info!("{}: holding generation {generation}", self.name(daemon));
            }
            VaultEvent::Released { daemon, generation } => {
                info!("{}: released generation {generation}", self.name(daemon));
            }
            VaultEvent::ImportFailed {
                daemon,
                generation,
                why,
            } => {
                warn!(
                    "{}: an engine could not import generation {generation}: {why}",
                    self.name(daemon)
                );
            }
            VaultEvent::StopRequested => return Ok(Some(End::Asked)),
        }
        Ok(None)
    }

    fn name(&self, daemon: DaemonId) -> String {
        let rank = self.driver.machine().info(daemon).map(|info| info.global_rank);
        rank.map_or_else(|| format!("daemon {daemon}"), |rank| format!("rank {rank}"))
    }

    /// All serve: sockets get their names, and whoever started us gets one line.
    fn announce(&mut self) -> Result<(), CliError> {
        self.daemons.publish()?;
        self.ready = true;
        for claim in &self.daemons.claims {
            info!(
                "rank {}: serving on {}",
                claim.info.global_rank, claim.info.socket
            );
        }
        let parallel = &self.args.model.parallel;
        // A closed stdout is no reason to stop serving.
        let _ = say(format_args!(
            "READY node {}/{} ranks {} roles 1 dir {}",
            parallel.node_rank,
            parallel.nnodes,
            self.daemons.claims.len(),
            self.dir.display()
        ));
        Ok(())
    }

    fn log_progress(&mut self, daemon: DaemonId, done: u64, total: u64) {
        let now = Instant::now();
        let last = self.progress.get(&daemon);
        if done < total && last.is_none_or(|last| now.duration_since(*last) >= PROGRESS_EVERY) {
            self.progress.insert(daemon, now);
            let (name, model) = (self.name(daemon), self.args.model.model.display());
            let percent = 100.0 * done as f64 / total.max(1) as f64;
            info!(
                "{name}: loading {model}, {:.2} of {:.2} GB ({percent:.0} %)",
                done as f64 / 1e9,
                total as f64 / 1e9
            );
        }
    }

    fn start_server(&mut self) -> Result<(), CliError> {
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

    fn start_loader(&mut self) -> Result<(), CliError> {
        let failed = |error| CliError::Failure(format!("cannot start the loader: {error}"));
        let (ours, theirs) = pair().map_err(failed)?;
        let child = spawn_loader(&self.args, theirs, &self.log).map_err(failed)?;
        let peer = Peer {
            pid: child.id(),
            uid: our_uid().map_err(CliError::failure)?,
        };
        self.loader = Some(child);
        self.driver
            .add(self.clock.now(), ours, Origin::Loader, peer)
            .map_err(CliError::failure)?;
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
        let why = if why.is_empty() {
            how
        } else {
            format!("{why}; it {how}")
        };
        if !self.ready {
            return Some(End::Failed(format!(
                "the server died before it was ready: it {why}"
            )));
        }
        let pause = match self.server.deaths {
            0 => Duration::ZERO,
            deaths => LONGEST_PAUSE.min(FIRST_PAUSE * 2u32.pow(deaths.min(10))),
        };
        self.server.deaths += 1;
        warn!("the server {why}; starting another in {} ms", pause.as_millis());
        self.server.restart_at = Some(Instant::now() + pause);
        None
    }

    fn loader_gone(&mut self) -> Option<End> {
        let mut loader = self.loader.take()?;
        if self.load_failure.is_some() {
            // It may have been given up for what it sent.
            let _ = loader.kill();
        }
        let status = loader.wait();
        let loaded = self.driver.machine().is_loaded();
        match (self.load_failure.take(), status) {
            (Some(why), _) if !loaded => Some(End::Failed(why)),
            (Some(why), _) => {
                warn!("after loading: {why}; engines with other files than these are refused");
                None
            }
            (None, _) if loaded => None,
            (None, Ok(status)) => {
                let how = describe(status);
                Some(End::Failed(format!(
                    "the loader {how} before all weights were loaded; nothing is served"
                )))
            }
            (None, Err(error)) => Some(End::Failed(format!("cannot wait for the loader: {error}"))),
        }
    }

    /// Lets the server answer whoever asked for the end. A second signal does not wait for it.
    fn ask_server_to_end(&mut self) {
        let until = Instant::now() + SERVER_ENDS_WITHIN;
        self.driver.machine_mut().stop_server(self.clock.now());
        loop {
            let Ok(turn) = self.driver.turn(self.clock.now()) else {
                return;
            };
            let gone = |event: &VaultEvent| matches!(event, VaultEvent::ServerGone { .. });
            let again = turn.watched.contains(&self.signalled) && self.signals.take() > 0;
            let left = until.saturating_duration_since(Instant::now());
            if turn.events.iter().any(gone) || again || left.is_zero() {
                return;
            }
            let wake_at = self.clock.until(turn.wake_at).map_or(left, |wake| wake.min(left));
            if self.driver.wait(Some(wake_at)).is_err() {
                return;
            }
        }
    }
}

impl Drop for Launcher {
    /// Ends everything in order: no more loading, then the server; the names go last, with the
    /// daemons.
    fn drop(&mut self) {
        if let Some(mut loader) = self.loader.take() {
            let _ = loader.kill();
            let _ = loader.wait();
        }
        if let Some(mut server) = self.server.child.take() {
            self.ask_server_to_end();
            // Gone already, unless it did not listen.
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}
