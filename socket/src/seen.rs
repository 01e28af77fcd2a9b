//! Whether a name still leads where it led.

use rustix::fs::lstat;
use rustix::io::Errno;
use std::path::{Path, PathBuf};

/// A name, and the file that it led to when it was seen.
///
/// A file's number goes to no other file while the file is in use, also where it has lost its name: the
/// file of a socket, as long as that listens, and a directory, as long as a file that was in it is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Seen {
    /// What lies at `path` now, a symbolic link itself; `None` where that is nothing, or cannot be told.
    pub fn at(path: &Path) -> Option<Seen> {
        let stat = lstat(path).ok()?;
        Some(Seen {
            path: path.to_owned(),
            device: stat.st_dev,
            inode: stat.st_ino,
        })
    }

    /// Whether the name leads there still.
    pub fn is_there(&self) -> bool {
        Seen::at(&self.path).as_ref() == Some(self)
    }
}

/// Whether nothing lies at `path`, for sure: where that cannot be told, something may.
pub fn is_absent(path: &Path) -> bool {
    matches!(lstat(path), Err(Errno::NOENT | Errno::NOTDIR))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_name_that_is_gone_or_leads_to_another_file_or_is_a_link_to_the_same_is_noticed() {
        let temp = tempfile::tempdir().unwrap();
        let (dir, moved) = (temp.path().join("dir"), temp.path().join("moved"));
        fs::create_dir(&dir).unwrap();
        let socket = dir.join("socket");
        assert_eq!(Seen::at(&socket), None);
        assert!(is_absent(&socket) && !is_absent(&dir));
        assert!(!is_absent(&dir.join("x".repeat(300))), "nobody knows");
        let _listener = UnixListener::bind(&socket).unwrap();
        let (name, whole) = (Seen::at(&socket).unwrap(), Seen::at(&dir).unwrap());
        assert!(name.is_there() && whole.is_there());

        fs::rename(&dir, &moved).unwrap();
        assert!(!name.is_there() && !whole.is_there());
        symlink(&moved, &dir).unwrap();
        assert!(name.is_there(), "through the link");
        assert!(!whole.is_there());
        fs::remove_file(&dir).unwrap();
        fs::rename(&moved, &dir).unwrap();
        assert!(name.is_there() && whole.is_there());

        fs::remove_file(&socket).unwrap();
        assert!(!name.is_there());
        // The number of its file is in use, so another socket there is another file.
        let _other = UnixListener::bind(&socket).unwrap();
        assert!(!name.is_there());
    }
}
