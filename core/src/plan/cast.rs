//! Casts between the 16 and 32-bit floating types, as IEEE 754 has them: to the nearest, ties to
//! even, with infinities kept and every NaN a NaN (quiet, with as much of its payload as fits).

use crate::content::Dtype;

/// A cast from one of F32, F16 and BF16 to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cast {
    from: Float,
    to: Float,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Float {
    F16,
    Bf16,
    F32,
}

impl Cast {
    /// The cast between two different floating types; `None` where there is no such cast (other
    /// types are stored as they are) or nothing to do.
    pub fn new(from: Dtype, to: Dtype) -> Option<Cast> {
        let (from, to) = (Float::of(from)?, Float::of(to)?);
        (from != to).then_some(Cast { from, to })
    }

    /// The width of a source element in bytes.
    pub(crate) fn source_element(self) -> u64 {
        self.from.bytes()
    }

    /// The width of a destination element in bytes.
    pub(crate) fn result_element(self) -> u64 {
        self.to.bytes()
    }

    /// The bytes that `source` bytes of whole elements become; `None` on overflow.
    pub fn scale(self, source: u64) -> Option<u64> {
        (source / self.source_element()).checked_mul(self.result_element())
    }

    /// Casts the little-endian elements of `source` into `destination`.
    ///
    /// # Panics
    /// When `source` is not whole elements, or `destination` is not exactly as long as they become.
    pub fn apply(self, source: &[u8], destination: &mut [u8]) {
        match (self.from, self.to) {
            (Float::F32, Float::F16) => each(source, destination, |x| f16_from_f32(f32::from_le_bytes(x))),
            (Float::F32, Float::Bf16) => each(source, destination, |x| bf16_from_f32(f32::from_le_bytes(x))),
            (Float::F16, Float::F32) => each(source, destination, |x| f32_from_f16(x).to_le_bytes()),
            (Float::Bf16, Float::F32) => each(source, destination, |x| f32_from_bf16(x).to_le_bytes()),
            (Float::F16, Float::Bf16) => each(source, destination, |x| bf16_from_f32(f32_from_f16(x))),
            (Float::Bf16, Float::F16) => each(source, destination, |x| f16_from_f32(f32_from_bf16(x))),
            (Float::F16, Float::F16) | (Float::Bf16, Float::Bf16) | (Float::F32, Float::F32) => {
                destination.copy_from_slice(source)
            }
        }
    }
}

impl Float {
    fn of(dtype: Dtype) -> Option<Float> {
        match dtype {
            Dtype::F16 => Some(Float::F16),
            Dtype::BF16 => Some(Float::Bf16),
            Dtype::F32 => Some(Float::F32),
            _ => None,
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Float::F16 | Float::Bf16 => 2,
            Float::F32 => 4,
        }
    }
}

fn each<const N: usize, const M: usize>(
    source: &[u8],
    destination: &mut [u8],
    cast: impl Fn([u8; N]) -> [u8; M],
) {
    let (source, rest) = source.as_chunks::<N>();
    let (destination, left) = destination.as_chunks_mut::<M>();
    assert!(
        rest.is_empty() && left.is_empty() && source.len() == destination.len(),
        "whole elements"
    );
    for (from, to) in source.iter().zip(destination) {
        *to = cast(*from);
    }
}

fn f32_from_bf16(bits: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bits)) << 16)
}

fn bf16_from_f32(value: f32) -> [u8; 2] {
    let bits = value.to_bits();
    let rounded = if value.is_nan() {
        // The upper half alone could read as infinity: the quiet bit keeps it a NaN.
        bits >> 16 | 0x0040
    } else {
        // Half of the last kept place, less one where that place is even, so that ties stay even.
        // A carry out of the mantissa is the next exponent, and at the top it is infinity.
        (bits + 0x7fff + (bits >> 16 & 1)) >> 16
    };
    (rounded as u16).to_le_bytes()
}

fn f32_from_f16(bits: [u8; 2]) -> f32 {
    let bits = u32::from(u16::from_le_bytes(bits));
    let (sign, exponent, mantissa) = ((bits & 0x8000) << 16, bits >> 10 & 0x1f, bits & 0x3ff);
    let magnitude = match (exponent, mantissa) {
        (0x1f, 0) => 0x7f80_0000,
        (0x1f, payload) => 0x7fc0_0000 | payload << 13,
        // Subnormal: the mantissa counts units of 2^-24, exact in an f32.
        (0, units) => (units as f32 * f32::from_bits((127 - 24) << 23)).to_bits(),
        (exponent, mantissa) => (exponent + 127 - 15) << 23 | mantissa << 13,
    };
    f32::from_bits(sign | magnitude)
}

fn f16_from_f32(value: f32) -> [u8; 2] {
    let bits = value.to_bits();
    let sign = bits >> 16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    let half = if magnitude > 0x7f80_0000 {
        0x7e00 | (magnitude >> 13 & 0x3ff)
    } else if magnitude >= 0x4780_0000 {
        // 65536 and above, infinity included. (From 65520 up the rounding below gets there itself.)
        0x7c00
    } else if magnitude >= 0x3880_0000 {
        // Normal in f16 (2^-14 and above): the exponent is shifted to its new bias, then rounded.
        let rebiased = magnitude - ((127 - 15) << 23);
        (rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13
    } else {
        // Subnormal: adding 0.5 moves units of 2^-24 to the last place of the sum, and the
        // addition itself rounds to the nearest, ties to even.
        (f32::from_bits(magnitude) + 0.5).to_bits() - 0.5f32.to_bits()
    };
    ((sign | half) as u16).to_le_bytes()
}

#[cfg(test)]
mod tests;
