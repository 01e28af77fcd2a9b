//! The directory that sockets lie in.

use crate::IoError;
use crate::credentials::{OverflowUid, our_uid};
use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, lstat, mkdir, openat};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// A directory that was checked: a directory and no symlink, ours, and, unless an operator named
/// it, closed to group and world.
///
/// Which one it is: what the operator named, else the value of `$WEIGHTD_SOCKET_DIR` (unset and
/// empty are the same), else `/tmp/weightd-UID`. The same for a service and for a shell, which is
/// why `$XDG_RUNTIME_DIR` has no say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketDir {
    path: PathBuf,
}

impl SocketDir {
    /// The server's side: makes the directory with mode 0700 where there is none, and the parents
    /// of a named one too.
    pub fn create(named: Option<&Path>, variable: Option<&OsStr>) -> Result<SocketDir, DirError> {
        let uid = our_uid()?;
        let (path, origin) = resolve(named, variable, uid)?;
        make(&path, origin)?;
        check(path, origin, uid)
    }

    /// The client's side: a directory that is not there is [`DirError::Absent`].
    pub fn open(named: Option<&Path>, variable: Option<&OsStr>) -> Result<SocketDir, DirError> {
        let uid = our_uid()?;
        let (path, origin) = resolve(named, variable, uid)?;
        check(path, origin, uid)
    }

    /// Its absolute path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// There is none.
    #[error("no socket directory {}: no daemon was started with it; start one, or name its --socket-dir", path.display())]
    Absent {
        /// The directory.
        path: PathBuf,
    },
    /// The last component is a symbolic link.
    #[error("socket directory {} is a symbolic link, which could lead anywhere: name the directory itself", path.display())]
    Symlink {
        /// The link.
        path: PathBuf,
    },
    /// It is a file of another kind.
    #[error("socket directory {} is not a directory: remove it, or name another --socket-dir", path.display())]
    NotADirectory {
        /// The file.
        path: PathBuf,
    },
    /// Another user owns it.
    #[error("socket directory {} belongs to uid {owner} and we are uid {ours}: name one of our own with --socket-dir", path.display())]
    ForeignOwner {
        /// The directory.
        path: PathBuf,
        /// Its owner's uid.
        owner: u32,
        /// Our uid.
        ours: u32,
    },
    /// Group or world can enter it, and no operator asked for that.
    #[error(
        "socket directory {} has mode {mode:04o}, which lets other users in: chmod 0700 it, or name it with --socket-dir if that is meant",
        path.display()
    )]
    OpenToOthers {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// We are nobody in particular.
    #[error(transparent)]
    Uid(#[from] OverflowUid),
    /// A call failed.
    #[error(transparent)]
    Io(#[from] IoError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Named,
    Derived,
}

fn resolve(named: Option<&Path>, variable: Option<&OsStr>, uid: u32) -> Result<(PathBuf, Origin), DirError> {
    let variable = variable.filter(|value| !value.is_empty()).map(Path::new);
    match named.or(variable) {
        Some(path) => {
            let absolute =
                std::path::absolute(path).map_err(IoError::when("make absolute the path", path))?;
            // Collecting drops a trailing slash, with which a symlink would be followed after all.
            Ok((absolute.components().collect(), Origin::Named))
        }
        None => Ok((PathBuf::from(format!("/tmp/weightd-{uid}")), Origin::Derived)),
    }
}

fn make(path: &Path, origin: Origin) -> Result<(), IoError> {
    if let (Origin::Named, Some(parent)) = (origin, path.parent()) {
        let made = std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(parent);
        made.map_err(IoError::when("make the directory", parent))?;
    }
    match mkdir(path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(IoError::when("make the directory", path)(errno)),
    }
}

/// Looks at what an open descriptor refers to, so that what was checked is what the name led to.
fn check(path: PathBuf, origin: Origin, ours: u32) -> Result<SocketDir, DirError> {
    // O_PATH: a foreign directory is to be named as that, not as one that cannot be read.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = openat(CWD, &path, flags, Mode::empty()).and_then(|dir| Ok((fstat(&dir)?, dir)));
    let (stat, dir) = match opened {
        Ok(opened) => opened,
        Err(Errno::NOENT) => return Err(DirError::Absent { path }),
        Err(Errno::NOTDIR) => {
            let is_symlink =
                lstat(&path).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink);
            return Err(if is_symlink {
                DirError::Symlink { path }
            } else {
                DirError::NotADirectory { path }
            });
        }
        Err(errno) => return Err(IoError::when("open the socket directory", &path)(errno).into()),
    };
    if stat.st_uid != ours {
        return Err(DirError::ForeignOwner {
            path,
            owner: stat.st_uid,
            ours,
        });
    }
    if origin == Origin::Derived && stat.st_mode & 0o077 != 0 {
        return Err(DirError::OpenToOthers {
            path,
            mode: stat.st_mode & 0o7777,
        });
    }
    // Where we may not look a name up, nothing in it is absent.
    match openat(&dir, ".", flags, Mode::empty()) {
        Ok(_) => Ok(SocketDir { path }),
        Err(errno) => Err(IoError::when("look into the socket directory", &path)(errno).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn ours() -> u32 {
        our_uid().unwrap()
    }

    fn chmod(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn the_operators_name_comes_before_the_variable_and_that_before_the_default() {
        let variable = OsStr::new("/b");
        let resolved = |named, variable| resolve(named, variable, 7).unwrap();
        assert_eq!(
            resolved(Some(Path::new("/a/")), Some(variable)),
            ("/a".into(), Origin::Named)
        );
        assert_eq!(resolved(None, Some(variable)), ("/b".into(), Origin::Named));
        assert_eq!(
            resolved(None, Some(OsStr::new(""))),
            ("/tmp/weightd-7".into(), Origin::Derived)
        );
        assert_eq!(resolved(None, None), ("/tmp/weightd-7".into(), Origin::Derived));
    }

    #[test]
    fn a_relative_name_is_made_absolute_and_an_empty_one_is_refused() {
        let (path, _) = resolve(Some(Path::new("sockets/.")), None, 7).unwrap();
        assert_eq!(path, std::env::current_dir().unwrap().join("sockets"));
        assert!(matches!(
            resolve(Some(Path::new("")), None, 7),
            Err(DirError::Io(_))
        ));
    }

    #[test]
    fn a_named_directory_is_made_private_with_its_parents() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("a/b/c");
        let dir = SocketDir::create(Some(&path), None).unwrap();
        assert_eq!(dir.path(), path);
        for made in [&path, path.parent().unwrap()] {
            assert_eq!(made.metadata().unwrap().permissions().mode() & 0o7777, 0o700);
        }
        assert_eq!(SocketDir::create(Some(&path), None).unwrap(), dir);
        assert_eq!(SocketDir::open(None, Some(path.as_os_str())).unwrap(), dir);
    }

    #[test]
    fn the_parents_of_a_derived_directory_are_not_made() {
        let temp = tempfile::tempdir().unwrap();
        assert!(make(&temp.path().join("absent/weightd"), Origin::Derived).is_err());
        assert!(!temp.path().join("absent").exists());
        let path = temp.path().join("weightd");
        make(&path, Origin::Derived).unwrap();
        check(path, Origin::Derived, ours()).unwrap();
    }

    #[test]
    fn a_client_is_told_that_there_is_no_directory() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("absent");
        assert!(matches!(
            SocketDir::open(Some(&path), None),
            Err(DirError::Absent { .. })
        ));
        assert!(!path.exists());
    }

    #[test]
    fn a_symlink_is_refused_whoever_named_it_and_with_a_trailing_slash_too() {
        let temp = tempfile::tempdir().unwrap();
        let (real, link) = (temp.path().join("real"), temp.path().join("link"));
        make(&real, Origin::Derived).unwrap();
        symlink(&real, &link).unwrap();
        let slashed = temp.path().join("link/");
        for path in [&link, &slashed] {
            assert!(matches!(
                SocketDir::open(Some(path), None),
                Err(DirError::Symlink { .. })
            ));
            assert!(matches!(
                SocketDir::create(Some(path), None),
                Err(DirError::Symlink { .. })
            ));
        }
        assert!(matches!(
            check(link, Origin::Derived, ours()),
            Err(DirError::Symlink { .. })
        ));
        let dangling = temp.path().join("dangling");
        symlink(temp.path().join("nowhere"), &dangling).unwrap();
        assert!(matches!(
            SocketDir::create(Some(&dangling), None),
            Err(DirError::Symlink { .. })
        ));
        assert!(!temp.path().join("nowhere").exists());
    }

    #[test]
    fn a_file_in_its_place_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("file");
        std::fs::write(&path, "").unwrap();
        assert!(matches!(
            SocketDir::create(Some(&path), None),
            Err(DirError::NotADirectory { .. })
        ));
        assert!(matches!(
            SocketDir::open(Some(&path), None),
            Err(DirError::NotADirectory { .. })
        ));
    }

    #[test]
    fn access_by_others_is_refused_in_a_derived_directory_and_allowed_in_a_named_one() {
        let temp = tempfile::tempdir().unwrap();
        for mode in [0o701, 0o710, 0o770, 0o755, 0o1777] {
            chmod(temp.path(), mode);
            let path = temp.path().to_owned();
            match check(path.clone(), Origin::Derived, ours()) {
                Err(DirError::OpenToOthers { mode: reported, .. }) => assert_eq!(reported, mode),
                other => panic!("mode {mode:o}: {other:?}"),
            }
            check(path, Origin::Named, ours()).unwrap();
        }
    }

    #[test]
    fn a_foreign_owner_is_refused_whoever_named_it() {
        if ours() != 0 {
            eprintln!("skipped: only root can make a directory of another user");
            return;
        }
        let temp = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(temp.path(), Some(12_345), None).unwrap();
        for origin in [Origin::Named, Origin::Derived] {
            match check(temp.path().to_owned(), origin, ours()) {
                Err(DirError::ForeignOwner {
                    owner: 12_345,
                    ours: 0,
                    ..
                }) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}
