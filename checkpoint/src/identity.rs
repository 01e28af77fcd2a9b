//! Which bytes a checkpoint consists of, told from its files without reading them.

use crate::files::{FileStat, FileTime};
use crate::open::{Checkpoint, Part};
use rustix::fd::AsFd;
use std::time::{SystemTime, UNIX_EPOCH};
use weightd_core::content::CheckpointId;

/// How far in the past the last change of a file must lie, in seconds, where nobody has it open for writing. A
/// change within the same tick of the clock that stamps files would leave no trace; the coarsest such clock
/// (ext3's) ticks in seconds.
const OLD_SECONDS: i64 = 2;

/// The same where it cannot be told who has it open (files of another user). One write moves the times when it
/// begins, and is done when up to 2 GiB are written: within this at 3.6 MB/s.
const OLD_SECONDS_OF_OTHERS: i64 = 600;

impl Checkpoint {
    /// Size and file identity of this checkpoint; the digest is left open.
    ///
    /// The identity is taken from `config.json`, the index and the safetensors files as they were
    /// when they were opened. It is absent where times cannot be trusted to tell of a change: on
    /// file systems other than ext4, XFS and btrfs on local disks; while a file's last change is less than two
    /// seconds old, or somebody has it open for writing; and where that cannot be told, as of files of another
    /// user, for ten minutes. Two sides with equal identities have the same files open.
    pub fn identity(&self) -> CheckpointId {
        let counts = |part| part != Part::Index;
        let bytes = self
            .all_files()
            .filter(|(part, _)| counts(*part))
            .map(|(_, file)| file.bytes)
            .sum();
        let steady = self.all_files().all(|(_, file)| file.steady);
        CheckpointId {
            bytes,
            files: steady.then(|| self.hash_stats()),
            digest: None,
        }
    }

    /// A hash of what the kernel said of each file when it was opened.
    fn hash_stats(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"weightd checkpoint files 1\n");
        for (part, file) in self.all_files() {
            hasher.update(&[part as u8]);
            // Devices may have each other's numbers in turn; file systems are told apart by their names too.
            hasher.update(&file.system.to_le_bytes());
            hash_stat(&mut hasher, &file.stat);
        }
        *hasher.finalize().as_bytes()
    }
}

fn hash_stat(hasher: &mut blake3::Hasher, stat: &FileStat) {
    for number in [stat.dev, stat.ino, stat.size] {
        hasher.update(&number.to_le_bytes());
    }
    for FileTime { seconds, nanos } in [stat.mtime, stat.ctime] {
        hasher.update(&seconds.to_le_bytes());
        hasher.update(&nanos.to_le_bytes());
    }
}

/// Makes the times of an open file tell of every later change, where its file system can; then gives the number
/// that the file system has from its UUID (where it has one). `None` where it cannot.
///
/// The first store into a page through a shared mapping moves the times, but further ones into the
/// same dirty page do not until it was written back. So it is written back now (a read-only
/// descriptor may ask for that), before anyone looks at times or bytes.
pub(crate) fn settle(fd: &impl AsFd) -> Option<u64> {
    /// `EXT4_SUPER_MAGIC` (of ext2 and ext3, too), `XFS_SUPER_MAGIC` and `BTRFS_SUPER_MAGIC` of
    /// Linux' `magic.h`. On tmpfs, times move once per mapping; overlay, FUSE and network file
    /// systems answer for files that change behind them.
    const HONEST: [u64; 3] = [0xEF53, 0x5846_5342, 0x9123_683E];
    #[allow(clippy::unnecessary_cast)] // Its type differs between architectures.
    let is_honest = |kind: rustix::fs::StatFs| HONEST.contains(&(kind.f_type as u64 & 0xFFFF_FFFF));
    let honest = rustix::fs::fstatfs(fd).is_ok_and(is_honest) && rustix::fs::fsync(fd).is_ok();
    let system = rustix::fs::fstatvfs(fd).ok().filter(|_| honest)?;
    Some(system.f_fsid)
}

/// Whether any later change of an open file gets another time than its last one. A write that goes on moves
/// no times any more, so there must be none.
pub(crate) fn is_at_rest(fd: &impl AsFd, stat: &FileStat) -> bool {
    match weightd_gpu::is_open_for_writing(fd) {
        Some(true) => false,
        Some(false) => is_old(stat, OLD_SECONDS),
        None => is_old(stat, OLD_SECONDS_OF_OTHERS),
    }
}

/// Whether the last change of a file lies so many seconds in the past. A time in the future, which a program
/// may have set, does not.
#[expect(clippy::disallowed_methods, reason = "files are stamped by this clock")]
fn is_old(stat: &FileStat, seconds: i64) -> bool {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |now| now.as_secs());
    let newest = stat.mtime.max(stat.ctime).seconds;
    i64::try_from(now).is_ok_and(|now| newest.saturating_add(seconds) < now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{copy_of, data, open_all};
    use std::fs::{self, File, FileTimes};
    use std::path::Path;
    use std::time::Duration;
    use weightd_gpu::testing::MappedFile;

    fn stats(dir: &Path) -> [u8; 32] {
        Checkpoint::open(dir).unwrap().hash_stats()
    }

    #[test]
    fn files_that_lie_unchanged_have_one_identity() {
        let (first, second) = (
            Checkpoint::open(&data("llama")).unwrap(),
            Checkpoint::open(&data("llama")).unwrap(),
        );
        let id = first.identity();
        assert_eq!(id, second.identity());
        assert_eq!(
            id.bytes,
            720 + 354_864 + 3 * 370_128 + 271_736 + 256_120,
            "weights and config.json"
        );
        assert_eq!(id.digest, None);
        let file = &first.files()[0];
        let honest = settle(&file.file).is_some() && is_at_rest(&file.file, &file.stat);
        assert_eq!(
            id.files.is_some(),
            honest,
            "an identity exactly where times can be trusted"
        );
        assert_ne!(first.hash_stats(), stats(&data("qwen3")));
    }

    #[test]
    fn files_that_were_just_written_have_no_identity() {
        let copy = copy_of("llama");
        let fresh = Checkpoint::open(copy.path()).unwrap();
        assert_eq!(fresh.identity().files, None);
        assert_eq!(
            fresh.identity().bytes,
            Checkpoint::open(&data("llama")).unwrap().identity().bytes
        );
    }

    #[test]
    fn files_that_somebody_may_write_are_known_by_their_bytes_alone() {
        let copy = copy_of("qwen3");
        let steady = || Checkpoint::open(copy.path()).unwrap().identity().files.is_some();
        let until = std::time::Instant::now() + Duration::from_secs(10);
        while !steady() {
            if std::time::Instant::now() > until {
                eprintln!("not tested: on this file system only bytes tell");
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        // One write may take its time; the times of the file moved when it began.
        let writer = File::options()
            .write(true)
            .open(copy.path().join("model.safetensors"))
            .unwrap();
        assert!(!steady());
        drop(writer);
        assert!(steady());
    }

    #[test]
    fn times_of_memory_file_systems_are_not_trusted() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
            return;
        };
        let file = File::create(dir.path().join("file")).unwrap();
        assert_eq!(settle(&file), None);
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "files are stamped by this clock")]
    fn only_changes_of_the_past_are_old() {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let stat = open_all(dir.path())[0].stat;
        let at = |mtime: i64, ctime: i64| {
            let time = |seconds| FileTime { seconds, nanos: 0 };
            is_old(
                &FileStat {
                    mtime: time(mtime),
                    ctime: time(ctime),
                    ..stat
                },
                OLD_SECONDS,
            )
        };
        assert!(at(now - 60, now - 60) && at(-5, now - 60));
        assert!(!at(now, now - 60) && !at(now - 60, now) && !at(now - 60, now + 3600) && !at(i64::MAX, 0));
    }

    #[test]
    fn rewritten_bytes_change_the_identity_though_the_mtime_is_put_back() {
        let copy = copy_of("qwen3");
        let path = copy.path().join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        let mtime = fs::metadata(&path).unwrap().modified().unwrap();
        let before = stats(copy.path());
        // The clock that stamps files ticks in milliseconds: until it does, there is nothing to see.
        let changed = (0..500).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            fs::write(&path, &bytes).unwrap();
            File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_times(FileTimes::new().set_modified(mtime))
                .unwrap();
            stats(copy.path()) != before
        });
        assert!(changed);
        assert_eq!(
            fs::metadata(&path).unwrap().modified().unwrap(),
            mtime,
            "only the ctime tells"
        );
    }

    #[test]
    fn every_store_through_a_mapping_makes_another_identity_or_there_is_none() {
        let copy = copy_of("qwen3");
        let path = copy.path().join("model.safetensors");
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let last = file.metadata().unwrap().len() as usize - 1;
        let mut mapped = MappedFile::map(&file).unwrap();
        let mut seen = Vec::new();
        for byte in [1, 2, 3] {
            mapped.store(last, byte);
            // Files that were just written have none.
            let identity = (0..500).find_map(|_| {
                std::thread::sleep(Duration::from_millis(10));
                Checkpoint::open(copy.path()).unwrap().identity().files
            });
            let Some(identity) = identity else {
                assert!(seen.is_empty(), "this file system was trusted before");
                return;
            };
            assert!(!seen.contains(&identity), "bytes changed, and nobody can tell");
            seen.push(identity);
        }
    }

    #[test]
    fn a_copy_and_a_replaced_file_have_another_identity() {
        let copy = copy_of("qwen3");
        let before = stats(copy.path());
        assert_ne!(before, stats(&data("qwen3")));
        let path = copy.path().join("model.safetensors");
        fs::copy(&path, copy.path().join("new")).unwrap();
        fs::rename(copy.path().join("new"), &path).unwrap();
        assert_ne!(stats(copy.path()), before);
    }

    #[test]
    fn links_to_the_same_files_have_the_same_identity() {
        let (checkpoint, links) = (
            data("llama").canonicalize().unwrap(),
            tempfile::tempdir().unwrap(),
        );
        for file in open_all(&checkpoint) {
            std::os::unix::fs::symlink(&file.path, links.path().join(&file.name)).unwrap();
        }
        assert_eq!(stats(links.path()), stats(&checkpoint));
    }
}
