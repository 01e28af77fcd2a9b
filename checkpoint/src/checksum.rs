//! Checksums of what ranks hold: taken from the bytes on their way there, and again from what is there.
//!
//! They are CRC-64/NVME (NVM Express NVM Command Set Specification, "64b CRC"). A CRC is linear: that of a
//! whole is the exclusive or of those of its parts, each as if followed by zeros up to the end. So workers
//! add what they write in any order, down to single rows.

use crc_fast::{CrcParams, checksum_with_params};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use weightd_core::content::Manifest;
use weightd_core::content::manifest::Extent;
use weightd_gpu::Rows;

/// The checksums of one rank's extents, while their bytes are added.
#[derive(Debug)]
pub(crate) struct Checksums {
    extents: Vec<Extent>,
    /// The exclusive or of what was added, by extent.
    sums: Vec<AtomicU64>,
    linear: CrcParams,
}

impl Checksums {
    pub fn new(manifest: &Manifest) -> Checksums {
        let extents = manifest.extents();
        Checksums {
            sums: extents.iter().map(|_| AtomicU64::new(0)).collect(),
            extents,
            linear: CrcParams::new("CRC-64/NVME, linear", 64, POLYNOMIAL, 0, true, 0, 0),
        }
    }

    /// What is summed.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Adds rows of `source` that are in region `region`, or on their way there; all of them lie in one extent.
    pub fn add(&self, region: usize, source: &[u8], added: &Rows) {
        let Rows {
            offset: at,
            dst_pitch,
            src_pitch,
            width,
            rows,
        } = *added;
        if width == 0 || rows == 0 {
            return;
        }
        let before = |extent: &Extent| (extent.region, extent.end()) <= (region, at);
        let number = self.extents.partition_point(before);
        let crc = |bytes: &[u8]| checksum_with_params(self.linear, bytes);
        let packed = src_pitch == width && dst_pitch == width as u64;
        let sum = match packed || rows == 1 {
            true => crc(&source[..width * rows]),
            false => {
                let shift = zeros(dst_pitch);
                let row = |number: usize| &source[number * src_pitch..][..width];
                (0..rows).fold(0, |sum, number| multiply(sum, shift) ^ crc(row(number)))
            }
        };
        let end = at + dst_pitch * (rows as u64 - 1) + width as u64;
        let extent = self.extents[number];
        assert!(
            extent.offset <= at && end <= extent.end(),
            "{at}..{end} is not in {extent:?}"
        );
        let sum = multiply(sum, zeros(extent.end() - end));
        self.sums[number].fetch_xor(sum, Relaxed);
    }

    /// The CRC-64/NVME of every extent, once all of its bytes but zeros were added.
    pub fn finish(self) -> Vec<u64> {
        let standard = |(extent, sum): (&Extent, AtomicU64)| {
            sum.into_inner() ^ multiply(u64::MAX, zeros(extent.bytes)) ^ u64::MAX
        };
        self.extents.iter().zip(self.sums).map(standard).collect()
    }
}

/// CRC-64/NVME's polynomial, without its highest power.
const POLYNOMIAL: u64 = 0xad93_d235_94c9_3659;

// Polynomials over GF(2) modulo that one are numbers here with the lowest power in the highest bit, as the
// checksums are.

/// What the checksum of bytes is multiplied by when so many zero bytes follow: x to the 8 times that.
fn zeros(bytes: u64) -> u64 {
    let set = (0..64).filter(|power| bytes >> power & 1 == 1);
    set.fold(ONE, |product, power| multiply(product, POWERS[power]))
}

const ONE: u64 = 1 << 63;

/// x to the 8, and each the square of the one before it.
const POWERS: [u64; 64] = {
    let mut powers = [ONE >> 8; 64];
    let mut n = 1;
    while n < 64 {
        powers[n] = multiply(powers[n - 1], powers[n - 1]);
        n += 1;
    }
    powers
};

const fn multiply(a: u64, mut b: u64) -> u64 {
    let (mut product, mut bit) = (0, ONE);
    while bit != 0 {
        // All ones or none, so that nothing has to be guessed.
        product ^= b & 0u64.wrapping_sub((a & bit != 0) as u64);
        b = (b >> 1) ^ (POLYNOMIAL.reverse_bits() & 0u64.wrapping_sub(b & 1));
        bit >>= 1;
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
    use weightd_core::content::{DeviceUuid, Dtype, HandleKind};

    /// CRC-64/NVME, bit by bit, as its specification has it.
    fn reference(bytes: &[u8]) -> u64 {
        let step = |crc: u64| {
            (crc >> 1)
                ^ if crc & 1 == 1 {
                    POLYNOMIAL.reverse_bits()
                } else {
                    0
                }
        };
        !bytes.iter().fold(u64::MAX, |crc, byte| {
            (0..8).fold(crc ^ u64::from(*byte), |crc, _| step(crc))
        })
    }

    /// One-dimensional tensors of these sizes, each at a multiple of 256.
    fn manifest(sizes: &[u64]) -> Manifest {
        let mut builder = ManifestBuilder::new();
        builder.region(Region {
            handle: HandleKind::Memfd,
            bytes: 1 << 20,
            device: DeviceUuid([1; 16]),
            legacy: None,
        });
        let mut offset = 0;
        for (number, &size) in sizes.iter().enumerate() {
            let spec = TensorSpec {
                kind: TensorKind::Parameter,
                persistent: true,
                dtype: Dtype::U8,
                shape: &[size],
                strides: None,
                region: 0,
                offset,
            };
            builder.tensor(&number.to_string(), spec);
            offset = (offset + size).next_multiple_of(256);
        }
        builder.finish().unwrap()
    }

    #[test]
    fn the_checksum_is_the_one_of_the_catalogue() {
        let sums = Checksums::new(&manifest(&[9]));
        sums.add(0, b"123456789", &Rows::one(0, 9));
        assert_eq!(sums.finish(), [0xae8b_1486_0a79_9888]);
        assert_eq!(reference(b"123456789"), 0xae8b_1486_0a79_9888);
    }

    proptest! {
        #[test]
        fn parts_in_any_order_make_the_checksum_of_the_whole(
            bytes in prop::collection::vec(any::<u8>(), 1..600),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
            reversed in any::<bool>(),
        ) {
            let sums = Checksums::new(&manifest(&[300, bytes.len() as u64, 7]));
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort();
            let mut parts: Vec<_> = cuts.windows(2).map(|cut| (cut[0], &bytes[cut[0]..cut[1]])).collect();
            if reversed {
                parts.reverse();
            }
            for (at, part) in parts {
                sums.add(0, part, &Rows::one(512 + at as u64, part.len() as u64));
            }
            // What nothing was added of is zeros.
            prop_assert_eq!(sums.finish(), [reference(&[0; 300]), reference(&bytes), reference(&[0; 7])]);
        }

        #[test]
        fn rows_are_added_where_they_lie(
            width in 1usize..20, gap in 0usize..20, at_gap in 0usize..20, rows in 1usize..12, start in 0usize..30,
            tail in 0usize..40,
        ) {
            let bytes: Vec<u8> = (0..(width + gap) * rows).map(|n| (n * 37 + 5) as u8).collect();
            let mut whole = vec![0; start + (width + at_gap) * rows + tail];
            for number in 0..rows {
                let row = &bytes[number * (width + gap)..][..width];
                whole[start + number * (width + at_gap)..][..width].copy_from_slice(row);
            }
            let sums = Checksums::new(&manifest(&[whole.len() as u64]));
            let added = Rows {
                offset: start as u64, dst_pitch: (width + at_gap) as u64, src_pitch: width + gap, width, rows,
            };
            sums.add(0, &bytes, &added);
            prop_assert_eq!(sums.finish(), [reference(&whole)]);
        }
    }
}
