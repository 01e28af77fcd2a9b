//! A server's process.

use crate::clock::Clock;
use crate::driver::{self as server, Driver, Watch};
use crate::found::is_found;
use crate::task::{Task, Turn, run};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use weightd_core::machine::{Limits, Origin, Server, ServerEvent};
use weightd_core::wire::message::Confinement;
use weightd_socket::credentials::our_uid;
use weightd_socket::listen;
use weightd_socket::lock::Lock;

/// What a server process is given by its launcher.
#[derive(Debug)]
pub struct ServerProcess<'a> {
    /// The listener of the control socket.
    pub control: OwnedFd,
    /// The control socket's path, which an orphaned server removes when it ends.
    pub control_path: &'a Path,
    /// weightd's version, for `status`.
    pub version: &'a str,
    /// What clients may claim.
    pub limits: Limits,
    /// What this process gave up before, for `status`.
    pub confinement: Confinement,
}

/// What [`serve`] does.
pub(crate) struct Serving<C> {
    driver: Driver<Server<OwnedFd>>,
    clock: Clock,
    control_path: PathBuf,
    signals: Watch,
    /// What is watched: a copy of our own, whatever becomes of the caller's.
    _signals: OwnedFd,
    on_event: C,
    led: bool,
}

impl<C: FnMut(&Server<OwnedFd>, &ServerEvent)> Serving<C> {
    /// A server that begins with its first turn.
    pub fn new(process: ServerProcess<'_>, signals: impl AsFd, on_event: C) -> io::Result<Serving<C>> {
        let clock = Clock::start();
        let uid = our_uid().map_err(io::Error::other)?;
        let server = Server::new(
            clock.now(),
            process.version,
            std::process::id(),
            uid,
            process.limits,
        )
        .confined(process.confinement);
        let mut driver = Driver::new(server)?;
        driver.listen(process.control, Origin::Control)?;
        let signals = signals.as_fd().try_clone_to_owned()?;
        Ok(Serving {
            signals: driver.watch(&signals)?,
            _signals: signals,
            driver,
            clock,
            control_path: process.control_path.to_owned(),
            on_event,
            led: false,
        })
    }

    /// Whether the server shall end, and whether it is orphaned then.
    fn end(&mut self, turn: &server::Turn<ServerEvent>) -> Option<bool> {
        let mut end = None;
        for event in &turn.events {
            (self.on_event)(self.driver.machine(), event);
            match event {
                ServerEvent::Led { .. } => self.led = true,
                ServerEvent::LeaderGone => self.led = false,
                ServerEvent::Stop { orphaned } => end = Some(*orphaned),
                _ => {}
            }
        }
        let signalled = turn.watched.contains(&self.signals);
        signalled.then_some(!self.led).or(end)
    }
}

impl<C: FnMut(&Server<OwnedFd>, &ServerEvent)> Task for Serving<C> {
    /// The server has ended.
    type Output = ();

    fn turn(&mut self) -> io::Result<Turn<Serving<C>>> {
        let mut now = self.clock.now();
        let mut turn = self.driver.turn(now)?;
        let mut end = self.end(&turn);
        while end.is_none() && turn.events.contains(&ServerEvent::Look) {
            let server = self.driver.machine_mut();
            let found = is_found(server.sockets(), &self.control_path);
            server.looked(now, found);
            now = self.clock.now();
            turn = self.driver.turn(now)?;
            end = self.end(&turn);
        }
        Ok(match end {
            None => Turn::Wait(self.clock.until(turn.wake_at)),
            Some(orphaned) => {
                if orphaned {
                    remove_sockets(self.driver.machine(), &self.control_path);
                }
                Turn::Done(())
            }
        })
    }
}

impl<C> fmt::Debug for Serving<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serving")
            .field("driver", &self.driver)
            .finish_non_exhaustive()
    }
}

impl<C> AsFd for Serving<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driver.as_fd()
    }
}

/// Serves until a launcher or an operator asks for the end, or what was given as `signals` becomes
/// readable; blocks meanwhile. `on_event` gets each event with the server as it is after all events of its turn.
///
/// A server that has a launcher leaves the sockets to it, which may start another server behind
/// them; one without removes those that are still its own. It ends by itself once somebody removed all of
/// them: no engine and no launcher finds it any more, and what it holds would be held for ever.
///
/// # Errors
/// This process has no usable user, or cannot wait.
pub fn serve(
    process: ServerProcess<'_>,
    signals: impl AsFd,
    on_event: impl FnMut(&Server<OwnedFd>, &ServerEvent),
) -> io::Result<()> {
    run(&mut Serving::new(process, signals, on_event)?)
}

/// Removes what is still ours. Nobody is left to tell of a failure; the next holder of the lock
/// removes what stays.
fn remove_sockets(server: &Server<OwnedFd>, control: &Path) {
    for (path, lock) in server.sockets().filter(|_| !server.names_stay()) {
        // Where the lock file was replaced, the name may be another daemon's by now.
        if let Ok(copy) = lock.try_clone()
            && let Ok(lock) = Lock::adopt(copy, Path::new(path))
        {
            let _ = listen::remove(&lock);
        }
    }
    // The launcher had this lock, and is gone. Nobody else uses this name.
    let copy = server
        .control_ends()
        .and_then(|ends| ends.lock().try_clone().ok());
    let lock = match copy {
        Some(copy) => Lock::adopt(copy, control),
        None => Lock::acquire(control),
    };
    if let Ok(lock) = lock {
        let _ = listen::remove(&lock);
        let _ = lock.remove();
    }
}
