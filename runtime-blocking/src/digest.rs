//! The digest of an engine's checkpoint: remembered, or computed and then remembered.

use std::time::{Duration, Instant};
use tracing::{info, warn};
use weightd_checkpoint::{Checkpoint, DigestCache, LoadError, LoadOptions, Progress};
use weightd_core::content::CheckpointId;

/// A digest, and what it took to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digested {
    /// The digest.
    pub digest: [u8; 32],
    /// Bytes read for it: 0 where it was remembered.
    pub bytes_read: u64,
    /// How long that took.
    pub took: Duration,
}

/// The digest of `checkpoint`: the one that this user's [`DigestCache`] has of the very same files, else
/// [`compute`]d. Either way the log says what it took.
///
/// # Errors
/// Those of [`Checkpoint::digest`].
pub fn digest(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    progress: &Progress,
) -> Result<Digested, LoadError> {
    let start = Instant::now();
    let Some(digest) = known(&checkpoint.identity()) else {
        return compute(checkpoint, options, progress);
    };
    let took = start.elapsed();
    let milliseconds = took.as_secs_f64() * 1e3;
    info!(
        "the digest of the checkpoint was computed before, from the same files: known in {milliseconds:.2} ms"
    );
    Ok(Digested {
        digest,
        bytes_read: 0,
        took,
    })
}

/// The digest of `checkpoint`, computed from every byte of it, and kept in this user's [`DigestCache`].
///
/// # Errors
/// Those of [`Checkpoint::digest`]. A cache that cannot be used is none: the log says why.
pub fn compute(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    progress: &Progress,
) -> Result<Digested, LoadError> {
    let start = Instant::now();
    let digest = checkpoint.digest(options, progress)?;
    let (bytes_read, took) = (checkpoint.bytes(), start.elapsed());
    let (gb, seconds) = (bytes_read as f64 / 1e9, took.as_secs_f64());
    let kept = keep(&checkpoint.identity(), &digest);
    info!(
        "computed the digest of the checkpoint from {gb:.2} GB in {seconds:.2} s ({:.1} GB/s), {kept}",
        gb / seconds
    );
    Ok(Digested {
        digest,
        bytes_read,
        took,
    })
}

/// The digest of these files, if this user has computed it before.
pub fn known(identity: &CheckpointId) -> Option<[u8; 32]> {
    // Why there is no cache is said when something is to be kept.
    let found = DigestCache::of_user().ok()?.get(identity);
    found.unwrap_or_else(|error| {
        warn!("digests that were computed before: {error}");
        None
    })
}

/// What became of it.
fn keep(identity: &CheckpointId, digest: &[u8; 32]) -> &'static str {
    if identity.files.is_none() {
        return "for now: the times of its files do not tell of every change, or are seconds old";
    }
    match DigestCache::of_user().and_then(|cache| cache.put(identity, digest)) {
        Ok(()) => "once and for all",
        Err(error) => {
            warn!("digests that were computed before: {error}");
            "for now"
        }
    }
}
