//! The digest of a checkpoint's bytes.
//!
//! It is the BLAKE3 hash of `weightd checkpoint digest 1\n` and then, for `config.json`, the index
//! if there is one, and each safetensors file in the order of their names: one byte for what the
//! file is (0, 1, 2), its length in bytes (64 bits, little-endian), and the BLAKE3 hash of each of
//! its chunks of [`CHUNK_BYTES`]. Names do not count, so that the same bytes are the same
//! checkpoint wherever they lie; lengths do, so that no byte can move from one file to the next.
//! The index counts because it decides which files belong.

use crate::error::CheckpointError;
use crate::files::SourceFile;
use crate::open::{Checkpoint, Part};
use std::num::NonZero;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The length of the chunks whose hashes make up the digest, in bytes; the last one of a file is
/// shorter.
pub const CHUNK_BYTES: u64 = 4 << 20;

/// Is told how many bytes are done, and of how many.
type Progress<'a> = dyn Fn(u64, u64) + Sync + 'a;

/// A BLAKE3 hash.
type Hash = [u8; 32];

impl Checkpoint {
    /// Reads every byte of the checkpoint, on all cores, and returns the digest. `progress` is told
    /// how many bytes are done and how many there are, from several threads and not always in
    /// order. A core takes [`CHUNK_BYTES`] of memory.
    ///
    /// # Errors
    /// A file that cannot be read, or that changed since it was opened.
    pub fn digest(&self, progress: Option<&Progress<'_>>) -> Result<Hash, CheckpointError> {
        self.unchanged()?;
        let digest = digest(&self.all_files().collect::<Vec<_>>(), progress)?;
        self.unchanged()?;
        Ok(digest)
    }
}

/// The digest of these files, each with what it is.
fn digest(files: &[(Part, &SourceFile)], progress: Option<&Progress<'_>>) -> Result<Hash, CheckpointError> {
    let hashes = hash_chunks(files, progress)?;
    let mut hashes = hashes.iter();
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"weightd checkpoint digest 1\n");
    for &(part, file) in files {
        hasher.update(&[part as u8]);
        hasher.update(&file.bytes.to_le_bytes());
        for hash in hashes.by_ref().take(chunks_of(file)) {
            hasher.update(hash);
        }
    }
    Ok(*hasher.finalize().as_bytes())
}

fn chunks_of(file: &SourceFile) -> usize {
    // A file that exists has fewer chunks than memory has addresses.
    file.bytes.div_ceil(CHUNK_BYTES) as usize
}

/// The hashes of all chunks of all files, in order.
fn hash_chunks(
    files: &[(Part, &SourceFile)],
    progress: Option<&Progress<'_>>,
) -> Result<Vec<Hash>, CheckpointError> {
    let chunks: Vec<(&SourceFile, u64)> = files
        .iter()
        .flat_map(|&(_, file)| (0..chunks_of(file) as u64).map(move |number| (file, number * CHUNK_BYTES)))
        .collect();
    let total = files.iter().map(|(_, file)| file.bytes).sum();
    let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
    // Takes chunk after chunk until none is left; after an error, nobody gets another.
    let work = || -> Result<Vec<(usize, Hash)>, CheckpointError> {
        let (mut hashes, mut buffer) = (Vec::new(), Vec::new());
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(file, offset)) = chunks.get(number) else {
                return Ok(hashes);
            };
            let bytes = CHUNK_BYTES.min(file.bytes - offset);
            buffer.resize(bytes as usize, 0);
            file.read_exact_at(&mut buffer, offset)
                .inspect_err(|_| next.store(chunks.len(), Ordering::Relaxed))?;
            hashes.push((number, *blake3::hash(&buffer).as_bytes()));
            let done = done.fetch_add(bytes, Ordering::Relaxed) + bytes;
            if let Some(progress) = progress {
                progress(done, total);
            }
        }
    };
    let threads = std::thread::available_parallelism()
        .map_or(1, NonZero::get)
        .min(chunks.len().max(1));
    let parts: Vec<Result<Vec<(usize, Hash)>, CheckpointError>> = std::thread::scope(|scope| {
        // Where the system gives no more threads, fewer will do.
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, work).ok();
        let workers: Vec<_> = (1..threads).map_while(spawn).collect();
        let own = work();
        let join = |worker: std::thread::ScopedJoinHandle<'_, _>| {
            worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        std::iter::once(own)
            .chain(workers.into_iter().map(join))
            .collect()
    });
    let mut hashes = vec![[0; 32]; chunks.len()];
    for part in parts {
        for (number, hash) in part? {
            hashes[number] = hash;
        }
    }
    Ok(hashes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{copy_of, data, open_all};
    use proptest::prelude::*;
    use std::fs;
    use std::path::Path;
    use std::sync::Mutex;

    /// The digest as the module's head describes it, from whole files.
    fn reference(files: &[(u8, &[u8])]) -> Hash {
        let mut text = b"weightd checkpoint digest 1\n".to_vec();
        for (part, bytes) in files {
            text.push(*part);
            text.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
            bytes
                .chunks(4 * 1024 * 1024)
                .for_each(|chunk| text.extend_from_slice(blake3::hash(chunk).as_bytes()));
        }
        *blake3::hash(&text).as_bytes()
    }

    /// The digest of all files of a directory, whether or not they make a checkpoint.
    fn digest_of(dir: &Path) -> Hash {
        let files = open_all(dir);
        digest(
            &files.iter().map(|file| (Part::Weights, file)).collect::<Vec<_>>(),
            None,
        )
        .unwrap()
    }

    #[test]
    fn the_digest_is_the_documented_one() {
        let dir = data("llama");
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let mut bytes = vec![
            (0, fs::read(dir.join("config.json")).unwrap()),
            (1, fs::read(dir.join("model.safetensors.index.json")).unwrap()),
        ];
        bytes.extend(
            checkpoint
                .files()
                .iter()
                .map(|file| (2, fs::read(&file.path).unwrap())),
        );
        let bytes: Vec<(u8, &[u8])> = bytes
            .iter()
            .map(|(part, bytes)| (*part, bytes.as_slice()))
            .collect();
        assert_eq!(checkpoint.digest(None).unwrap(), reference(&bytes));
    }

    #[test]
    fn files_of_several_chunks_are_hashed_chunk_by_chunk() {
        let dir = tempfile::tempdir().unwrap();
        let big: Vec<u8> = (0..CHUNK_BYTES * 2 + 5).map(|i| (i % 251) as u8).collect();
        let whole = &big[..CHUNK_BYTES as usize];
        fs::write(dir.path().join("a"), &big).unwrap();
        fs::write(dir.path().join("b"), whole).unwrap();
        fs::write(dir.path().join("c"), b"").unwrap();
        let expected = [(2, big.as_slice()), (2, whole), (2, b"".as_slice())];
        assert_eq!(digest_of(dir.path()), reference(&expected));
    }

    #[test]
    fn equal_bytes_elsewhere_have_the_same_digest() {
        for name in ["llama", "qwen3"] {
            let copy = copy_of(name);
            let ours = Checkpoint::open(&data(name)).unwrap().digest(None).unwrap();
            assert_eq!(Checkpoint::open(copy.path()).unwrap().digest(None).unwrap(), ours);
        }
    }

    #[test]
    fn bytes_that_move_between_files_change_the_digest() {
        let dir = tempfile::tempdir().unwrap();
        let digest_with = |a: &[u8], b: &[u8]| {
            fs::write(dir.path().join("a"), a).unwrap();
            fs::write(dir.path().join("b"), b).unwrap();
            digest_of(dir.path())
        };
        let digests = [
            digest_with(b"12", b"3"),
            digest_with(b"1", b"23"),
            digest_with(b"3", b"12"),
            digest_with(b"", b"123"),
        ];
        for (i, digest) in digests.iter().enumerate() {
            assert!(!digests[..i].contains(digest), "arrangement {i}");
        }
    }

    #[test]
    fn two_weight_files_that_swap_bytes_change_the_digest() {
        let copy = copy_of("llama");
        let [two, three] = [2, 3].map(|n| copy.path().join(format!("model-0000{n}-of-00006.safetensors")));
        let before = digest_of(copy.path());
        let bytes = fs::read(&two).unwrap();
        fs::copy(&three, &two).unwrap();
        fs::write(&three, bytes).unwrap();
        assert_ne!(digest_of(copy.path()), before);
    }

    #[test]
    fn progress_reaches_the_total() {
        let checkpoint = Checkpoint::open(&data("llama")).unwrap();
        let seen = Mutex::new(Vec::new());
        checkpoint
            .digest(Some(&|done, total| seen.lock().unwrap().push((done, total))))
            .unwrap();
        let seen = seen.into_inner().unwrap();
        let total = checkpoint.all_files().map(|(_, file)| file.bytes).sum();
        assert!(
            seen.contains(&(total, total)) && seen.iter().all(|&(done, of)| done <= of && of == total),
            "{seen:?}"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn one_flipped_bit_anywhere_changes_the_digest(
            file in any::<proptest::sample::Index>(),
            at in any::<proptest::sample::Index>(),
            bit in 0u8..8,
        ) {
            let mut files = open_all(&data("llama"));
            let of = |files: &[SourceFile]| {
                digest(&files.iter().map(|file| (Part::Weights, file)).collect::<Vec<_>>(), None).unwrap()
            };
            let before = of(&files);
            let changed = file.index(files.len());
            let mut bytes = fs::read(&files[changed].path).unwrap();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("changed"), &bytes).unwrap();
            files[changed] = open_all(dir.path()).remove(0);
            prop_assert_ne!(of(&files), before);
        }
    }
}
