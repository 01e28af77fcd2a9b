//! Files opened once, and what the kernel said of them then.

use crate::digest::{self, CHUNK_BYTES, Hash};
use crate::error::CheckpointError;
use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// One file of a checkpoint, opened once (close-on-exec) and kept open.
#[derive(Debug)]
pub struct SourceFile {
    /// Its name in the checkpoint's directory.
    pub name: String,
    /// Its path, for messages; the bytes are read through `file`.
    pub path: PathBuf,
    /// The open file, for positioned reads.
    pub file: File,
    /// Its size in bytes when it was opened.
    pub bytes: u64,
    /// What the kernel said of it when it was opened.
    pub stat: FileStat,
    /// Whether `stat` is bound to change when the bytes do; see `identity`.
    pub(crate) steady: bool,
    /// The number that its file system has from its UUID; 0 where that is not known.
    pub(crate) system: u64,
    /// What was parsed of it.
    pub(crate) parsed: Parsed,
}

/// The bytes at the start of a file that were read to be parsed. What is loaded follows from them, so
/// whoever reads them again must find the same.
#[derive(Debug, Default)]
pub(crate) struct Parsed {
    /// How many.
    pub bytes: u64,
    /// The hash of each [`CHUNK_BYTES`] of them.
    hashes: Vec<Hash>,
}

impl Parsed {
    fn of(bytes: &[u8]) -> Parsed {
        Parsed {
            bytes: bytes.len() as u64,
            hashes: bytes.chunks(CHUNK_BYTES as usize).map(digest::hash).collect(),
        }
    }

    /// The hashes of its chunks.
    pub fn hashes(&self) -> &[Hash] {
        &self.hashes
    }

    /// The hash of what was parsed of chunk `number`, and how many bytes that is.
    pub fn chunk(&self, number: u64) -> Option<(Hash, u64)> {
        let hash = self.hashes.get(usize::try_from(number).ok()?)?;
        Some((*hash, CHUNK_BYTES.min(self.bytes - number * CHUNK_BYTES)))
    }
}

/// The facts by which a file is recognized as the same, unchanged one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// Device number.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Size in bytes.
    pub size: u64,
    /// Last change of the bytes; a program can set it back.
    pub mtime: FileTime,
    /// Last change of bytes or inode; only the kernel sets it.
    pub ctime: FileTime,
}

/// A file time: seconds since the Unix epoch, and nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileTime {
    /// Seconds since the Unix epoch.
    pub seconds: i64,
    /// Nanoseconds within the second.
    pub nanos: u32,
}

impl SourceFile {
    /// Opens `name` in the directory `dir`, following symbolic links. Anything but a regular file
    /// is refused, and never waited for. `None`: there is no such file.
    pub(crate) fn open(
        dir: &OwnedFd,
        dir_path: &Path,
        name: &str,
    ) -> Result<Option<SourceFile>, CheckpointError> {
        let path = dir_path.join(name);
        let fd = match open_regular(dir, Path::new(name)) {
            Ok(fd) => fd,
            // A dangling link is a file that is missing its bytes, not one that is not there.
            Err(NotOpened::Io(_, Errno::NOENT)) if is_link(dir, name) => {
                return Err(CheckpointError::DanglingLink { path });
            }
            Err(NotOpened::Io(_, Errno::NOENT)) => return Ok(None),
            Err(NotOpened::Io(what, errno)) => return Err(CheckpointError::io(what, &path, errno)),
            Err(NotOpened::Irregular(kind)) => return Err(CheckpointError::NotRegular { path, kind }),
        };
        let system = crate::identity::settle(&fd);
        let stat = rustix::fs::fstat(&fd).map_err(|errno| CheckpointError::io("stat", &path, errno))?;
        let stat = FileStat::from(&stat);
        let steady = system.is_some() && crate::identity::is_at_rest(&fd, &stat);
        Ok(Some(SourceFile {
            name: name.to_owned(),
            path,
            file: File::from(fd),
            bytes: stat.size,
            stat,
            steady,
            system: system.unwrap_or(0),
            parsed: Parsed::default(),
        }))
    }

    /// The whole file, to be parsed, if it holds `cap` bytes or fewer.
    pub(crate) fn read_all(&mut self, cap: u64) -> Result<Vec<u8>, CheckpointError> {
        if self.bytes > cap {
            let (path, bytes) = (self.path.clone(), self.bytes);
            return Err(CheckpointError::FileTooLarge { path, bytes, cap });
        }
        self.read_first(self.bytes)
    }

    /// The first `bytes` bytes, to be parsed; the caller has checked that against the file's size.
    pub(crate) fn read_first(&mut self, bytes: u64) -> Result<Vec<u8>, CheckpointError> {
        let length = usize::try_from(bytes).expect("checked against a cap that fits memory");
        let mut buffer = vec![0; length];
        self.read_exact_at(&mut buffer, 0)?;
        self.parsed = Parsed::of(&buffer);
        Ok(buffer)
    }

    /// Fills `buffer` from `offset`. A file that ends earlier shrank after it was opened.
    pub(crate) fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), CheckpointError> {
        match self.file.read_exact_at(buffer, offset) {
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                self.unchanged()?;
                Err(CheckpointError::io("read", &self.path, error))
            }
            other => other.map_err(|error| CheckpointError::io("read", &self.path, error)),
        }
    }

    /// Another descriptor of the same open file, with `flags` of its own; `None` where the kernel or
    /// the file system refuses. It is found by the number of the one that is open and not by name,
    /// which may have been given to another file since.
    pub(crate) fn reopen(&self, flags: OFlags) -> Option<File> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let fd = rustix::fs::open(path, flags, Mode::empty()).ok()?;
        let stat = FileStat::from(&rustix::fs::fstat(&fd).ok()?);
        ((stat.dev, stat.ino) == (self.stat.dev, self.stat.ino)).then(|| File::from(fd))
    }

    /// Asks the kernel again: an error if the file is not as it was when it was opened.
    pub(crate) fn unchanged(&self) -> Result<(), CheckpointError> {
        let now =
            rustix::fs::fstat(&self.file).map_err(|errno| CheckpointError::io("stat", &self.path, errno))?;
        let now = FileStat::from(&now);
        match now == self.stat {
            true => Ok(()),
            false => Err(self.changed(now.size)),
        }
    }

    /// It is not as it was when it was opened.
    pub(crate) fn changed(&self, now_bytes: u64) -> CheckpointError {
        CheckpointError::Changed {
            path: self.path.clone(),
            was_bytes: self.stat.size,
            now_bytes,
        }
    }
}

impl From<&Stat> for FileStat {
    // The types of these fields differ between architectures.
    #[allow(clippy::unnecessary_cast)]
    fn from(stat: &Stat) -> FileStat {
        FileStat {
            dev: stat.st_dev as u64,
            ino: stat.st_ino as u64,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mtime: FileTime {
                seconds: stat.st_mtime as i64,
                nanos: stat.st_mtime_nsec as u32,
            },
            ctime: FileTime {
                seconds: stat.st_ctime as i64,
                nanos: stat.st_ctime_nsec as u32,
            },
        }
    }
}

/// Why a file was not opened.
#[derive(Debug)]
pub(crate) enum NotOpened {
    /// What it is, which is no regular file.
    Irregular(&'static str),
    /// What was tried, and what the kernel said.
    Io(&'static str, Errno),
}

/// Opens a regular file in the directory `dir`, following symbolic links. Nothing is waited for.
pub(crate) fn open_regular(dir: impl AsFd, name: &Path) -> Result<OwnedFd, NotOpened> {
    // Asked by name first, because merely opening a device or a socket can do something; and
    // again of what was opened, because the name may have been given to another file since.
    let stat = rustix::fs::statat(&dir, name, rustix::fs::AtFlags::empty());
    refuse_irregular(&stat.map_err(|errno| NotOpened::Io("open", errno))?)?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let fd = rustix::fs::openat(&dir, name, flags, Mode::empty());
    let fd = fd.map_err(|errno| NotOpened::Io("open", errno))?;
    let stat = rustix::fs::fstat(&fd).map_err(|errno| NotOpened::Io("stat", errno))?;
    refuse_irregular(&stat)?;
    Ok(fd)
}

fn refuse_irregular(stat: &Stat) -> Result<(), NotOpened> {
    use rustix::fs::FileType;
    Err(NotOpened::Irregular(
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => return Ok(()),
            FileType::Directory => "a directory",
            FileType::Fifo => "a fifo",
            FileType::Socket => "a socket",
            FileType::CharacterDevice => "a character device",
            FileType::BlockDevice => "a block device",
            _ => "of unknown type",
        },
    ))
}

fn is_link(dir: &impl AsFd, name: &str) -> bool {
    rustix::fs::readlinkat(dir, name, Vec::new()).is_ok()
}
