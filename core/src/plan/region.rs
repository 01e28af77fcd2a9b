//! The layout of a region: the tensors of one rank, one after another, in one device allocation.

use thiserror::Error;

/// Every tensor starts at a multiple of this many bytes from the start of its region: what the
/// widest device loads and the common kernels ask for.
pub const TENSOR_ALIGNMENT: u64 = 256;

/// A region that grows by one tensor at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionLayout {
    bytes: u64,
}

/// The region would be larger than 64-bit offsets can say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a tensor of {bytes} bytes does not fit behind the {placed} bytes already in its region")]
pub struct RegionTooLarge {
    /// Size of the tensor that did not fit, in bytes.
    pub bytes: u64,
    /// Size of the region before it, in bytes.
    pub placed: u64,
}

impl RegionLayout {
    /// An empty region.
    pub fn new() -> RegionLayout {
        RegionLayout::default()
    }

    /// Takes room for a tensor of `bytes` and says at which offset it starts.
    pub fn place(&mut self, bytes: u64) -> Result<u64, RegionTooLarge> {
        let too_large = RegionTooLarge {
            bytes,
            placed: self.bytes,
        };
        let offset = self
            .bytes
            .checked_next_multiple_of(TENSOR_ALIGNMENT)
            .ok_or(too_large)?;
        self.bytes = offset.checked_add(bytes).ok_or(too_large)?;
        Ok(offset)
    }

    /// The size of the region in bytes: the end of its last tensor.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_region_beyond_64_bits_is_an_error_and_changes_nothing() {
        let mut layout = RegionLayout::new();
        assert_eq!(layout.place(300), Ok(0));
        let before = layout.clone();
        assert_eq!(
            layout.place(u64::MAX - 100),
            Err(RegionTooLarge {
                bytes: u64::MAX - 100,
                placed: 300
            })
        );
        assert_eq!(layout, before);
        assert_eq!(layout.place(u64::MAX - 512), Ok(512));
        assert_eq!(layout.bytes(), u64::MAX);
    }

    proptest! {
        #[test]
        fn tensors_are_aligned_apart_and_inside(sizes in prop::collection::vec(0u64..2000, 0..50)) {
            let mut layout = RegionLayout::new();
            let mut end = 0;
            for bytes in sizes {
                let offset = layout.place(bytes).unwrap();
                prop_assert!(offset.is_multiple_of(TENSOR_ALIGNMENT));
                prop_assert!(offset >= end && offset - end < TENSOR_ALIGNMENT);
                end = offset + bytes;
                prop_assert_eq!(layout.bytes(), end);
            }
        }
    }
}
