//! The blocking loop of a server.

use crate::clock::Clock;
use crate::driver::Driver;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use weightd_core::machine::{Limits, Origin, Server, ServerEvent};
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
}

/// Serves until a launcher or an operator asks for the end, or `signals` becomes readable. `on_event`
/// gets each event with the server as it is after all events of its turn.
///
/// A server that has a launcher leaves the sockets to it, which may start another server behind
/// them; one without removes those that are still its own.
pub fn serve(
    process: ServerProcess<'_>,
    signals: impl AsFd,
    mut on_event: impl FnMut(&Server<OwnedFd>, &ServerEvent),
) -> io::Result<()> {
    let clock = Clock::start();
    let uid = our_uid().map_err(io::Error::other)?;
    let server = Server::new(
        clock.now(),
        process.version,
        std::process::id(),
        uid,
        process.limits,
    );
    let mut driver = Driver::new(server)?;
    driver.listen(process.control, Origin::Control)?;
    let signals = driver.watch(signals)?;
    let mut led = false;
    loop {
        let turn = driver.turn(clock.now())?;
        let mut end = None;
        for event in &turn.events {
            on_event(driver.machine(), event);
            match event {
                ServerEvent::Led { .. } => led = true,
                ServerEvent::LeaderGone => led = false,
                ServerEvent::Stop { orphaned } => end = Some(*orphaned),
                _ => {}
            }
        }
        if turn.watched.contains(&signals) {
            end = Some(!led);
        }
        if let Some(orphaned) = end {
            if orphaned {
                remove_sockets(driver.machine(), process.control_path);
            }
            return Ok(());
        }
        driver.wait(clock.until(turn.wake_at))?;
    }
}

/// Removes what is still ours. Nobody is left to tell of a failure; the next holder of the lock
/// removes what stays.
fn remove_sockets(server: &Server<OwnedFd>, control: &Path) {
    for (path, lock) in server.sockets() {
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
