//! The names that a launcher serves under: one lock and one listener for each daemon.

use crate::args::PreloadArgs;
use crate::error::CliError;
use crate::node::{self, LocalRank};
use crate::owners::remove_stale_control;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};
use weightd_blocking::request::request;
use weightd_core::content::Key;
use weightd_core::machine::Held;
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{DaemonInfo, GetStatus, ServerStatus};
use weightd_socket::listen::{self, Pending};
use weightd_socket::lock::{Lock, LockError, Owner, read_owner};
use weightd_socket::path::control_path;

/// How long an owner may take to say who it is: one that has just started has not written that
/// yet, and one that is ending holds its lock for a moment longer.
const OWNER_SHOWS_WITHIN: Duration = Duration::from_secs(2);

/// Everything that a launcher owns in its directory. Dropping it removes every name; the locks are
/// freed last.
#[derive(Debug)]
pub struct Daemons {
    pub control: Control,
    pub claims: Vec<Claim>,
}

/// The right to one daemon's name, and the socket that will get it.
#[derive(Debug)]
pub struct Claim {
    pub info: DaemonInfo,
    lock: Lock,
    /// Until it has its name.
    pending: Option<Pending>,
}

/// The private socket between a launcher and its server. It belongs to the launcher, so that a new
/// server is reached behind the same name.
#[derive(Debug)]
pub struct Control {
    pub path: PathBuf,
    pub listener: OwnedFd,
    lock: Option<Lock>,
}

/// Locks every name, or none.
pub fn claim(dir: &Path, args: &PreloadArgs, members: Vec<(LocalRank, Key)>) -> Result<Daemons, CliError> {
    let mut claims = Vec::with_capacity(members.len());
    for (rank, key) in members {
        let socket = node::socket_of(
            dir,
            &rank,
            key.role,
            args.model.sharding.parallel.ranks_per_device,
            &args.place,
        )?;
        let info = DaemonInfo {
            socket: socket.display().to_string(),
            global_rank: rank.placement.global_rank,
            device_uuid: rank.device.uuid(),
            no_release: args.no_release,
            key,
        };
        claims.push(Claim::new(dir, &socket, info)?);
    }
    let control = Control::bind(dir)?;
    let owner = Owner {
        control: control
            .path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
        pid: std::process::id(),
    };
    for claim in &claims {
        claim.lock.write_owner(&owner).map_err(CliError::failure)?;
    }
    Ok(Daemons { control, claims })
}

impl Daemons {
    /// Copies of all descriptors, for the vault.
    pub fn held(&self) -> io::Result<Vec<Held<OwnedFd>>> {
        let hold = |claim: &Claim| {
            let pending = claim
                .pending
                .as_ref()
                .expect("a vault is made before sockets have names");
            Ok(Held {
                info: claim.info.clone(),
                lock: claim.lock.as_fd().try_clone_to_owned()?,
                listener: pending.as_fd().try_clone_to_owned()?,
            })
        };
        self.claims.iter().map(hold).collect()
    }

    /// Gives every socket its name.
    pub fn publish(&mut self) -> Result<(), CliError> {
        for claim in &mut self.claims {
            if let Some(pending) = claim.pending.take() {
                pending.publish(&claim.lock).map_err(CliError::failure)?;
            }
        }
        Ok(())
    }
}

impl Claim {
    fn new(dir: &Path, socket: &Path, info: DaemonInfo) -> Result<Claim, CliError> {
        let (lock, stale) = lock(dir, socket)?;
        // A lock file that somebody removed proves nothing: whoever made it may serve on.
        if let Ok(Message::DaemonStatus(status)) = request(socket, GetStatus {}, Span::secs(2)) {
            let pids = [status.launcher_pid, status.pid]
                .into_iter()
                .filter(|pid| *pid != 0);
            let pids = pids.map(|pid| pid.to_string()).collect::<Vec<_>>().join(" ");
            return Err(CliError::Failure(format!(
                "{} is served although its lock file is gone, removed perhaps by a cleaner of {}: end that daemon \
                 with `kill {pids}`, and exclude the directory from cleaning",
                socket.display(),
                dir.display()
            )));
        }
        if let Some(stale) = stale {
            remove_stale_control(&dir.join(stale.control));
        }
        let pending = Some(Pending::bind(&lock).map_err(CliError::failure)?);
        Ok(Claim { info, lock, pending })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // What cannot be removed is another's by now.
        let _ = listen::remove(&self.lock);
    }
}

impl Control {
    fn bind(dir: &Path) -> Result<Control, CliError> {
        let number = getrandom::u64().map_err(CliError::failure)?;
        let path = control_path(dir, number).map_err(CliError::usage)?;
        let lock = Lock::acquire(&path).map_err(CliError::failure)?;
        let bound = Pending::bind(&lock).and_then(|pending| pending.publish(&lock));
        match bound {
            Ok(listener) => Ok(Control {
                path,
                listener,
                lock: Some(lock),
            }),
            Err(error) => {
                let _ = lock.remove();
                Err(CliError::failure(error))
            }
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // What cannot be removed is not ours any more, and nobody else uses this name.
        if let Some(lock) = self.lock.take() {
            let _ = listen::remove(&lock);
            let _ = lock.remove();
        }
    }
}

/// Takes the right to a name, and says who had it last.
fn lock(dir: &Path, socket: &Path) -> Result<(Lock, Option<Owner>), CliError> {
    let until = Instant::now() + OWNER_SHOWS_WITHIN;
    loop {
        let owner = read_owner(socket);
        let error = match Lock::acquire(socket) {
            Ok(lock) => return Ok((lock, owner)),
            Err(error @ LockError::AlreadyOwned { .. }) => error,
            Err(error) => return Err(CliError::failure(error)),
        };
        if let Some(owner) = owner
            && let Some(server) = ask_server(dir, &owner)
        {
            return Err(taken(dir, socket, &owner, &server));
        }
        if Instant::now() >= until {
            return Err(CliError::failure(error));
        }
        sleep(Duration::from_millis(20));
    }
}

/// The server behind an owner's control socket; `None` before it is led for the first time.
fn ask_server(dir: &Path, owner: &Owner) -> Option<ServerStatus> {
    match request(&dir.join(&owner.control), GetStatus {}, Span::secs(2)) {
        Ok(Message::ServerStatus(status)) if status.launcher_pid != 0 || status.daemons != 0 => Some(status),
        _ => None,
    }
}

/// Who has the name, and what to do about it.
fn taken(dir: &Path, socket: &Path, owner: &Owner, server: &ServerStatus) -> CliError {
    let (dir, socket) = (dir.display(), socket.display());
    CliError::Failure(match server.launcher_pid {
        0 => format!(
            "the server (pid {}) of a launcher that was killed (pid {}) still serves and already owns {socket}: end it with `weightd stop --socket-dir {dir}`",
            server.pid, owner.pid
        ),
        launcher => format!(
            "launcher {launcher} already owns {socket}: stop it with `weightd stop --socket-dir {dir}`, or choose another --instance"
        ),
    })
}
