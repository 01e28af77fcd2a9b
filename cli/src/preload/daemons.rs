//! The names that a launcher serves under: one lock and one listener for each daemon.

use crate::args::PreloadArgs;
use crate::error::CliError;
use crate::node::{self, LocalRank};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use weightd_blocking::request::request;
use weightd_core::content::Key;
use weightd_core::machine::Held;
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{DaemonInfo, GetStatus};
use weightd_socket::listen::Pending;
use weightd_socket::lock::{Lock, LockError, Owner, read_owner};
use weightd_socket::path::control_path;

/// Everything that a launcher owns in its directory.
#[derive(Debug)]
pub struct Daemons {
    pub claims: Vec<Claim>,
    pub control: Control,
}

/// The right to one daemon's name, and the socket that will get it.
#[derive(Debug)]
pub struct Claim {
    pub info: DaemonInfo,
    pub lock: Lock,
    /// Until it has its name.
    pub pending: Option<Pending>,
}

/// The private socket between a launcher and its server. It belongs to the launcher, so that a new
/// server is reached behind the same name.
#[derive(Debug)]
pub struct Control {
    pub path: PathBuf,
    pub lock: Lock,
    pub listener: std::os::fd::OwnedFd,
}

/// Locks every name, or none.
pub fn claim(
    dir: &Path,
    args: &PreloadArgs,
    ranks: &[LocalRank],
    keys: Vec<Key>,
) -> Result<Daemons, CliError> {
    let mut claims = Vec::with_capacity(ranks.len());
    for (rank, key) in ranks.iter().zip(keys) {
        let socket = node::socket_of(dir, rank, args.model.parallel.ranks_per_device, &args.place)?;
        let stale = read_owner(&socket);
        let lock = Lock::acquire(&socket).map_err(|error| taken(dir, error))?;
        if let Some(stale) = stale {
            remove_stale_control(dir, &stale);
        }
        let pending = Some(Pending::bind(&lock).map_err(CliError::failure)?);
        let info = DaemonInfo {
            socket: socket.display().to_string(),
            global_rank: rank.placement.global_rank,
            device_uuid: rank.device.uuid(),
            no_release: args.no_release,
            key,
        };
        claims.push(Claim { info, lock, pending });
    }
    let control = bind_control(dir)?;
    let name = control
        .path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let owner = Owner {
        control: name,
        pid: std::process::id(),
    };
    for claim in &claims {
        claim.lock.write_owner(&owner).map_err(CliError::failure)?;
    }
    Ok(Daemons { claims, control })
}

impl Daemons {
    /// Copies of all descriptors, for the vault.
    pub fn held(&self) -> std::io::Result<Vec<Held<std::os::fd::OwnedFd>>> {
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

    /// Removes every name. What cannot be removed is another's by now.
    pub fn remove(self) {
        for claim in self.claims {
            let _ = weightd_socket::listen::remove(&claim.lock);
        }
        let _ = weightd_socket::listen::remove(&self.control.lock);
        let _ = self.control.lock.remove();
    }
}

fn bind_control(dir: &Path) -> Result<Control, CliError> {
    let number = getrandom::u64().map_err(CliError::failure)?;
    let path = control_path(dir, number).map_err(CliError::usage)?;
    let lock = Lock::acquire(&path).map_err(CliError::failure)?;
    let pending = Pending::bind(&lock).map_err(CliError::failure)?;
    let listener = pending.publish(&lock).map_err(CliError::failure)?;
    Ok(Control { path, lock, listener })
}

/// The control socket of a launcher whose lock is free now, so that it and its server are dead.
fn remove_stale_control(dir: &Path, stale: &Owner) {
    let path = dir.join(&stale.control);
    if let Ok(lock) = Lock::acquire(&path) {
        let _ = weightd_socket::listen::remove(&lock);
        let _ = lock.remove();
    }
}

/// Who has the name, and what to do about it.
fn taken(dir: &Path, error: LockError) -> CliError {
    let LockError::AlreadyOwned {
        socket,
        owner: Some(owner),
    } = &error
    else {
        return CliError::failure(error);
    };
    let control = dir.join(&owner.control);
    let stop = format!("weightd stop --socket-dir {}", dir.display());
    match request(&control, GetStatus {}, Span::secs(2)) {
        Ok(Message::ServerStatus(status)) if status.launcher_pid == 0 => CliError::failure(format!(
            "the server (pid {}) of a launcher that was killed (pid {}) still serves {} and already owns it: end it with `{stop}`",
            status.pid,
            owner.pid,
            socket.display()
        )),
        Ok(Message::ServerStatus(status)) => CliError::failure(format!(
            "launcher {} already owns {}: stop it with `{stop}`, or choose another --instance",
            status.launcher_pid,
            socket.display()
        )),
        _ => CliError::failure(error),
    }
}
