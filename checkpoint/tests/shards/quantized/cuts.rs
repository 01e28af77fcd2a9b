//! Parts that would begin or end inside a pack, a block or a group.

use super::headers;
use crate::made::methods::{Method, method, methods};
use crate::made::{Decoder, SMALL, tensor_parallel};
use crate::plan;
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use serde_json::json;
use std::cell::Cell;
use weightd_checkpoint::RuleError;

/// Sizes that are whole packs, and whole blocks or not.
fn decoders(method: &Method) -> impl Strategy<Value = Decoder> + use<> {
    let (whole, large) = (method.whole, method.units.into_iter().max().unwrap());
    let size = move |most| (1..=most).prop_map(move |count: u64| count * whole);
    let size = move || {
        prop_oneof![
            size(2 * large / whole + 2),
            (1u64..9).prop_map(move |count| count * large)
        ]
    };
    (size(), size(), size(), 0u32..3, 0u32..3).prop_map(
        |(hidden, head_dim, intermediate, heads, kv_heads)| Decoder {
            layers: 1,
            hidden,
            head_dim,
            intermediate: 2 * intermediate,
            heads: 1 << heads,
            kv_heads: 1 << kv_heads.min(heads),
            vocabulary: 64,
            ..SMALL
        },
    )
}

#[test]
fn what_would_be_cut_is_named_with_a_size_that_works() {
    for method in methods() {
        let cuts = Cell::new(0);
        let mut runner = TestRunner::new_with_rng(ProptestConfig::with_cases(12), runner_rng());
        let strategy = (decoders(&method), 2u32..9);
        let result = runner.run(&strategy, |(decoder, tp)| {
            let (config, tensors) = method.quantize(&decoder);
            let headers = headers(&config, tensors);
            match plan(&headers.checkpoint, &tensor_parallel(tp)) {
                Ok(_) => {}
                Err(error) => {
                    let message = error.to_string();
                    prop_assert_eq!(message.lines().count(), 1);
                    if let RuleError::CutsUnit {
                        tensor,
                        method: named,
                        unit,
                        ranks,
                        ..
                    } = error
                    {
                        cuts.set(cuts.get() + 1);
                        prop_assert!(
                            tensor.contains("_proj.") && message.contains(&tensor),
                            "{}",
                            message
                        );
                        prop_assert!(method.config["quant_method"] == json!(named), "{}", message);
                        prop_assert!(
                            method.units.contains(&unit) || unit == method.whole,
                            "{}",
                            message
                        );
                        prop_assert!(headers.is_accepted(ranks as u32), "{}", message);
                        for more in ranks as u32 + 1..tp {
                            prop_assert!(!headers.is_accepted(more), "{}, and {} works", message, more);
                        }
                    }
                }
            }
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{}: {error}", method.name));
        let has_units = method.units.iter().any(|&unit| unit > 1);
        assert_eq!(cuts.get() > 0, has_units, "{}", method.name);
    }
}

/// The same numbers each time, so that every method is sure to meet what cuts it.
fn runner_rng() -> TestRng {
    TestRng::deterministic_rng(RngAlgorithm::ChaCha)
}

#[test]
fn a_layer_within_one_block_is_not_split() {
    let block = |decoder: Decoder| {
        let (mut config, mut tensors) = method("fp8 square blocks").quantize(&decoder);
        config["quantization_config"]["weight_block_size"] = json!([128, 128]);
        for (_, _, shape) in tensors.iter_mut().filter(|(name, ..)| name.ends_with("_inv")) {
            shape
                .iter_mut()
                .for_each(|size| *size = (*size * 8).div_ceil(128));
        }
        headers(&config, tensors)
    };
    let small = Decoder {
        intermediate: 128,
        hidden: 128,
        head_dim: 128,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        ..SMALL
    };
    let headers = block(small);
    assert!(headers.is_accepted(1));
    let error = headers.refusal(2);
    let cut = "model.layers.0.mlp.down_proj.weight_scale_inv";
    assert!(
        matches!(&error, RuleError::CutsUnit { tensor, unit: 128, per_rank: 64, ranks: 1, .. } if tensor == cut),
        "{error}"
    );
    assert!(
        block(Decoder {
            intermediate: 256,
            ..small
        })
        .is_accepted(2)
    );
    // Repeated, not cut.
    assert!(
        block(Decoder {
            intermediate: 256,
            kv_heads: 1,
            ..small
        })
        .is_accepted(2)
    );
}
