//! Casts on load, compared with what the formats mean, element by element.

use super::gather::assert_gathers;
use super::made::execute::execute;
use super::made::generated::{Shared, cases};
use super::made::{Made, SMALL, Tensor, content, width, world};
use super::{plan, stored};
use proptest::prelude::*;
use serde_json::json;
use weightd_checkpoint::{FloatDtype, Layout, ShardingOptions};

const FLOATS: [&str; 3] = ["F32", "F16", "BF16"];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn floating_weights_of_any_model_are_cast_as_their_values_round(
        mut case in cases(), from in prop::sample::select(FLOATS.to_vec()), to in prop::sample::select(vec![
            FloatDtype::Auto, FloatDtype::Float32, FloatDtype::Float16, FloatDtype::Bfloat16,
        ]),
    ) {
        case.options.dtype = to;
        let (first, second) = case.files();
        let typed = |tensors: Vec<Tensor>| -> Vec<Tensor> {
            tensors.into_iter().map(|(name, _, shape)| (name, from, shape)).collect()
        };
        let checkpoint = Made::filled(&case.config(), &[typed(first), typed(second)], special).open();
        let vllm = case.options.layout == Layout::Vllm;
        assert_gathers(&case, &checkpoint, |Shared { tensor: (name, ..), .. }| {
            let to = match to {
                _ if vllm && name.ends_with("e_score_correction_bias") => "F32",
                FloatDtype::Float32 => "F32",
                FloatDtype::Float16 => "F16",
                FloatDtype::Bfloat16 => "BF16",
                FloatDtype::Auto if vllm => "BF16",
                FloatDtype::Auto => from,
            };
            (to, cast(from, to, &stored(&checkpoint, name).1))
        });
    }
}

#[test]
fn the_reference_itself_knows_the_formats() {
    let cast = |from, to, bits: u32| {
        let to_bytes = cast(from, to, &bits.to_le_bytes()[..width(from) as usize]);
        u32::from_le_bytes([to_bytes, vec![0; 4]].concat()[..4].try_into().unwrap())
    };
    for (value, bits) in [
        (1.0f32, 0x3c00),
        (65504.0, 0x7bff),
        (65519.99, 0x7bff),
        (65520.0, 0x7c00),
        (6e-8, 1),
    ] {
        assert_eq!(cast("F32", "F16", value.to_bits()), bits, "{value}");
    }
    assert_eq!(
        cast("F32", "F16", (-2.0f32.powi(-25)).to_bits()),
        0x8000,
        "a tie, to even"
    );
    assert_eq!(cast("F32", "BF16", 0x3f80_8000), 0x3f80, "a tie, to even");
    assert_eq!(cast("F32", "BF16", 0x3f81_8000), 0x3f82, "a tie, to even");
    assert_eq!(cast("F32", "BF16", f32::MAX.to_bits()), 0x7f80);
    assert_eq!(cast("F16", "F32", 1), 2.0f32.powi(-24).to_bits());
    assert_eq!(cast("BF16", "F16", 0xff80), 0xfc00);
}

#[test]
fn what_is_no_floating_weight_is_never_cast() {
    let mut tensors = SMALL.tensors();
    let norms = tensors.iter_mut().filter(|(name, ..)| name.contains("layernorm"));
    for ((_, dtype, _), to) in norms.zip(["I64", "I32", "I64", "I32"]) {
        *dtype = to;
    }
    let checkpoint = Made::new(&SMALL.config(), &[tensors.clone()]).open();
    for layout in [Layout::Checkpoint, Layout::Vllm] {
        for dtype in [FloatDtype::Auto, FloatDtype::Float32, FloatDtype::Float16] {
            let plan = plan(
                &checkpoint,
                &ShardingOptions {
                    layout,
                    dtype,
                    ..world(2, 1, 1)
                },
            )
            .unwrap();
            let held = execute(&checkpoint, &plan);
            for (name, stored_dtype, _) in tensors.iter().filter(|(name, ..)| name.contains("layernorm")) {
                for (rank, held) in plan.ranks().iter().zip(&held) {
                    assert_eq!(rank.manifest.get(name).unwrap().dtype.name(), *stored_dtype);
                    assert_eq!(held[name], stored(&checkpoint, name), "{name}");
                }
            }
        }
    }
}

#[test]
fn by_itself_the_type_is_the_stored_one_or_what_vllm_takes() {
    for (stated, stored, vllm) in [
        (json!("bfloat16"), "F32", "BF16"),
        (json!("float16"), "BF16", "F16"),
        (json!("float32"), "F32", "BF16"),
        (json!(null), "F16", "F16"),
        (json!("float8_e4m3fn"), "F16", "F16"),
    ] {
        let mut config = SMALL.config();
        config["dtype"] = stated.clone();
        let tensors: Vec<Tensor> = SMALL
            .tensors()
            .into_iter()
            .map(|(name, _, shape)| (name, stored, shape))
            .collect();
        let checkpoint = Made::new(&config, &[tensors]).open();
        for (layout, expected) in [(Layout::Checkpoint, stored), (Layout::Vllm, vllm)] {
            let plan = plan(
                &checkpoint,
                &ShardingOptions {
                    layout,
                    ..world(1, 1, 1)
                },
            )
            .unwrap();
            for tensor in plan.ranks()[0].manifest.tensors() {
                assert_eq!(
                    tensor.dtype.name(),
                    expected,
                    "{layout}, {stated}: {}",
                    tensor.name
                );
            }
        }
    }
}

/// Any bits, and often those where formats end.
fn special(name: &str, dtype: &str, elements: u64) -> Vec<u8> {
    let Format { exponent, mantissa } = Format::of(dtype);
    let infinity = ((1u64 << exponent) - 1) << mantissa;
    let edges = [
        0,
        1,
        3,
        (1 << mantissa) - 1,
        1 << mantissa,
        infinity - 1,
        infinity,
        infinity | 1,
        infinity | 1 << (mantissa - 1),
        infinity | ((1 << mantissa) - 1),
    ];
    let width = width(dtype) as usize;
    let random = content(name, elements * (width as u64 + 1));
    let element = |bytes: &[u8]| {
        let (choice, bits) = (bytes[0], &bytes[1..]);
        let edge =
            edges[usize::from(choice >> 2) % edges.len()] | u64::from(choice & 1) << (exponent + mantissa);
        match choice & 2 {
            0 => edge.to_le_bytes()[..width].to_vec(),
            _ => bits.to_vec(),
        }
    };
    random.chunks(width + 1).flat_map(element).collect()
}

/// A binary format of IEEE 754: sign, exponent, mantissa.
struct Format {
    exponent: u32,
    mantissa: u32,
}

/// Casts by value: an f64 has every value of these formats.
fn cast(from: &str, to: &str, bytes: &[u8]) -> Vec<u8> {
    if from == to {
        return bytes.to_vec();
    }
    let element = |element: &[u8]| {
        let mut bits = [0; 8];
        bits[..element.len()].copy_from_slice(element);
        let value = Format::of(from).value(u64::from_le_bytes(bits));
        Format::of(to).nearest(value).to_le_bytes()[..width(to) as usize].to_vec()
    };
    bytes.chunks(width(from) as usize).flat_map(element).collect()
}

impl Format {
    fn of(dtype: &str) -> Format {
        match dtype {
            "F32" => Format {
                exponent: 8,
                mantissa: 23,
            },
            "F16" => Format {
                exponent: 5,
                mantissa: 10,
            },
            "BF16" => Format {
                exponent: 8,
                mantissa: 7,
            },
            other => panic!("{other} is no floating type"),
        }
    }

    fn bias(&self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }

    fn value(&self, bits: u64) -> f64 {
        let sign = if bits >> (self.exponent + self.mantissa) & 1 == 1 {
            -1.0
        } else {
            1.0
        };
        let exponent = (bits >> self.mantissa & ((1 << self.exponent) - 1)) as i32;
        let units = bits & ((1 << self.mantissa) - 1);
        let one = 1u64 << self.mantissa;
        let scale = |exponent: i32| 2f64.powi(exponent - self.bias() - self.mantissa as i32);
        match exponent {
            _ if exponent == (1 << self.exponent) - 1 && units == 0 => sign * f64::INFINITY,
            _ if exponent == (1 << self.exponent) - 1 => f64::NAN.copysign(sign),
            0 => sign * units as f64 * scale(1),
            _ => sign * (one + units) as f64 * scale(exponent),
        }
    }

    /// The nearest value's bits, of two that are as near the even one.
    fn nearest(&self, value: f64) -> u64 {
        let sign = u64::from(value.is_sign_negative()) << (self.exponent + self.mantissa);
        let infinity = ((1u64 << self.exponent) - 1) << self.mantissa;
        let value = value.abs();
        if value.is_nan() {
            return sign | infinity | 1 << (self.mantissa - 1);
        }
        if value.is_infinite() {
            return sign | infinity;
        }
        // The exponent of the binade that the value is in, the lowest for all below.
        let exponent = ((value.to_bits() >> 52) as i32 - 1023).max(1 - self.bias());
        let units = (value / 2f64.powi(exponent - self.mantissa as i32)).round_ties_even() as u64;
        // A carry is the next exponent's first value; and of the last one, infinity.
        let bits = ((exponent + self.bias() - 1) as u64) * (1 << self.mantissa) + units;
        sign | bits.min(infinity)
    }
}
