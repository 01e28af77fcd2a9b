//! `weightd stop`: ends launchers and servers, also a server whose launcher was killed, and a
//! launcher that is still loading.

use crate::args::StopArgs;
use crate::error::CliError;
use crate::node::{self, no_daemons};
use crate::output::say;
use crate::owners::{
    Living, control_sockets, end_if_never_led, is_gone, is_silent, remove_stale_control,
    remove_stale_controls,
};
use crate::status::{Found, find};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};
use tracing::warn;
use weightd_blocking::request::{RequestError, request};
use weightd_core::machine::AskError;
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{ErrorCode, GetStatus, Stop};
use weightd_socket::connect::ConnectError;
use weightd_socket::listen;
use weightd_socket::lock::{Lock, LockError, Owner, read_owner};

const ENDS_WITHIN: Duration = Duration::from_secs(30);
const LOCKS_FREE_WITHIN: Duration = Duration::from_secs(1);
const ASK_AGAIN: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(20);

pub fn run(args: &StopArgs) -> Result<ExitCode, CliError> {
    let dir = match node::open_dir_if_there(&args.place)? {
        Ok(dir) => dir,
        Err(absent) => {
            say(no_daemons(&args.place, &absent))?;
            return Ok(ExitCode::SUCCESS);
        }
    };
    let (_, before) = find(&args.place)?;
    let owned =
        control_sockets(dir.path(), args.place.instance.as_deref()).map_err(node::cannot_list(dir.path()))?;
    let (mut stopped, mut failed) = (0, Vec::new());
    for (control, sockets) in &owned {
        match stop(control, sockets) {
            Ok(number) => stopped += number,
            Err(error) => failed.push((sockets, error)),
        }
    }
    if args.place.instance.is_none() {
        remove_stale_controls(dir.path()).map_err(node::cannot_list(dir.path()))?;
    }
    let is_told = |socket| failed.iter().any(|(sockets, _)| sockets.contains(socket));
    let mut wrong: Vec<String> = failed.iter().map(|(_, error)| error.to_string()).collect();
    let rest = before.iter().filter(|found| !is_told(&found.socket));
    wrong.extend(rest.filter_map(unreachable));
    match stopped {
        0 if !wrong.is_empty() => {}
        0 => say(no_daemons(&args.place, dir.path()))?,
        1 => say("stopped 1 daemon")?,
        number => say(format_args!("stopped {number} daemons"))?,
    }
    match wrong.is_empty() {
        true => Ok(ExitCode::SUCCESS),
        false => Err(CliError::Failure(wrong.join("; "))),
    }
}

/// Stops a launcher and its server, whoever of them is there, and waits until its daemons' names are free; how many.
fn stop(control: &Path, sockets: &[PathBuf]) -> Result<usize, CliError> {
    let until = Instant::now() + ENDS_WITHIN;
    if !ask_to_stop(control, sockets, until)? {
        return match remove_stale(control, sockets) {
            Some(held) => out_of_reach(control, held),
            None => Ok(0),
        };
    }
    for socket in sockets {
        wait_until_free(control, socket, until)?;
    }
    // A launcher that was killed could not.
    remove_stale_control(control);
    Ok(sockets.len())
}

/// Of a name that is held though nobody listens at the control socket: what to do, where it is seen who holds it.
fn out_of_reach(control: &Path, socket: &Path) -> Result<usize, CliError> {
    let living = read_owner(socket).map(|owner| Living::of_holder(control, &owner));
    // The launcher ends its server, and a server alone is ended by itself.
    match living.and_then(|living| living.launcher.or(living.server)) {
        Some(pid) => Err(CliError::Failure(format!(
            "{} is held by process {pid}, whose control socket is gone, removed perhaps by a cleaner: end it with \
             `kill {pid}`, or where it hangs `kill -9 {pid}`",
            socket.display()
        ))),
        None => Ok(0),
    }
}

/// Of a daemon that served before and whose server still does: what to do, since no lock file leads to it.
fn unreachable(before: &Found) -> Option<String> {
    let server = before.status.as_ref().ok()?.pid;
    let Ok(Message::DaemonStatus(now)) = request(&before.socket, GetStatus {}, Span::secs(1)) else {
        return None;
    };
    // The launcher ends its server, and a server alone is ended by itself.
    let pid = if now.launcher_pid == 0 {
        now.pid
    } else {
        now.launcher_pid
    };
    let socket = before.socket.display();
    (now.pid == server).then(|| {
        format!(
            "{socket} is served by process {pid}, which no lock file leads to, removed or changed perhaps by a cleaner: \
             end it with `kill {pid}`"
        )
    })
}

/// Removes the names of a launcher and a server that were both killed; not those that are another
/// launcher's by now. One that they hold still is returned.
fn remove_stale<'a>(control: &Path, sockets: &'a [PathBuf]) -> Option<&'a Path> {
    // The locks of a process that is ending are free a moment after nobody listens any more.
    let until = Instant::now() + LOCKS_FREE_WITHIN;
    let is_theirs = |owner: &Owner| control.ends_with(&owner.control);
    let mut held = None;
    for socket in sockets {
        loop {
            match Lock::acquire(socket) {
                // What cannot be removed is replaced by the next launcher.
                Ok(lock) => {
                    let _ = listen::remove(&lock);
                    break;
                }
                Err(LockError::AlreadyOwned { owner, .. }) if owner.as_ref().is_some_and(is_theirs) => {
                    if Instant::now() >= until {
                        held = Some(socket.as_path());
                        break;
                    }
                    sleep(PAUSE);
                }
                Err(_) => break,
            }
        }
    }
    remove_stale_control(control);
    held
}

/// False where nobody is left to be asked.
fn ask_to_stop(control: &Path, sockets: &[PathBuf], until: Instant) -> Result<bool, CliError> {
    loop {
        match request(control, Stop {}, Span::secs(5)) {
            Ok(_) => return Ok(true),
            Err(RequestError::Connect(ConnectError::Absent { .. })) => return Ok(false),
            // A server that is being replaced.
            Err(RequestError::Ask {
                error:
                    AskError::Broken(_)
                    | AskError::Failed {
                        code: ErrorCode::Busy,
                        ..
                    },
                ..
            }) if Instant::now() < until => {
                // Or one whose launcher was killed before it led it.
                if let Ok(lock) = Lock::acquire(control) {
                    end_if_never_led(&lock);
                }
                sleep(PAUSE);
            }
            Err(error) => {
                let silent = sockets.first().filter(|_| is_silent(&error));
                let advice = silent.map_or_else(String::new, |socket| Living::of(socket).advice());
                return Err(CliError::Failure(format!("{error}{advice}")));
            }
        }
    }
}

/// The lock on a socket's name lives as long as launcher and server. The request is made again every
/// now and then: a server that died with it took it along.
fn wait_until_free(control: &Path, socket: &Path, until: Instant) -> Result<(), CliError> {
    let mut ask_at = Instant::now() + ASK_AGAIN;
    loop {
        match Lock::acquire(socket) {
            // They remove it themselves, unless they were killed meanwhile.
            Ok(lock) => {
                if let Err(error) = listen::remove(&lock) {
                    warn!("in the way of the next start: {error}");
                }
                return Ok(());
            }
            // Whether it is held cannot be told.
            Err(error @ LockError::Foreign { .. }) if is_gone(control) => {
                warn!("in the way of the next start: {error}");
                return Ok(());
            }
            Err(LockError::Foreign { .. }) if Instant::now() < until => sleep(PAUSE),
            Err(LockError::AlreadyOwned { .. }) if Instant::now() < until => {
                if Instant::now() >= ask_at {
                    // Whether it was heard shows in the lock.
                    let _ = request(control, Stop {}, Span::secs(1));
                    ask_at = Instant::now() + ASK_AGAIN;
                }
                sleep(PAUSE);
            }
            Err(LockError::AlreadyOwned { owner, .. }) => {
                let seconds = ENDS_WITHIN.as_secs();
                let launcher = owner.map_or("its launcher".to_owned(), |owner| {
                    format!("launcher {}", owner.pid)
                });
                return Err(CliError::Failure(format!(
                    "{} is still served {seconds} s after {launcher} was asked to stop: see its log, or kill it",
                    socket.display()
                )));
            }
            Err(error) => return Err(CliError::failure(error)),
        }
    }
}
