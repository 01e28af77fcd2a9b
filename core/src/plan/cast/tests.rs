use super::*;

fn cast<const M: usize>(from: Dtype, to: Dtype, source: &[u8]) -> [u8; M] {
    let mut destination = [0; M];
    Cast::new(from, to).unwrap().apply(source, &mut destination);
    destination
}

fn widen(from: Dtype, half: u16) -> f32 {
    f32::from_le_bytes(cast(from, Dtype::F32, &half.to_le_bytes()))
}

fn narrow(to: Dtype, value: f32) -> u16 {
    u16::from_le_bytes(cast(Dtype::F32, to, &value.to_le_bytes()))
}

/// What 16 bits mean, by the definition of a binary floating type with this many exponent bits.
fn meaning(half: u16, exponent_bits: u32) -> f64 {
    let mantissa_bits = 15 - exponent_bits;
    let bias = (1 << (exponent_bits - 1)) - 1;
    let exponent = i32::from(half >> mantissa_bits) & ((1 << exponent_bits) - 1);
    let fraction = f64::from(half & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let magnitude = if exponent == (1 << exponent_bits) - 1 {
        if fraction == 0.0 { f64::INFINITY } else { f64::NAN }
    } else if exponent == 0 {
        fraction * 2f64.powi(1 - bias)
    } else {
        (1.0 + fraction) * 2f64.powi(exponent - bias)
    };
    if half & 0x8000 == 0 { magnitude } else { -magnitude }
}

const HALVES: [(Dtype, u32); 2] = [(Dtype::F16, 5), (Dtype::BF16, 8)];

#[test]
fn every_16_bit_value_widens_to_what_it_means() {
    for (dtype, exponent_bits) in HALVES {
        for half in 0..=u16::MAX {
            let (got, expected) = (f64::from(widen(dtype, half)), meaning(half, exponent_bits));
            assert!(
                got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(),
                "{dtype:?} {half:04x}"
            );
        }
    }
}

#[test]
fn every_16_bit_value_survives_f32() {
    for (dtype, exponent_bits) in HALVES {
        let quiet = 1 << (14 - exponent_bits);
        for half in 0..=u16::MAX {
            let back = narrow(dtype, widen(dtype, half));
            if meaning(half, exponent_bits).is_nan() {
                assert_eq!(back, half | quiet, "{dtype:?} {half:04x}");
            } else {
                assert_eq!(back, half, "{dtype:?} {half:04x}");
            }
        }
    }
}

#[test]
fn narrowing_rounds_to_the_nearest_and_ties_to_even_between_all_neighbours() {
    for (dtype, exponent_bits) in HALVES {
        let infinity = ((1 << exponent_bits) - 1) << (15 - exponent_bits);
        for low in 0..infinity {
            let high = low + 1;
            // Infinity stands where the next finite value would: that is where overflow rounds.
            let above = if high == infinity {
                meaning(low, exponent_bits) * 2.0 - meaning(low - 1, exponent_bits)
            } else {
                meaning(high, exponent_bits)
            };
            let middle = (meaning(low, exponent_bits) + above) / 2.0;
            let tie = middle as f32;
            assert_eq!(f64::from(tie), middle, "a tie is exact in an f32");
            let even = if low % 2 == 0 { low } else { high };
            for (value, expected) in [(tie.next_down(), low), (tie, even), (tie.next_up(), high)] {
                assert_eq!(narrow(dtype, value), expected, "{dtype:?} {value:e}");
                assert_eq!(narrow(dtype, -value), expected | 0x8000, "{dtype:?} -{value:e}");
            }
        }
    }
}

#[test]
fn a_nan_stays_one_also_when_its_payload_does_not_fit() {
    for (dtype, exponent_bits) in HALVES {
        for bits in [0x7f80_0001u32, 0xff80_0001, 0x7fff_ffff, 0x7fa0_0000] {
            let half = narrow(dtype, f32::from_bits(bits));
            assert!(meaning(half, exponent_bits).is_nan());
            assert_eq!(half >> 15, (bits >> 31) as u16, "the sign is kept");
        }
    }
}

#[test]
fn the_16_bit_types_cast_into_each_other_as_their_values_do() {
    for half in 0..=u16::MAX {
        let bytes = half.to_le_bytes();
        let value = narrow(Dtype::BF16, widen(Dtype::F16, half));
        assert_eq!(cast(Dtype::F16, Dtype::BF16, &bytes), value.to_le_bytes());
        let value = narrow(Dtype::F16, widen(Dtype::BF16, half));
        assert_eq!(cast(Dtype::BF16, Dtype::F16, &bytes), value.to_le_bytes());
    }
}

#[test]
fn only_floating_types_of_16_and_32_bits_cast() {
    assert_eq!(Cast::new(Dtype::F32, Dtype::F32), None);
    assert_eq!(Cast::new(Dtype::I32, Dtype::F32), None);
    assert_eq!(Cast::new(Dtype::F32, Dtype::F8_E4M3), None);
    let cast = Cast::new(Dtype::F32, Dtype::BF16).unwrap();
    assert_eq!(
        (cast.source_element(), cast.result_element(), cast.scale(12)),
        (4, 2, Some(6))
    );
    assert_eq!(Cast::new(Dtype::F16, Dtype::F32).unwrap().scale(u64::MAX), None);
}
