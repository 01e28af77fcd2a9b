//! Who owns the names in a socket directory, by the lock files.

use crate::process::{is_launcher, server_behind};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use weightd_blocking::request::{RequestError, request};
use weightd_core::machine::AskError;
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{GetStatus, Lead};
use weightd_socket::connect::{ConnectError, connect};
use weightd_socket::listen;
use weightd_socket::lock::{Lock, Owner, read_owner};
use weightd_socket::path::Named;

/// Who lives of those that own a socket's name, as far as its lock file and this pid namespace show: nobody has to
/// answer for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Living {
    pub launcher: Option<u32>,
    pub server: Option<u32>,
}

impl Living {
    pub fn of(socket: &Path) -> Living {
        let Some(owner) = read_owner(socket) else {
            return Living::default();
        };
        let control = socket.with_file_name(&owner.control);
        let mut living = Living::of_holder(&control, &owner);
        // What an owner wrote stays when it has ended, and its number may be another launcher's by now.
        if is_gone(&control) {
            living.launcher = None;
        }
        living
    }

    /// The same of an owner whose lock is known to be held, so that what it wrote is true.
    pub fn of_holder(control: &Path, owner: &Owner) -> Living {
        Living {
            launcher: Some(owner.pid).filter(|pid| is_launcher(*pid)),
            server: server_behind(control),
        }
    }

    /// What to do where they do not answer, to follow what says so; empty where nobody is seen.
    pub fn advice(&self) -> String {
        match (self.launcher, self.server) {
            (None, None) => String::new(),
            (None, Some(pid)) => format!("; try again, or end process {pid} with `kill -9 {pid}`"),
            (Some(launcher), None) => format!(
                "; launcher {launcher} starts a server within 15 s, or else end it with `kill -9 {launcher}`"
            ),
            (Some(launcher), Some(server)) => format!(
                "; launcher {launcher} replaces server {server} within 15 s, or else end both with `kill -9 {launcher} \
                 {server}`"
            ),
        }
    }
}

/// Whether nobody listens at a control socket, as its launcher and server both do until they end.
pub fn is_gone(control: &Path) -> bool {
    matches!(connect(control), Err(ConnectError::Absent { .. }))
}

/// Whether somebody was reached who does not answer.
pub fn is_silent(error: &RequestError) -> bool {
    match error {
        RequestError::Connect(error) => matches!(error, ConnectError::Busy { .. }),
        RequestError::Ask { error, .. } => matches!(error, AskError::Timeout(_)),
        _ => false,
    }
}

/// The command that ends the daemon of this socket, and no other instance's where it has one.
pub fn stop_command(dir: &Path, socket: &Path) -> String {
    let dir = dir.display();
    match Named::from_path(socket).and_then(|named| named.instance) {
        Some(instance) => format!("`weightd stop --socket-dir {dir} --instance {instance}`"),
        None => format!("`weightd stop --socket-dir {dir}`"),
    }
}

/// The control socket of every launcher that ever locked a name in this directory, of one instance
/// or of all, with the daemon sockets whose names it took. Those that are dead are listed too.
pub fn control_sockets(dir: &Path, instance: Option<&str>) -> io::Result<BTreeMap<PathBuf, Vec<PathBuf>>> {
    let mut owned: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
    for entry in std::fs::read_dir(dir)? {
        let lock = entry?.path();
        if lock.extension() != Some("lock".as_ref()) {
            continue;
        }
        let socket = lock.with_extension("");
        let Some(named) = Named::from_path(&socket) else {
            continue;
        };
        let wanted = instance.is_none() || named.instance.as_deref() == instance;
        if let Some(owner) = read_owner(&socket).filter(|_| wanted) {
            owned.entry(dir.join(owner.control)).or_default().push(socket);
        }
    }
    Ok(owned)
}

/// Removes what launchers left behind that were killed before they said in a daemon's lock file who they are.
pub fn remove_stale_controls(dir: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let lock = entry?.path();
        let name = lock.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("weightd-control_") && name.ends_with(".sock.lock") {
            remove_stale_control(&lock.with_extension(""));
        }
    }
    Ok(())
}

/// Removes the control socket that a launcher left behind, and its lock file; nothing where the
/// launcher or its server lives.
pub fn remove_stale_control(control: &Path) {
    if let Ok(lock) = Lock::acquire(control) {
        end_if_never_led(&lock);
        // What cannot be removed harms nobody: no later launcher uses this name.
        let _ = listen::remove(&lock);
        let _ = lock.remove();
    }
}

/// Ends a server whose launcher was killed before it led it: it has no lock and no weights, and would wait
/// for a launcher that does not come. One that serves is left alone: its lock file may have been removed.
/// `lock` is the control socket's: who holds it knows that no launcher is about to lead.
pub fn end_if_never_led(lock: &Lock) {
    let control = lock.socket();
    let patience = Span::secs(1);
    if let Ok(Message::ServerStatus(status)) = request(control, GetStatus {}, patience)
        && status.launcher_pid == 0
        && status.daemons == 0
    {
        // Led by us for a moment, it ends as one whose launcher is gone before it loaded anything.
        let pid = std::process::id();
        let _ = request(control, Lead { pid }, patience);
    }
}
