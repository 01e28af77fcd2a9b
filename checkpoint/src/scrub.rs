//! Checking mapped weights against the checksums of their manifest.

use crate::checksum::Checksums;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use weightd_core::content::manifest::{Extent, Tensor};
use weightd_gpu::{MemoryError, Rows, Weights};

/// What was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scrubbed {
    /// Tensors that have bytes.
    pub tensors: usize,
    /// The bytes that they have, shared ones once.
    pub bytes: u64,
}

/// Why weights are not known to be as they were loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum ScrubError {
    /// There is nothing to compare them with.
    #[error(
        "the weights have no checksums, and cannot be scrubbed: `weightd preload --checksums` takes them while it loads; \
         what engines publish has none"
    )]
    NoChecksums,
    /// Some are not.
    #[error(
        "{} of {of} tensors do not hold what was loaded, first {:?}: release the weights, and preload them again",
        .names.len(), .names[0]
    )]
    Damaged {
        /// Every tensor that shares bytes with a damaged one is among them.
        names: Vec<String>,
        of: usize,
    },
    /// What is mapped could not be read.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// What one thread reads at a time, in bytes.
const PIECE_BYTES: u64 = 4 << 20;

/// Reads every byte of every tensor, on all cores, and compares them with the checksums of the manifest. The
/// checkpoint is not needed.
///
/// # Errors
/// No checksums, tensors that differ from theirs, memory that cannot be read.
pub fn scrub(weights: &Weights) -> Result<Scrubbed, ScrubError> {
    let manifest = weights.manifest();
    let expected = manifest.checksums().ok_or(ScrubError::NoChecksums)?;
    let sums = Checksums::new(manifest);
    let extents = sums.extents().to_vec();
    add_all(weights, &sums)?;
    let found = sums.finish();
    let pairs = extents.iter().zip(expected.iter().zip(&found));
    let damaged = pairs.filter(|(_, (expected, found))| expected != found);
    let damaged: Vec<Extent> = damaged.map(|(extent, _)| *extent).collect();
    let with_bytes = || manifest.tensors().filter(|tensor| tensor.extent() > 0);
    let is_damaged = |tensor: &Tensor<'_>| {
        let place = (tensor.region, tensor.offset);
        let after = damaged.partition_point(|extent| (extent.region, extent.offset) <= place);
        let before = after.checked_sub(1).map(|number| damaged[number]);
        before.is_some_and(|extent| extent.region == tensor.region && tensor.offset < extent.end())
    };
    let names: Vec<String> = with_bytes()
        .filter(is_damaged)
        .map(|tensor| tensor.name.to_owned())
        .collect();
    let tensors = with_bytes().count();
    match names.is_empty() {
        true => Ok(Scrubbed {
            tensors,
            bytes: extents.iter().map(|extent| extent.bytes).sum(),
        }),
        false => Err(ScrubError::Damaged { names, of: tensors }),
    }
}

/// Adds all that is mapped, piece by piece.
fn add_all(weights: &Weights, sums: &Checksums) -> Result<(), MemoryError> {
    let piece = |extent: &Extent| {
        let extent = *extent;
        (0..extent.bytes.div_ceil(PIECE_BYTES)).map(move |number| {
            let offset = extent.offset + number * PIECE_BYTES;
            (extent.region, offset, PIECE_BYTES.min(extent.end() - offset))
        })
    };
    let pieces: Vec<(usize, u64, u64)> = sums.extents().iter().flat_map(piece).collect();
    let next = AtomicUsize::new(0);
    let work = || -> Result<(), MemoryError> {
        let mut buffer = Vec::new();
        while let Some(&(region, offset, bytes)) = pieces.get(next.fetch_add(1, Relaxed)) {
            let mapped = weights.region_bytes(region, offset..offset + bytes, &mut buffer)?;
            sums.add(region, mapped, &Rows::one(offset, bytes));
        }
        Ok(())
    };
    let threads = thread::available_parallelism()
        .map_or(1, NonZero::get)
        .min(pieces.len());
    thread::scope(|scope| {
        // Where the system gives no more threads, fewer will do.
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
        let workers: Vec<_> = (1..threads).map_while(spawn).collect();
        let own = work();
        let join = |worker: thread::ScopedJoinHandle<'_, _>| {
            worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        workers.into_iter().map(join).fold(own, Result::and)
    })
}
