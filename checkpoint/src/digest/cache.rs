//! Digests that were computed before, kept by the identity of their files.

use super::{Hash, digest_from_hex, digest_hex};
use rustix::fs::{Mode, OFlags};
use rustix::process::geteuid;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;
use weightd_core::content::CheckpointId;

/// A directory of digests that were computed since this machine started, one small file for the identity of
/// each checkpoint's files ([`CheckpointId::files`]). A checkpoint without one is never remembered: its digest
/// is computed anew.
///
/// Whoever can write here could make one checkpoint pass for another. So a directory or a file that
/// somebody else owns or may write is refused, and so is one that is not exactly as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DigestCache {
    dir: PathBuf,
}

/// Why nothing was remembered. It is no reason not to go on: the digest can be computed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum DigestCacheError {
    /// No directory to keep anything in.
    #[error("there is no directory to remember digests in: set $XDG_CACHE_HOME or $HOME to an absolute path")]
    NoDirectory,
    /// Somebody else could have written it.
    #[error("{}: not used, since {why}; remove it, or make it yours alone (chmod go-w)", .path.display())]
    NotOurs { path: PathBuf, why: &'static str },
    /// It is not what was written there.
    #[error("{}: not used, since it is damaged; remove it", .path.display())]
    Damaged { path: PathBuf },
    /// The operating system refused.
    #[error("{}: cannot {doing}: {source}", .path.display())]
    Io {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

/// How names of entries end, after the identity of the files.
const SUFFIX: &str = ".digest";
/// How many digests are kept.
const MOST_ENTRIES: usize = 1024;

impl DigestCache {
    /// That of this user: `$XDG_CACHE_HOME/weightd`, else `$HOME/.cache/weightd`. As the XDG base directory
    /// specification has it, a path that is not absolute does not count.
    ///
    /// # Errors
    /// Neither variable has a path.
    pub fn of_user() -> Result<DigestCache, DigestCacheError> {
        let absolute = |name| {
            let path = std::env::var_os(name).map(PathBuf::from);
            path.filter(|path| path.is_absolute())
        };
        let home = || absolute("HOME").map(|home| home.join(".cache"));
        let cache = absolute("XDG_CACHE_HOME").or_else(home);
        let cache = cache.ok_or(DigestCacheError::NoDirectory)?;
        Ok(DigestCache::at(cache.join("weightd")))
    }

    /// That in `dir`, which is made when there is something to keep.
    pub fn at(dir: impl Into<PathBuf>) -> DigestCache {
        DigestCache { dir: dir.into() }
    }

    /// The digest of the very same files, if one was kept.
    ///
    /// # Errors
    /// What is there cannot be read or cannot be trusted.
    pub fn get(&self, checkpoint: &CheckpointId) -> Result<Option<Hash>, DigestCacheError> {
        let Some(files) = checkpoint.files else {
            return Ok(None);
        };
        if !self.is_there()? {
            return Ok(None);
        }
        let path = self.path(&files);
        let Some(text) = read_ours(&path)? else {
            return Ok(None);
        };
        // Exactly one text is right for a digest: whatever was cut off or changed, in whatever way, is not it.
        let damaged = || DigestCacheError::Damaged { path };
        let (boot, digest) = parse(&text).ok_or_else(damaged)?;
        if text != entry(checkpoint.bytes, &files, boot, &digest) {
            return Err(DigestCacheError::Damaged {
                path: self.path(&files),
            });
        }
        Ok((boot == this_boot()?).then_some(digest))
    }

    /// Keeps a digest for these files; nothing where they have no identity. It appears whole or not at all.
    ///
    /// # Errors
    /// The directory cannot be made, written or trusted.
    pub fn put(&self, checkpoint: &CheckpointId, digest: &Hash) -> Result<(), DigestCacheError> {
        let Some(files) = checkpoint.files else {
            return Ok(());
        };
        let failed = |doing, path: &Path| io_error(doing, path);
        let boot = this_boot()?;
        let mut builder = fs::DirBuilder::new();
        builder
            .recursive(true)
            .mode(0o700)
            .create(&self.dir)
            .map_err(failed("make", &self.dir))?;
        self.is_there()?;
        self.make_room().map_err(failed("list", &self.dir))?;
        let path = self.path(&files);
        let write = || {
            let mut file = tempfile::NamedTempFile::new_in(&self.dir)?;
            file.write_all(entry(checkpoint.bytes, &files, &boot, digest).as_bytes())?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            Ok(())
        };
        write().map_err(failed("write", &path))
    }

    fn path(&self, files: &Hash) -> PathBuf {
        self.dir.join(format!("{}{SUFFIX}", digest_hex(files)))
    }

    /// Whether the directory is there; an error if others may write it.
    fn is_there(&self) -> Result<bool, DigestCacheError> {
        match fs::metadata(&self.dir) {
            Ok(found) => check_ours(&self.dir, &found).map(|()| true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(io_error("look at", &self.dir)(error)),
        }
    }

    /// Removes the oldest where there are too many.
    fn make_room(&self) -> io::Result<()> {
        let is_ours = |entry: &fs::DirEntry| {
            let name = entry.file_name();
            let digits = name.to_str().and_then(|name| name.strip_suffix(SUFFIX));
            digits.is_some_and(|digits| digest_from_hex(digits).is_some())
        };
        let mut entries = fs::read_dir(&self.dir)?.collect::<io::Result<Vec<_>>>()?;
        entries.retain(is_ours);
        if entries.len() < MOST_ENTRIES {
            return Ok(());
        }
        let age = |entry: &fs::DirEntry| entry.metadata().and_then(|found| found.modified());
        let mut entries: Vec<_> = entries
            .iter()
            .map(|entry| (age(entry).unwrap_or(UNIX_EPOCH), entry.path()))
            .collect();
        entries.sort();
        let excess = entries.len() + 1 - MOST_ENTRIES;
        // Another process may have removed it first.
        entries[..excess]
            .iter()
            .for_each(|(_, path)| _ = fs::remove_file(path));
        Ok(())
    }
}

/// The whole text of an entry.
fn entry(bytes: u64, files: &Hash, boot: &str, digest: &Hash) -> String {
    let text = format!(
        "weightd digest 1\nfiles {}\nbytes {bytes}\nboot {boot}\ndigest {}\n",
        digest_hex(files),
        digest_hex(digest)
    );
    let check = super::hash(text.as_bytes());
    format!("{text}check {}\n", digest_hex(&check))
}

/// The boot and the digest that a text names, whatever else it says.
fn parse(text: &str) -> Option<(&str, Hash)> {
    let field = |name| text.lines().find_map(|line| line.strip_prefix(name));
    Some((field("boot ")?, digest_from_hex(field("digest ")?)?))
}

/// Which boot of this machine it is. With the next one, devices may have each other's numbers.
fn this_boot() -> Result<String, DigestCacheError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let text = fs::read_to_string(path).map_err(io_error("read", path))?;
    Ok(text.trim().to_owned())
}

/// A small file that we wrote, if it is there.
fn read_ours(path: &Path) -> Result<Option<String>, DigestCacheError> {
    /// Several times what an entry takes, in bytes.
    const CAP: u64 = 1024;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(fd) => File::from(fd),
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(io_error("open", path)(errno.into())),
    };
    let found = file.metadata().map_err(io_error("look at", path))?;
    check_ours(path, &found)?;
    let damaged = || DigestCacheError::Damaged {
        path: path.to_owned(),
    };
    if !found.is_file() || found.len() > CAP {
        return Err(damaged());
    }
    let mut bytes = Vec::new();
    file.take(CAP)
        .read_to_end(&mut bytes)
        .map_err(io_error("read", path))?;
    String::from_utf8(bytes).map(Some).map_err(|_| damaged())
}

fn check_ours(path: &Path, found: &Metadata) -> Result<(), DigestCacheError> {
    let why = match () {
        () if found.uid() != geteuid().as_raw() => "it belongs to somebody else",
        () if found.mode() & 0o022 != 0 => "others may write it",
        () => return Ok(()),
    };
    let path = path.to_owned();
    Err(DigestCacheError::NotOurs { path, why })
}

fn io_error(doing: &'static str, path: &Path) -> impl Fn(io::Error) -> DigestCacheError + use<> {
    let path = path.to_owned();
    move |source| DigestCacheError::Io {
        doing,
        path: path.clone(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn id(files: Option<u8>) -> CheckpointId {
        CheckpointId {
            bytes: 1234,
            files: files.map(|byte| [byte; 32]),
            digest: None,
        }
    }

    fn cache() -> (tempfile::TempDir, DigestCache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = DigestCache::at(dir.path().join("cache/weightd"));
        (dir, cache)
    }

    fn only_entry(cache: &DigestCache) -> PathBuf {
        let mut entries = fs::read_dir(&cache.dir).unwrap();
        let path = entries.next().unwrap().unwrap().path();
        assert!(entries.next().is_none(), "no temporary file stays");
        path
    }

    #[test]
    fn what_is_kept_comes_back_for_the_same_files_alone() {
        let (_dir, cache) = cache();
        assert_eq!(cache.get(&id(Some(1))).unwrap(), None, "no directory yet");
        cache.put(&id(Some(1)), &[7; 32]).unwrap();
        assert_eq!(cache.get(&id(Some(1))).unwrap(), Some([7; 32]));
        assert_eq!(cache.get(&id(Some(2))).unwrap(), None);
        assert_eq!(cache.get(&id(None)).unwrap(), None);
        cache.put(&id(None), &[8; 32]).unwrap();
        only_entry(&cache);
        cache.put(&id(Some(1)), &[9; 32]).unwrap();
        assert_eq!(
            cache.get(&id(Some(1))).unwrap(),
            Some([9; 32]),
            "the last one counts"
        );
    }

    #[test]
    fn what_others_may_write_is_refused() {
        let (_dir, cache) = cache();
        cache.put(&id(Some(1)), &[7; 32]).unwrap();
        for (path, modes) in [
            (only_entry(&cache), [0o620, 0o602]),
            (cache.dir.clone(), [0o770, 0o707]),
        ] {
            let before = fs::metadata(&path).unwrap().permissions();
            for mode in modes {
                fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
                let error = cache.get(&id(Some(1))).unwrap_err();
                assert!(matches!(error, DigestCacheError::NotOurs { .. }), "{error}");
            }
            fs::set_permissions(&path, before).unwrap();
        }
        assert_eq!(cache.get(&id(Some(1))).unwrap(), Some([7; 32]));
        fs::set_permissions(&cache.dir, fs::Permissions::from_mode(0o777)).unwrap();
        cache.put(&id(Some(2)), &[7; 32]).unwrap_err();
    }

    #[test]
    fn links_and_large_files_and_directories_are_no_entries() {
        let (dir, cache) = cache();
        cache.put(&id(Some(1)), &[7; 32]).unwrap();
        let path = only_entry(&cache);
        let moved = dir.path().join("moved");
        fs::rename(&path, &moved).unwrap();
        symlink(&moved, &path).unwrap();
        let error = cache.get(&id(Some(1))).unwrap_err();
        assert!(matches!(error, DigestCacheError::Io { .. }), "{error}");
        fs::remove_file(&path).unwrap();
        fs::write(&path, vec![b'x'; 1 << 20]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let error = cache.get(&id(Some(1))).unwrap_err();
        assert!(matches!(error, DigestCacheError::Damaged { .. }), "{error}");
        fs::remove_file(&path).unwrap();
        fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        let error = cache.get(&id(Some(1))).unwrap_err();
        assert!(matches!(error, DigestCacheError::Damaged { .. }), "{error}");
    }

    #[test]
    fn an_entry_of_other_files_is_none_of_ours() {
        let (_dir, cache) = cache();
        cache.put(&id(Some(1)), &[7; 32]).unwrap();
        fs::rename(only_entry(&cache), cache.path(&[2; 32])).unwrap();
        let error = cache.get(&id(Some(2))).unwrap_err();
        assert!(matches!(error, DigestCacheError::Damaged { .. }), "{error}");
    }

    #[test]
    fn another_boot_is_another_machine() {
        let (_dir, cache) = cache();
        cache.put(&id(Some(1)), &[7; 32]).unwrap();
        let text = entry(1234, &[1; 32], "another-boot", &[7; 32]);
        fs::write(only_entry(&cache), text).unwrap();
        assert_eq!(cache.get(&id(Some(1))).unwrap(), None);
    }

    #[test]
    fn the_oldest_make_room() {
        let (_dir, cache) = cache();
        let files = |n: usize| CheckpointId {
            files: Some(*blake3::hash(&n.to_le_bytes()).as_bytes()),
            ..id(None)
        };
        cache.put(&files(0), &[0; 32]).unwrap();
        let others = cache.dir.join("not of ours.digest");
        fs::write(&others, "").unwrap();
        File::options()
            .write(true)
            .open(&others)
            .unwrap()
            .set_modified(UNIX_EPOCH)
            .unwrap();
        let old = File::options()
            .write(true)
            .open(cache.path(&files(0).files.unwrap()))
            .unwrap();
        old.set_modified(UNIX_EPOCH).unwrap();
        for n in 1..MOST_ENTRIES {
            fs::write(cache.path(&files(n).files.unwrap()), "").unwrap();
        }
        cache.put(&files(MOST_ENTRIES), &[1; 32]).unwrap();
        assert!(others.exists());
        assert_eq!(fs::read_dir(&cache.dir).unwrap().count(), MOST_ENTRIES + 1);
        assert_eq!(cache.get(&files(0)).unwrap(), None);
        assert_eq!(cache.get(&files(MOST_ENTRIES)).unwrap(), Some([1; 32]));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn an_entry_that_was_cut_or_changed_anywhere_is_damaged(
            cut in any::<bool>(), at in any::<proptest::sample::Index>(), bits in 1u8..=255,
        ) {
            let (_dir, cache) = cache();
            cache.put(&id(Some(1)), &[7; 32]).unwrap();
            let path = only_entry(&cache);
            let mut bytes = fs::read(&path).unwrap();
            let at = at.index(bytes.len());
            match cut {
                true => bytes.truncate(at),
                false => bytes[at] ^= bits,
            }
            fs::write(&path, bytes).unwrap();
            let error = cache.get(&id(Some(1))).unwrap_err();
            prop_assert!(matches!(error, DigestCacheError::Damaged { .. }), "{error}");
        }

        #[test]
        fn no_text_is_an_entry_but_the_one_that_was_written(text in "\\PC{0,300}") {
            let (_dir, cache) = cache();
            cache.put(&id(Some(1)), &[7; 32]).unwrap();
            fs::write(only_entry(&cache), text).unwrap();
            prop_assert!(cache.get(&id(Some(1))).is_err());
        }
    }
}
