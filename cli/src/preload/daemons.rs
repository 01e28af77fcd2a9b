//! The names that a launcher serves under: one lock and one listener for each daemon.

use super::Setup;
use crate::error::CliError;
use crate::node::{self, LocalRank};
use crate::owners::{Living, remove_stale_control, stop_command};
use crate::process::has_ended;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tracing::info;
use weightd_blocking::request::{RequestError, request};
use weightd_core::content::Key;
use weightd_core::machine::{Ends, Held, Inheritance, Inherited, Limits};
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{DaemonInfo, GetStatus, ServerStatus};
use weightd_socket::connect::{ConnectError, connect};
use weightd_socket::listen::{self, ListenError, Pending};
use weightd_socket::lock::{Lock, LockError, Owner, read_owner};
use weightd_socket::path::control_path;
use weightd_socket::seen::{Seen, is_absent};

/// How long an owner may take to say who it is: one that has just started has not written that
/// yet, and one that is ending holds its lock for a moment longer.
const OWNER_SHOWS_WITHIN: Duration = Duration::from_secs(2);

const PAUSE: Duration = Duration::from_millis(20);

/// Everything that a launcher owns in its directory. Dropping it removes every name that it does not
/// [leave](Daemons::leave_names); the locks are freed last.
#[derive(Debug)]
pub struct Daemons {
    pub control: Control,
    pub claims: Vec<Claim>,
    /// The directory of all names.
    pub(super) dir: Option<Seen>,
    /// Lock files may name a control socket that is not there any more.
    pub(super) owners_are_stale: bool,
}

/// Why a name was not locked.
#[derive(Debug)]
pub enum NotLocked {
    Lock(LockError),
    /// It is held by others, who are named.
    Led(String),
}

impl From<NotLocked> for CliError {
    fn from(error: NotLocked) -> CliError {
        match error {
            NotLocked::Lock(error) => CliError::failure(error),
            NotLocked::Led(why) => CliError::Failure(why),
        }
    }
}

/// What became of the wish for names.
#[derive(Debug)]
pub enum Claimed {
    Ours(Daemons),
    /// A server has one of them, and nobody leads it.
    Orphan(Orphan),
}

/// A server whose launcher is gone.
#[derive(Debug)]
pub struct Orphan {
    pub owner: Owner,
    socket: PathBuf,
    pid: u32,
}

/// The right to one daemon's name, and the socket that will get it.
#[derive(Debug)]
pub struct Claim {
    pub info: DaemonInfo,
    pub(super) lock: Lock,
    /// Until it has its name.
    pub(super) pending: Option<Pending>,
    /// From then on.
    pub(super) seen: Option<Seen>,
    /// The name stays when this is dropped: it is, or will be, another's.
    leaves: bool,
}

/// The private socket between a launcher and its server. It belongs to the launcher, so that a new
/// server is reached behind the same name.
#[derive(Debug)]
pub struct Control {
    pub path: PathBuf,
    pub listener: OwnedFd,
    pub(super) lock: Option<Lock>,
    pub(super) seen: Option<Seen>,
    leaves: bool,
}

/// What each daemon of this node is, in the order of their numbers.
pub fn wanted(setup: &Setup, members: Vec<(LocalRank, Key)>) -> Result<Vec<DaemonInfo>, CliError> {
    let info = |(rank, key): (LocalRank, Key)| {
        let (dir, ranks_per_device) = (&setup.dir, setup.parallel().ranks_per_device);
        let socket = node::socket_of(dir, &rank, key.role, ranks_per_device, &setup.told.place)?;
        Ok(DaemonInfo {
            socket: socket.display().to_string(),
            global_rank: rank.placement.global_rank,
            device_uuid: rank.device.uuid(),
            no_release: setup.told.no_release,
            publish: setup.replace(),
            key,
        })
    };
    members.into_iter().map(info).collect()
}

/// Locks every name, or none.
pub fn claim(dir: &Path, wanted: &[DaemonInfo]) -> Result<Claimed, CliError> {
    let mut claims = Vec::with_capacity(wanted.len());
    for info in wanted {
        match Claim::new(dir, info)? {
            Ok(claim) => claims.push(claim),
            Err(orphan) => return Ok(Claimed::Orphan(orphan)),
        }
    }
    let daemons = Daemons {
        control: Control::bind(dir)?,
        claims,
        dir: Seen::at(dir),
        owners_are_stale: false,
    };
    daemons.write_owners()?;
    Ok(Claimed::Ours(daemons))
}

impl Daemons {
    /// The names of an inheritance, with the locks on them. They stay with it until they are
    /// [taken](Daemons::leave_names): nothing has changed as long as that has not been.
    pub fn inherited(
        dir: &Path,
        mut control: Control,
        inheritance: &Inheritance<OwnedFd>,
        locks: Vec<Lock>,
    ) -> Daemons {
        control.leaves |= inheritance.server.is_some();
        let claim = |(daemon, lock): (&Inherited<OwnedFd>, Lock)| Claim {
            info: daemon.info.clone(),
            lock,
            pending: None,
            seen: seen_where_it_leads_to_somebody(Path::new(&daemon.info.socket)),
            leaves: true,
        };
        let claims = inheritance.daemons.iter().zip(locks).map(claim).collect();
        Daemons {
            control,
            claims,
            dir: Seen::at(dir),
            owners_are_stale: false,
        }
    }

    /// Says in each lock file how to reach us.
    pub fn write_owners(&self) -> Result<(), CliError> {
        let control = self.control.path.file_name().unwrap_or_default();
        let owner = Owner {
            control: control.to_string_lossy().into_owned(),
            pid: std::process::id(),
        };
        let written = self
            .claims
            .iter()
            .try_for_each(|claim| claim.lock.write_owner(&owner));
        written.map_err(CliError::failure)
    }

    /// Whether the names of the daemons stay when this is dropped: with copies of lock and listener, another
    /// launcher goes on with them. That of the control socket goes.
    pub fn leave_names(&mut self, leaves: bool) {
        self.control.leaves = false;
        for claim in &mut self.claims {
            claim.leaves = leaves;
        }
    }

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

    /// Gives every socket its name. One that does not get it has none, and no temporary one.
    pub fn publish(&mut self) -> Result<(), ListenError> {
        for claim in &mut self.claims {
            if let Some(pending) = claim.pending.take() {
                pending.publish(&claim.lock)?;
                claim.seen = Seen::at(claim.lock.socket());
            }
        }
        Ok(())
    }
}

impl Claim {
    fn new(dir: &Path, info: &DaemonInfo) -> Result<Result<Claim, Orphan>, CliError> {
        let socket = Path::new(&info.socket);
        let (lock, stale) = match lock(dir, socket)? {
            Ok(locked) => locked,
            Err(orphan) => return Ok(Err(orphan)),
        };
        let lock = nobody_serves(dir, lock)?;
        if let Some(stale) = stale {
            remove_stale_control(&dir.join(stale.control));
        }
        let pending = Some(Pending::bind(&lock).map_err(CliError::failure)?);
        Ok(Ok(Claim {
            info: info.clone(),
            lock,
            pending,
            seen: None,
            leaves: false,
        }))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // While the temporary name is ours.
        self.pending = None;
        if !self.leaves {
            // What cannot be removed is another's by now.
            let _ = listen::remove(&self.lock);
        }
    }
}

impl Control {
    /// That of a server that lives, under the name that it has.
    pub fn inherited(path: PathBuf, ends: &Ends<OwnedFd>) -> Result<Control, CliError> {
        let lock = ends.lock().try_clone().map_err(CliError::failure)?;
        Ok(Control {
            listener: ends.listener().try_clone().map_err(CliError::failure)?,
            lock: Some(Lock::adopt(lock, &path).map_err(CliError::failure)?),
            seen: Seen::at(&path),
            path,
            leaves: true,
        })
    }

    /// Copies of both descriptors, for the vault.
    pub fn ends(&self) -> io::Result<Ends<OwnedFd>> {
        let lock = self.lock.as_ref().expect("it is locked until it is dropped");
        Ok(Ends::new(
            lock.as_fd().try_clone_to_owned()?,
            self.listener.try_clone()?,
        ))
    }

    pub fn bind(dir: &Path) -> Result<Control, CliError> {
        let number = getrandom::u64().map_err(CliError::failure)?;
        let path = control_path(dir, number).map_err(CliError::usage)?;
        let lock = Lock::acquire(&path).map_err(CliError::failure)?;
        let bound = Pending::bind(&lock).and_then(|pending| pending.publish(&lock));
        match bound {
            Ok(listener) => Ok(Control {
                seen: Seen::at(&path),
                path,
                listener,
                lock: Some(lock),
                leaves: false,
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
        if let Some(lock) = self.lock.take()
            && !self.leaves
        {
            let _ = listen::remove(&lock);
            let _ = lock.remove();
        }
    }
}

/// A name that was another's to give: who can be reached by it holds its lock. `None` where nobody can be, as by a directory
/// that lies there.
fn seen_where_it_leads_to_somebody(socket: &Path) -> Option<Seen> {
    match connect(socket) {
        Ok(_) | Err(ConnectError::Busy { .. }) => Seen::at(socket),
        Err(_) => None,
    }
}

/// A lock that was just taken, unless the name is in use: a lock file that somebody removed proves nothing, since whoever
/// made it may serve on. The new one goes then, as if it had never been: the name is not ours.
pub(super) fn nobody_serves(dir: &Path, lock: Lock) -> Result<Lock, CliError> {
    let socket = lock.socket().to_owned();
    let until = Instant::now() + OWNER_SHOWS_WITHIN;
    let status = loop {
        match request(&socket, GetStatus {}, Span::secs(2)) {
            Ok(Message::DaemonStatus(status)) => break status,
            Err(RequestError::Connect(ConnectError::Absent { .. } | ConnectError::Refused { .. })) => {
                return Ok(lock);
            }
            // One that was killed just now may have been about to answer.
            _ if Instant::now() < until => sleep(PAUSE),
            _ => {
                let _ = lock.remove();
                return Err(CliError::Failure(format!(
                    "somebody listens at {} and does not say who, although its lock file is gone: end that process (`ss \
                     -xlp` shows it), and exclude the directory from cleaning",
                    socket.display()
                )));
            }
        }
    };
    let _ = lock.remove();
    let pids = [status.launcher_pid, status.pid]
        .into_iter()
        .filter(|pid| *pid != 0);
    let pids = pids.map(|pid| pid.to_string()).collect::<Vec<_>>().join(" ");
    Err(CliError::Failure(format!(
        "{} is served although its lock file is gone, removed perhaps by a cleaner of {}: end that daemon with \
         `kill {pids}`, and exclude the directory from cleaning",
        socket.display(),
        dir.display()
    )))
}

/// Takes the right to a name, and says who had it last.
pub(super) fn lock(dir: &Path, socket: &Path) -> Result<Result<(Lock, Option<Owner>), Orphan>, NotLocked> {
    let begin = Instant::now();
    let mut within = OWNER_SHOWS_WITHIN;
    // One that nobody finds any more ends when it has looked twice.
    let lost_ends_within = Duration::from_micros(3 * Limits::default().look.0);
    loop {
        let owner = read_owner(socket);
        let mut error = match Lock::acquire(socket) {
            Ok(lock) => return Ok(Ok((lock, owner))),
            Err(error @ LockError::AlreadyOwned { .. }) => NotLocked::Lock(error),
            Err(error) => return Err(NotLocked::Lock(error)),
        };
        let mut unreached = None;
        if let Some(owner) = owner {
            match server_of(dir, &owner) {
                Behind::Server(server) if server.launcher_pid == 0 => {
                    return Ok(Err(Orphan {
                        owner,
                        socket: socket.to_owned(),
                        pid: server.pid,
                    }));
                }
                Behind::Server(server) => {
                    let launcher = server.launcher_pid;
                    error = NotLocked::Led(led(launcher, dir, socket));
                    // The server may not have noticed yet that it has.
                    if !has_ended(launcher) {
                        return Err(error);
                    }
                }
                // A server may be left that lost all its names, and holds this one until it notices.
                Behind::Nothing if within < lost_ends_within && has_ended(owner.pid) && is_absent(socket) => {
                    info!(
                        "waiting for the server of a launcher that was killed (pid {}) to end: the sockets by which it \
                         was found are gone",
                        owner.pid
                    );
                    within = lost_ends_within;
                }
                behind @ (Behind::Nothing | Behind::Silent) => unreached = Some((owner, behind)),
            }
        }
        if begin.elapsed() >= within {
            let held = unreached.and_then(|(owner, behind)| held(dir, socket, &owner, &behind));
            return Err(held.unwrap_or(error));
        }
        sleep(PAUSE);
    }
}

/// That a name is held by its owner, or his server, whom nobody reaches; `None` where neither is seen here.
fn held(dir: &Path, socket: &Path, owner: &Owner, behind: &Behind) -> Option<NotLocked> {
    let name = socket.display();
    let living = Living::of_holder(&dir.join(&owner.control), owner);
    let text = match (living.launcher, living.server) {
        (None, None) => return None,
        (Some(launcher), _) => led(launcher, dir, socket),
        (None, Some(server)) => {
            let why = match behind {
                Behind::Nothing => format!("its control socket is gone: end it with `kill {server}`"),
                _ => format!("it does not answer: try again, or end it with `kill -9 {server}`"),
            };
            format!(
                "the server (pid {server}) of a launcher that was killed (pid {}) already owns {name}, and {why}",
                owner.pid
            )
        }
    };
    Some(NotLocked::Led(text))
}

fn led(launcher: u32, dir: &Path, socket: &Path) -> String {
    format!(
        "launcher {launcher} already owns {}: stop it with {}, or choose another --instance",
        socket.display(),
        stop_command(dir, socket)
    )
}

/// What is behind a control socket.
#[derive(Debug)]
pub enum Behind {
    Server(ServerStatus),
    /// Somebody who does not answer, or a server that was never led.
    Silent,
    Nothing,
}

/// What is behind an owner's control socket.
pub fn server_of(dir: &Path, owner: &Owner) -> Behind {
    match request(&dir.join(&owner.control), GetStatus {}, Span::secs(2)) {
        Ok(Message::ServerStatus(status)) if status.launcher_pid != 0 || status.daemons != 0 => {
            Behind::Server(status)
        }
        Err(RequestError::Connect(ConnectError::Absent { .. })) => Behind::Nothing,
        _ => Behind::Silent,
    }
}

impl Orphan {
    /// Why this launcher does not go on with it, and what to do about it.
    pub fn not_adopted(&self, dir: &Path, why: &str) -> CliError {
        CliError::Failure(format!(
            "the server (pid {}) of a launcher that was killed (pid {}) still serves and already owns {}, and cannot be adopted: {why}; end it with {}",
            self.pid,
            self.owner.pid,
            self.socket.display(),
            stop_command(dir, &self.socket)
        ))
    }
}
