//! Who owns the names in a socket directory, by the lock files.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use weightd_socket::listen;
use weightd_socket::lock::{Lock, read_owner};
use weightd_socket::path::Named;

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

/// Removes the control socket that a launcher left behind, and its lock file; nothing where the
/// launcher lives.
pub fn remove_stale_control(control: &Path) {
    if let Ok(lock) = Lock::acquire(control) {
        // What cannot be removed harms nobody: no later launcher uses this name.
        let _ = listen::remove(&lock);
        let _ = lock.remove();
    }
}
