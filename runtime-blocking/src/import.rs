//! From descriptors to tensors.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use weightd_core::content::Manifest;
use weightd_core::content::manifest::{MAX_BYTES, Region};
use weightd_core::machine::{Fault, Fetched};
use weightd_gpu::{Mapping, MemoryError, Weights, WeightsError};

/// What was imported, and how long its parts took.
pub(crate) struct Imported {
    pub weights: Weights,
    pub decode: Duration,
    pub map: Duration,
}

/// Reads the manifest and maps its regions. It may block.
pub(crate) fn import(fetched: Fetched<OwnedFd>) -> Result<Imported, Fault> {
    let start = Instant::now();
    let Fetched {
        state,
        manifest,
        regions,
    } = fetched;
    let manifest = weightd_gpu::read_sealed(manifest, MAX_BYTES as u64).map_err(fault)?;
    let manifest = state.manifest(&manifest)?;
    let decode = start.elapsed();
    let mappings = map_regions(&manifest, regions).map_err(fault)?;
    let weights = Weights::new(manifest, mappings)
        .map_err(|error: WeightsError| Fault::Malformed(error.to_string()))?;
    Ok(Imported {
        weights: weights.with_generation(state.generation),
        decode,
        map: start.elapsed() - decode,
    })
}

/// Maps the regions of a manifest, in its order. `descriptors` are those of the regions that have one.
///
/// # Errors
/// What [`Mapping::import`] and [`Mapping::open_legacy`] say; [`MemoryError::Unsupported`] where a
/// descriptor is missing.
pub fn map_regions(
    manifest: &Manifest,
    descriptors: impl IntoIterator<Item = OwnedFd>,
) -> Result<Vec<Mapping>, MemoryError> {
    let mut descriptors = descriptors.into_iter();
    let map = |region: &Region| match &region.legacy {
        Some(legacy) => Mapping::open_legacy(legacy, region.bytes, region.device),
        None => {
            let (handle, device) = (region.handle, region.device);
            let fd = descriptors
                .next()
                .ok_or(MemoryError::Unsupported { handle, device })?;
            Mapping::import(handle, fd, region.bytes, device)
        }
    };
    manifest.regions().iter().map(map).collect()
}

/// What went wrong, by cause.
pub(crate) fn fault(error: MemoryError) -> Fault {
    let why = error.to_string();
    match error {
        MemoryError::OutOfMemory { .. } => Fault::OutOfMemory(why),
        MemoryError::Unsupported { .. } => Fault::Unsupported(why),
        MemoryError::NotSealed { .. }
        | MemoryError::Size { .. }
        | MemoryError::TooLarge { .. }
        | MemoryError::OtherDevice { .. } => Fault::Malformed(why),
        _ => Fault::Other(why),
    }
}
