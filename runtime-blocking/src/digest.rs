//! The digest of an engine's checkpoint: remembered, or computed and then remembered.

use std::time::{Duration, Instant};
use tracing::{debug, info, warn};
use weightd_checkpoint::{Checkpoint, DigestCache, DigestCacheError, LoadError, LoadOptions, Progress};
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
    let identity = checkpoint.identity();
    let kept = match remember(&identity, &digest) {
        true => "and keep it until the machine is started anew",
        false if identity.files.is_some() => "which cannot be kept: make $XDG_CACHE_HOME/weightd writable",
        false => {
            "which is good for this time: its files' times do not tell of every change, are seconds old, or somebody \
             has them open for writing"
        }
    };
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
    let found = DigestCache::of_user().and_then(|cache| cache.get(identity));
    found.unwrap_or_else(|error| {
        say(&error);
        None
    })
}

/// Keeps the digest of these files for [`known`]; false where they have no identity to keep it by, or it cannot
/// be kept.
pub fn remember(identity: &CheckpointId, digest: &[u8; 32]) -> bool {
    let kept = DigestCache::of_user().and_then(|cache| cache.put(identity, digest));
    kept.inspect_err(say).is_ok() && identity.files.is_some()
}

/// What cannot be trusted is for the operator to look at; where there is no cache at all, digests are computed.
fn say(error: &DigestCacheError) {
    match error {
        DigestCacheError::NotOurs { .. } | DigestCacheError::Damaged { .. } => {
            warn!("remembered digest: {error}")
        }
        _ => debug!("remembered digest: {error}"),
    }
}
