//! Whether a server can still be found by its names.

use std::os::fd::AsFd;
use std::path::Path;
use weightd_socket::lock::{Standing, standing};
use weightd_socket::seen::is_absent;

/// Whether an engine finds one of the daemons, which are given by path and lock, or the next launcher finds their server:
/// by the lock file of a daemon, which names the `control` socket. What cannot be told counts as found.
pub(crate) fn is_found<'a>(daemons: impl IntoIterator<Item = (&'a str, impl AsFd)>, control: &Path) -> bool {
    let mut daemons = daemons.into_iter();
    daemons.any(|(socket, lock)| {
        let socket = Path::new(socket);
        match standing(lock, socket) {
            Standing::Replaced => false,
            Standing::Removed => !is_absent(socket),
            Standing::Ours | Standing::Unknown => !(is_absent(socket) && is_absent(control)),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use weightd_socket::lock::Lock;

    #[test]
    fn a_server_is_found_by_a_socket_of_its_own_or_by_a_lock_file_that_leads_to_its_control_socket() {
        for (lock, socket, control, found) in [
            ("ours", true, true, true),
            ("ours", true, false, true),
            ("ours", false, true, true),
            ("ours", false, false, false),
            ("removed", true, false, true),
            ("removed", false, true, false),
            ("replaced", true, true, false),
            ("unknown", false, true, true),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let name = match lock {
                // No file has such a name.
                "unknown" => "x".repeat(300),
                _ => "s.sock".to_owned(),
            };
            let (path, control_path) = (dir.path().join(name), dir.path().join("control.sock"));
            let held = Lock::acquire(&dir.path().join("s.sock")).unwrap();
            if socket {
                File::create(&path).unwrap();
            }
            if control {
                File::create(&control_path).unwrap();
            }
            if ["removed", "replaced"].contains(&lock) {
                fs::remove_file(held.path()).unwrap();
            }
            if lock == "replaced" {
                File::create(held.path()).unwrap();
            }
            let daemons = [(path.to_str().unwrap(), &held)];
            assert_eq!(
                is_found(daemons, &control_path),
                found,
                "{lock} {socket} {control}"
            );
        }
    }

    #[test]
    fn one_daemon_that_is_found_is_enough() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a.sock", "b.sock"].map(|name| dir.path().join(name));
        let locks = paths.each_ref().map(|path| Lock::acquire(path).unwrap());
        let daemons = || paths.iter().map(|path| path.to_str().unwrap()).zip(&locks);
        let control = dir.path().join("control.sock");
        assert!(!is_found(daemons(), &control));
        File::create(&paths[1]).unwrap();
        assert!(is_found(daemons(), &control));
    }
}
