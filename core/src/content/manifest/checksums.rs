//! Checksums of what the tensors of a manifest hold.

use super::{Manifest, ManifestError, Tensor};

/// A run of bytes of a region that belong to tensors: one tensor that shares no byte with another, or
/// several that do, such as a fused tensor and its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    /// The number of the region.
    pub region: usize,
    /// The first byte, from the start of the region.
    pub offset: u64,
    /// How many bytes; never 0.
    pub bytes: u64,
}

impl Extent {
    /// Where it ends in its region.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

impl Manifest {
    /// The runs of bytes that tensors have, in ascending order, apart from each other. It takes time in the
    /// number of tensors.
    pub fn extents(&self) -> Vec<Extent> {
        let mut all: Vec<Extent> = self.tensors().filter_map(|tensor| of_tensor(&tensor)).collect();
        all.sort_unstable();
        all.dedup_by(|next, kept| {
            let share = next.region == kept.region && next.offset < kept.end();
            if share {
                kept.bytes = kept.bytes.max(next.end() - kept.offset);
            }
            share
        });
        all
    }

    /// The CRC-64/NVME of the bytes of each of the [`extents`](Self::extents), in their order; absent where
    /// whoever published did not compute any. They tell of faults, and not of forgers.
    pub fn checksums(&self) -> Option<&[u64]> {
        self.checksums.as_deref()
    }

    /// The same manifest with these checksums.
    ///
    /// # Errors
    /// Not one for each extent; too large with them.
    pub fn with_checksums(mut self, checksums: Vec<u64>) -> Result<Manifest, ManifestError> {
        self.checksums = Some(checksums);
        self.check_checksums()?;
        super::check::encoded_bytes(self.encoded_bytes())?;
        Ok(self)
    }

    /// The same manifest without checksums, for memory that may come to hold something else.
    pub fn without_checksums(mut self) -> Manifest {
        self.checksums = None;
        self
    }

    pub(super) fn check_checksums(&self) -> Result<(), ManifestError> {
        let Some(checksums) = &self.checksums else {
            return Ok(());
        };
        let (counted, taken) = (checksums.len() as u64, self.extents().len() as u64);
        if counted != taken {
            let what = "checksums";
            return Err(ManifestError::Count { what, counted, taken });
        }
        Ok(())
    }
}

/// A checked tensor ends inside its region.
fn of_tensor(tensor: &Tensor<'_>) -> Option<Extent> {
    let extent = Extent {
        region: tensor.region,
        offset: tensor.offset,
        bytes: tensor.extent(),
    };
    (extent.bytes > 0).then_some(extent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
    use crate::content::{DeviceUuid, Dtype, HandleKind};

    /// Bytes of two regions by name.
    fn manifest(tensors: &[(&str, usize, u64, u64)]) -> Manifest {
        let mut builder = ManifestBuilder::new();
        for _ in 0..2 {
            builder.region(Region {
                handle: HandleKind::Memfd,
                bytes: 1000,
                device: DeviceUuid([1; 16]),
                legacy: None,
            });
        }
        for &(name, region, offset, bytes) in tensors {
            let spec = TensorSpec {
                kind: TensorKind::Parameter,
                persistent: true,
                dtype: Dtype::U8,
                shape: &[bytes],
                strides: None,
                region,
                offset,
            };
            builder.tensor(name, spec);
        }
        builder.finish().unwrap()
    }

    #[test]
    fn tensors_that_share_bytes_are_one_extent_and_neighbours_are_not() {
        let manifest = manifest(&[
            ("q", 0, 300, 100),
            ("k", 0, 400, 50),
            ("qk", 0, 300, 150),
            ("after", 0, 450, 10),
            ("empty", 0, 310, 0),
            ("elsewhere", 1, 300, 20),
            ("first", 0, 0, 300),
        ]);
        let extents = manifest.extents();
        let found: Vec<_> = extents
            .iter()
            .map(|extent| (extent.region, extent.offset, extent.bytes))
            .collect();
        assert_eq!(found, [(0, 0, 300), (0, 300, 150), (0, 450, 10), (1, 300, 20)]);
    }

    #[test]
    fn there_is_one_checksum_for_each_extent_and_they_are_encoded() {
        let manifest = manifest(&[("a", 0, 0, 10), ("b", 0, 256, 10), ("empty", 1, 0, 0)]);
        let error = manifest.clone().with_checksums(vec![1]).unwrap_err();
        assert!(
            matches!(
                error,
                ManifestError::Count {
                    counted: 1,
                    taken: 2,
                    ..
                }
            ),
            "{error}"
        );
        let without = manifest.clone();
        let with = manifest.with_checksums(vec![1, u64::MAX]).unwrap();
        assert_eq!(with.checksums(), Some(&[1, u64::MAX][..]));
        assert_ne!(with, without);
        for manifest in [with, without] {
            assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
        }
        // Of no tensors, none and no checksums at all differ.
        let none = super::tests::manifest(&[]).with_checksums(vec![]).unwrap();
        assert_eq!(
            Manifest::decode(&none.encode()).unwrap().checksums(),
            Some(&[][..])
        );
    }
}
