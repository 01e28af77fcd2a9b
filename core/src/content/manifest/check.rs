//! The rules that a builder and a decoder check alike, beside those of a view.

use super::{MAX_BYTES, MAX_NAME_BYTES, MAX_REGION_BYTES, ManifestError, Region, Tensor, view};
use crate::content::HandleKind;
use crate::text::cut;

pub(super) fn cap(what: &'static str, count: u64, cap: usize) -> Result<(), ManifestError> {
    let cap = cap as u64;
    if count > cap {
        return Err(ManifestError::TooMany { what, count, cap });
    }
    Ok(())
}

pub(super) fn encoded_bytes(bytes: u64) -> Result<(), ManifestError> {
    if bytes > MAX_BYTES as u64 {
        return Err(ManifestError::TooLarge { bytes });
    }
    Ok(())
}

pub(super) fn name(name: &str) -> Result<(), ManifestError> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        return Err(ManifestError::NameLength {
            start: cut(name, 32).to_owned(),
            bytes: name.len(),
        });
    }
    Ok(())
}

pub(super) fn region(number: usize, region: &Region) -> Result<(), ManifestError> {
    if region.legacy.is_some() != (region.handle == HandleKind::CudaIpc) {
        return Err(ManifestError::LegacyHandle { region: number });
    }
    let start = region.legacy.map_or(0, |legacy| legacy.offset);
    let end = start.saturating_add(region.bytes);
    if end > MAX_REGION_BYTES {
        return Err(ManifestError::RegionTooLarge { region: number, end });
    }
    Ok(())
}

/// Its region must be there and hold all of it.
pub(super) fn tensor(tensor: &Tensor<'_>, regions: &[Region]) -> Result<(), ManifestError> {
    let Tensor {
        name,
        dtype,
        shape,
        strides,
        region,
        offset,
        ..
    } = *tensor;
    let Some(bytes) = regions.get(region).map(|region| region.bytes) else {
        return Err(ManifestError::NoRegion {
            tensor: name.into(),
            region,
            regions: regions.len(),
        });
    };
    view::check(dtype, shape, strides, offset, bytes).map_err(|source| ManifestError::View {
        tensor: name.into(),
        source,
    })
}
