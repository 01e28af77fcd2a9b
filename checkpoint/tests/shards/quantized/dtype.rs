//! What is cast of a quantized checkpoint, and what belongs to no layer.

use crate::made::execute::execute;
use crate::made::methods::{method, methods};
use crate::made::{Decoder, Made, SMALL, known, tensor_parallel, width, world};
use crate::{cut_weights_off, plan, stored};
use serde_json::json;
use weightd_checkpoint::{FloatDtype, ShardingOptions};

/// Units of any method divide its sizes, also by two.
const EVEN: Decoder = Decoder {
    layers: 1,
    hidden: 256,
    heads: 2,
    kv_heads: 2,
    head_dim: 256,
    intermediate: 256,
    vocabulary: 4,
    ..SMALL
};

/// As [`EVEN`], of blocks that are not powers of two.
const ODD: Decoder = Decoder {
    head_dim: 60,
    intermediate: 120,
    hidden: 14,
    ..EVEN
};

fn decoder(units: [u64; 2]) -> Decoder {
    match units.iter().all(|&unit| EVEN.hidden.is_multiple_of(unit)) {
        true => EVEN,
        false => ODD,
    }
}

#[test]
fn nothing_of_a_quantized_layer_is_cast_and_all_else_is() {
    for method in methods() {
        let (config, tensors) = method.quantize(&decoder(method.units));
        let of_layers: Vec<&str> = method.store(8, 8).iter().map(|stored| stored.suffix).collect();
        let made = Made::filled(&config, std::slice::from_ref(&tensors), |_, dtype, elements| {
            vec![0; (elements * width(dtype)) as usize]
        });
        let checkpoint = made.open();
        cut_weights_off(&checkpoint);
        for (dtype, to) in [
            (FloatDtype::Float32, "F32"),
            (FloatDtype::Float16, "F16"),
            (FloatDtype::Bfloat16, "BF16"),
        ] {
            for tp in [1, 2] {
                let plan = plan(
                    &checkpoint,
                    &ShardingOptions {
                        dtype,
                        ..tensor_parallel(tp)
                    },
                )
                .unwrap_or_else(|error| panic!("{}: {error}", method.name));
                for (name, stored, _) in &tensors {
                    let quantized = name.contains("_proj.")
                        && of_layers
                            .iter()
                            .any(|suffix| name.ends_with(&format!(".{suffix}")));
                    let expected = if quantized { stored } else { to };
                    for rank in plan.ranks() {
                        let found = rank.manifest.get(name).unwrap().dtype.name();
                        assert_eq!(found, expected, "{name} of {} at tp {tp}", method.name);
                    }
                }
            }
        }
    }
}

#[test]
fn scales_of_any_floating_type_are_as_they_are_stored() {
    for scale in ["F32", "F16", "BF16"] {
        let (config, mut tensors) =
            method("pack-quantized of 4 bits, groups of 16, symmetric: false").quantize(&EVEN);
        tensors
            .iter_mut()
            .filter(|(name, ..)| name.ends_with("_scale"))
            .for_each(|tensor| tensor.1 = known(scale));
        let checkpoint = Made::new(&config, &[tensors]).open();
        let held = |dtype| {
            let options = ShardingOptions {
                dtype,
                ..tensor_parallel(2)
            };
            execute(&checkpoint, &plan(&checkpoint, &options).unwrap())
        };
        let (as_stored, cast) = (held(FloatDtype::Auto), held(FloatDtype::Float32));
        for (as_stored, cast) in as_stored.iter().zip(&cast) {
            for (name, bytes) in as_stored {
                let is_cast = !name.contains("_proj.weight_");
                assert_eq!(cast[name] != *bytes, is_cast, "{name}, scales of {scale}");
            }
        }
    }
}

#[test]
fn scales_of_a_quantized_cache_are_whole_on_every_rank_of_their_stage() {
    let scales = [
        ("self_attn.k_scale", vec![]),
        ("self_attn.v_scale", vec![1]),
        ("self_attn.q_scale", vec![]),
        ("self_attn.prob_scale", vec![1]),
        ("self_attn.attn.k_scale", vec![]),
        ("self_attn.k_proj.k_scale", vec![]),
        ("self_attn.v_proj.output_scale", vec![1]),
        ("self_attn.kv_scale", vec![1]),
    ];
    for method in [
        method("fp8"),
        method("gptq of 4 bits, groups of 32"),
        method("modelopt nvfp4"),
    ] {
        let (mut config, mut tensors) = method.quantize(&Decoder { layers: 2, ..EVEN });
        config["quantization_config"]["kv_cache_scheme"] = json!({ "num_bits": 8, "type": "float" });
        for layer in 0..2 {
            let scale = |(name, shape): &(&str, Vec<u64>)| {
                (format!("model.layers.{layer}.{name}"), "F32", shape.clone())
            };
            tensors.extend(scales.iter().map(scale));
        }
        let checkpoint = Made::new(&config, &[tensors]).open();
        for options in [tensor_parallel(1), tensor_parallel(2), world(2, 2, 1)] {
            let options = ShardingOptions {
                dtype: FloatDtype::Float16,
                ..options
            };
            let plan = plan(&checkpoint, &options).unwrap();
            for (rank, held) in plan.ranks().iter().zip(execute(&checkpoint, &plan)) {
                let stages = options.parallel.pipeline;
                for (layer, (name, _)) in
                    (0..2).flat_map(|layer| scales.iter().map(move |scale| (layer, scale)))
                {
                    let name = format!("model.layers.{layer}.{name}");
                    let here = stages == 1 || layer == rank.placement.pp_rank;
                    let expected = here.then(|| stored(&checkpoint, &name));
                    assert_eq!(held.get(&name), expected.as_ref(), "{name} with {}", method.name);
                }
            }
        }
    }
}
