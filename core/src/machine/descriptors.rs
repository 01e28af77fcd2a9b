//! Received descriptors are believed by their facts, never by their sender.

use super::Ends;
use crate::content::HandleKind;
use crate::content::manifest::{MAX_BYTES, MAX_REGIONS};
use crate::peer::{Facts, FileKind};
use crate::wire::message::ContentInfo;
use thiserror::Error;

/// Why the descriptors of a content are not what its message says.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DescriptorError {
    /// Not one for the manifest and one for each region that has one.
    #[error("{arrived} descriptors came for a manifest and {regions} regions")]
    Count {
        /// How many came.
        arrived: usize,
        /// How many regions the message names.
        regions: usize,
    },
    /// More regions than a content may have.
    #[error("{0} regions were announced; the limit is {MAX_REGIONS}")]
    Regions(usize),
    /// The manifest is not a sealed memfd of the stated size.
    #[error(
        "the manifest's descriptor is {found:?}, not a sealed memfd of {bytes} bytes (limit {MAX_BYTES})"
    )]
    Manifest {
        /// What it is.
        found: Facts,
        /// What the message says of its size.
        bytes: u64,
    },
    /// A region is not what its handle kind says.
    #[error("region {index}'s descriptor is {found:?}, not a {handle:?} of {bytes} bytes")]
    Region {
        /// Its number.
        index: usize,
        /// What it is.
        found: Facts,
        /// The handle kind that the message says.
        handle: HandleKind,
        /// What the message says of its size.
        bytes: u64,
    },
}

/// What a frame brought along, to be somebody's from now on.
pub(super) fn taken<F>(descriptors: &mut Vec<(Facts, F)>) -> Vec<F> {
    let taken = std::mem::take(descriptors).into_iter();
    taken.map(|(_, descriptor)| descriptor).collect()
}

/// What a lock and a listener must come as: these two, in this order. Of a lock nothing can be told by
/// its facts; who uses it checks that it is the file of that name.
pub(super) fn check_ends<F>(descriptors: Vec<(Facts, F)>) -> Result<Ends<F>, (Vec<FileKind>, Vec<F>)> {
    let (facts, mut descriptors): (Vec<Facts>, Vec<F>) = descriptors.into_iter().unzip();
    let kinds: Vec<FileKind> = facts.into_iter().map(|facts| facts.file).collect();
    match (kinds.as_slice(), descriptors.pop(), descriptors.pop()) {
        ([_, FileKind::Listener], Some(listener), Some(lock)) => Ok(Ends::new(lock, listener)),
        (_, last, before) => {
            descriptors.extend(before.into_iter().chain(last));
            Err((kinds, descriptors))
        }
    }
}

/// The major number of the NVIDIA driver's devices (Linux, `Documentation/admin-guide/devices.txt`). A
/// descriptor of CUDA memory is an open `/dev/nvidiactl`.
const NVIDIA_MAJOR: u32 = 195;

/// Checks what came with a message about content: the manifest first, then every region that is
/// handed over as a descriptor.
pub fn check<'a>(
    content: &ContentInfo,
    facts: impl ExactSizeIterator<Item = &'a Facts>,
) -> Result<(), DescriptorError> {
    if content.regions.len() > MAX_REGIONS {
        return Err(DescriptorError::Regions(content.regions.len()));
    }
    let arrived = facts.len();
    let count = DescriptorError::Count {
        arrived,
        regions: content.regions.len(),
    };
    let mut facts = facts;
    let Some(manifest) = facts.next() else {
        return Err(count);
    };
    let memory =
        |facts: &Facts, bytes| facts.file == FileKind::Memory { sealed: true } && facts.size == bytes;
    if !memory(manifest, content.manifest_bytes) || content.manifest_bytes > MAX_BYTES as u64 {
        return Err(DescriptorError::Manifest {
            found: *manifest,
            bytes: content.manifest_bytes,
        });
    }
    for (index, region) in content.regions.iter().enumerate() {
        if region.handle == HandleKind::CudaIpc {
            continue;
        }
        let Some(found) = facts.next() else {
            return Err(count);
        };
        let right = match region.handle {
            HandleKind::Memfd => memory(found, region.bytes),
            HandleKind::CudaFd => found.file == FileKind::CharDevice { major: NVIDIA_MAJOR },
            HandleKind::CudaIpc => true,
        };
        if !right {
            let (handle, bytes) = (region.handle, region.bytes);
            return Err(DescriptorError::Region {
                index,
                found: *found,
                handle,
                bytes,
            });
        }
    }
    if facts.next().is_some() {
        Err(count)
    } else {
        Ok(())
    }
}
