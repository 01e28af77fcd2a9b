//! The launcher's server: started, waited for, and replaced.

use super::{End, Launcher};
use crate::error::CliError;
use crate::preload::cannot;
use crate::preload::children::{ServerProcess, spawn_server};
use crate::process;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use tracing::warn;
use weightd_blocking::driver::Watch;
use weightd_core::machine::Origin;
use weightd_socket::connect::connect;

/// A server that dies before it was armed again is started after twice the pause before, up to a
/// limit.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

pub(super) struct Server {
    pub process: Option<ServerProcess>,
    /// Its end, while it may not have accepted our connection.
    pub end: Option<(OwnedFd, Watch)>,
    /// Deaths since it was armed last.
    pub deaths: u32,
    pub restart_at: Option<Instant>,
    /// It was asked to end, so that the next one gets other names.
    makes_room: bool,
}

impl Server {
    pub fn new(process: Option<ServerProcess>) -> Server {
        Server {
            process,
            end: None,
            deaths: 0,
            restart_at: None,
            makes_room: false,
        }
    }
}

impl Launcher {
    /// Before READY, a failure ends the start. After it, it counts as another death: the weights stay. That a name
    /// is gone is nobody's failure: the next start comes when that was looked after.
    pub(super) fn start_server(&mut self) -> Result<(), CliError> {
        let Err(error) = self.try_start_server() else {
            return Ok(());
        };
        if let Some(process) = self.server.process.take() {
            process.end(&mut self.ending);
        }
        if self.is_a_name_gone() {
            self.server.restart_at = Some(self.names.look_at());
            return Ok(());
        }
        if !self.serving {
            return Err(error);
        }
        self.restart_server(&error.to_string());
        Ok(())
    }

    fn try_start_server(&mut self) -> Result<(), CliError> {
        let failed = cannot("start the server");
        self.server.restart_at = None;
        let listener = self.daemons.control.listener.try_clone().map_err(&failed)?;
        let child = spawn_server(
            &self.daemons.control.path,
            listener,
            self.setup.told.runtime,
            &self.setup.log,
        )
        .map_err(&failed)?;
        let pid = child.id();
        self.server.process = Some(ServerProcess::Child(child));
        self.watch_end(pid).map_err(&failed)?;
        let (socket, peer) = connect(&self.daemons.control.path).map_err(CliError::failure)?;
        self.driver
            .add(self.clock.now(), socket, Origin::Server, peer)
            .map_err(&failed)?;
        Ok(())
    }

    /// Waits for the end of a server that may die before it accepts our connection. (Kernels before 5.3 cannot
    /// say it, and the connection's deadline does.)
    fn watch_end(&mut self, pid: u32) -> io::Result<()> {
        if let Some((process, end)) = self.server.end.take() {
            self.driver.unwatch(end, &process)?;
        }
        if let Ok(process) = process::open(pid) {
            let end = self.driver.watch(&process)?;
            self.server.end = Some((process, end));
        }
        Ok(())
    }

    /// Before READY, a death ends the start. After it, the next server gets all that the vault
    /// holds; engines queue at the listeners meanwhile.
    pub(super) fn server_gone(&mut self, why: &str) -> Option<End> {
        let how = self.server.process.take()?.end(&mut self.ending);
        if std::mem::take(&mut self.server.makes_room) {
            // Counted, so that it is told when the next one serves.
            self.server.deaths += 1;
            self.server.restart_at = Some(Instant::now());
            return None;
        }
        let why = match why {
            "" => format!("it {how}"),
            why => format!("given up, since {why}"),
        };
        if !self.serving {
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
        self.telling.board.server_restarted();
        warn!("{why}; starting another in {} ms", pause.as_millis());
        self.server.restart_at = Some(Instant::now() + pause);
    }

    /// The server that there is makes room for one with all that the vault has by now. One that does not end
    /// is killed when its answer is due.
    pub(super) fn replace_server(&mut self) {
        if self.server.process.is_some() {
            self.server.makes_room = true;
            self.driver.machine_mut().stop_server(self.clock.now());
        }
    }
}
