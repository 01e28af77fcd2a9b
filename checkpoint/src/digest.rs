//! The digest of a checkpoint's bytes.
//!
//! It is the BLAKE3 hash of `weightd checkpoint digest 1\n` and then, for `config.json`, the index
//! if there is one, and each safetensors file in the order of their names: one byte for what the
//! file is (0, 1, 2), its length in bytes (64 bits, little-endian), and the BLAKE3 hash of each of
//! its chunks of [`CHUNK_BYTES`]. Names do not count, so that the same bytes are the same
//! checkpoint wherever they lie; lengths do, so that no byte can move from one file to the next.
//! The index counts because it decides which files belong.

mod cache;

use crate::error::CheckpointError;
use crate::files::SourceFile;
use crate::load::{DigestAlong, LoadError, LoadOptions, Pipeline, Progress};
use crate::open::{Checkpoint, Part};
pub use cache::{DigestCache, DigestCacheError};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use weightd_core::plan::read::{Block, ReadPlan};

/// The length of the chunks whose hashes make up the digest, in bytes; the last one of a file is
/// shorter.
pub const CHUNK_BYTES: u64 = 4 << 20;

/// A BLAKE3 hash.
pub(crate) type Hash = [u8; 32];

pub(crate) fn hash(bytes: &[u8]) -> Hash {
    *blake3::hash(bytes).as_bytes()
}

/// The 64 lower-case hex digits of a digest.
pub fn digest_hex(digest: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*digest).to_string()
}

/// Reads what [`digest_hex`] writes.
pub fn digest_from_hex(text: &str) -> Option<[u8; 32]> {
    blake3::Hash::from_hex(text).ok().map(|hash| *hash.as_bytes())
}

impl Checkpoint {
    /// Reads every byte of the checkpoint and returns the digest: the first time that this value is asked, and
    /// whoever asks meanwhile waits for that. `progress` counts up to [`bytes`](Checkpoint::bytes). Each worker
    /// takes [`CHUNK_BYTES`] of memory.
    ///
    /// # Errors
    /// A file that cannot be read, or that changed since it was opened; no memory, no thread.
    pub fn digest(&self, options: &LoadOptions, progress: &Progress) -> Result<Hash, LoadError> {
        let mut known = self.digest.lock().unwrap_or_else(PoisonError::into_inner);
        self.unchanged()?;
        if let Some(digest) = *known {
            return Ok(digest);
        }
        let files = self.files().iter().map(|file| file.bytes).collect();
        let nothing = ReadPlan::new(files, Vec::new(), Vec::new(), Vec::new());
        let hashes = Hashes::new(self);
        progress.add_read(self.bytes() - hashes.weights_bytes());
        let pipeline = Pipeline {
            files: self.files(),
            read: &nothing.expect("a plan that writes nothing writes nothing wrong"),
            devices: &[],
            regions: &[],
            progress,
            hashes: &hashes,
            checksums: &[],
        };
        let options = LoadOptions {
            digest: DigestAlong::Always,
            ..*options
        };
        pipeline
            .run(&options, None)
            .map_err(|failure| failure.of(|local| local))?;
        self.unchanged()?;
        Ok(*known.insert(hashes.digest()))
    }
}

/// The hashes of a checkpoint's chunks, while whoever reads them adds one after the other.
#[derive(Debug)]
pub(crate) struct Hashes<'a> {
    checkpoint: &'a Checkpoint,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    /// By safetensors file, then by chunk.
    chunks: Vec<Vec<Hash>>,
    /// What was read twice, by file and place, from the first reading to the second.
    seams: BTreeMap<(u32, u64), Vec<u8>>,
}

impl<'a> Hashes<'a> {
    pub fn new(checkpoint: &'a Checkpoint) -> Hashes<'a> {
        // A file that exists has fewer chunks than memory has addresses.
        let chunks = |file: &SourceFile| vec![[0; 32]; file.bytes.div_ceil(CHUNK_BYTES) as usize];
        Hashes {
            checkpoint,
            seen: Mutex::new(Seen {
                chunks: checkpoint.files().iter().map(chunks).collect(),
                seams: BTreeMap::new(),
            }),
        }
    }

    fn weights_bytes(&self) -> u64 {
        self.checkpoint.files().iter().map(|file| file.bytes).sum()
    }

    /// Adds a block of [`CHUNK_BYTES`]; `bytes` is what was read for it.
    ///
    /// # Errors
    /// Bytes that were read before, to be parsed or with the block before this one, and are others now.
    pub fn add(&self, block: &Block, bytes: &[u8]) -> Result<(), CheckpointError> {
        let (number, file) = (block.range.start / CHUNK_BYTES, block.chunk.file);
        let source = &self.checkpoint.files()[file as usize];
        let changed = || source.changed(source.bytes);
        let own = &bytes[length(block.before())..];
        let hashed = hash(own);
        if let Some((parsed, length)) = source.parsed.chunk(number) {
            let again = match own.len() as u64 == length {
                true => hashed,
                false => hash(&own[..length as usize]),
            };
            if again != parsed {
                return Err(changed());
            }
        }
        let (before, after) = (block.before(), block.after());
        let seams = [
            (before.start, &bytes[..length(before)]),
            (after.start, &bytes[bytes.len() - length(after)..]),
        ];
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.chunks[file as usize][number as usize] = hashed;
        for (at, bytes) in seams.into_iter().filter(|(_, bytes)| !bytes.is_empty()) {
            match seen.seams.remove(&(file, at)) {
                Some(first) if first != bytes => return Err(changed()),
                Some(_) => {}
                None => _ = seen.seams.insert((file, at), bytes.to_vec()),
            }
        }
        Ok(())
    }

    /// The digest, after every block was added.
    pub fn digest(self) -> Hash {
        let seen = self.seen.into_inner().unwrap_or_else(PoisonError::into_inner);
        assert!(
            seen.seams.is_empty(),
            "blocks are missing: {:?}",
            seen.seams.keys()
        );
        let mut weights = seen.chunks.into_iter();
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"weightd checkpoint digest 1\n");
        for (part, file) in self.checkpoint.all_files() {
            let read = match part {
                // All of it was parsed.
                Part::Config | Part::Index => None,
                Part::Weights => weights.next(),
            };
            hasher.update(&[part as u8]);
            hasher.update(&file.bytes.to_le_bytes());
            let hashes = read.as_deref().unwrap_or(file.parsed.hashes());
            hashes.iter().for_each(|hash| _ = hasher.update(hash));
        }
        *hasher.finalize().as_bytes()
    }
}

fn length(range: std::ops::Range<u64>) -> usize {
    (range.end - range.start) as usize
}

#[cfg(test)]
mod tests;
