//! Quantized checkpoints that cannot be split as asked, by what configuration and headers say.

use super::{Headers, headers};
use crate::made::execute::execute;
use crate::made::methods::{method, methods};
use crate::made::{Decoder, Made, SMALL, Tensor, tensor_parallel, world};
use crate::{plan, refusal, stored};
use serde_json::{Value, json};
use weightd_checkpoint::{FloatDtype, Layout, RuleError, ShardingOptions};

/// Groups of 32 of any dimension, in two or more for both ranks of two.
const GROUPED: Decoder = Decoder {
    layers: 2,
    hidden: 128,
    heads: 4,
    kv_heads: 2,
    head_dim: 32,
    intermediate: 128,
    ..SMALL
};

/// A decoder that is stored as a method has it, after `change`.
fn changed(name: &str, change: impl FnOnce(&mut Value, &mut Vec<Tensor>)) -> Headers {
    let (mut config, mut tensors) = method(name).quantize(&GROUPED);
    change(&mut config, &mut tensors);
    headers(&config, tensors)
}

fn configured(name: &str, field: &str, value: Value) -> Headers {
    changed(name, |config, _| config["quantization_config"][field] = value)
}

fn of_weights(name: &str, field: &str, value: Value) -> Headers {
    changed(name, |config, _| {
        config["quantization_config"]["config_groups"]["group_0"]["weights"][field] = value;
    })
}

const GPTQ: &str = "gptq of 4 bits, groups of 32";
const PACKED: &str = "pack-quantized of 4 bits, groups of 16, symmetric: false";

#[test]
fn groups_in_activation_order_are_not_split_by_inputs() {
    let ordered = [
        configured(GPTQ, "desc_act", json!(true)),
        of_weights(PACKED, "actorder", json!("group")),
        of_weights(PACKED, "actorder", json!("dynamic")),
        of_weights(PACKED, "actorder", json!(true)),
    ];
    for headers in ordered {
        assert!(headers.is_accepted(1));
        let error = headers.refusal(2);
        assert!(
            matches!(&error, RuleError::ActOrder { tensor, .. } if tensor.starts_with("model.layers.0.mlp.down_proj.")),
            "{error}"
        );
    }
    // The other orders keep groups together; and where all inputs are one group, there is none.
    for headers in [
        of_weights(PACKED, "actorder", json!("weight")),
        of_weights(PACKED, "actorder", json!("static")),
        of_weights(PACKED, "actorder", json!(null)),
        of_weights(PACKED, "actorder", json!(false)),
        configured("gptq of 4 bits, groups of 0", "desc_act", json!(true)),
        of_weights(
            "pack-quantized of 4 bits, groups of 0, symmetric: true",
            "actorder",
            json!("group"),
        ),
    ] {
        assert!(headers.is_accepted(1) && headers.is_accepted(2));
    }
}

#[test]
fn an_order_that_is_not_understood_is_not_taken_for_none() {
    for (value, shown) in [
        (json!(1), "1"),
        (json!("yes"), "\"yes\""),
        (json!(["group"]), "[\"group\"]"),
        (json!("\u{9b}2J\u{3164}"), r#""\u{9b}2J\u{3164}""#),
    ] {
        for headers in [
            configured(GPTQ, "desc_act", value.clone()),
            of_weights(PACKED, "actorder", value.clone()),
        ] {
            assert!(headers.is_accepted(1));
            let RuleError::QuantizationField { value: said, .. } = headers.refusal(2) else {
                panic!("{value}")
            };
            assert_eq!(said, shown);
        }
    }
}

#[test]
fn the_order_of_one_group_goes_along_with_its_inputs() {
    let (mut config, tensors) = method("gptq of 8 bits, groups of 0").quantize(&GROUPED);
    config["quantization_config"]["desc_act"] = json!(true);
    let made = Made::new(&config, &[tensors]);
    let checkpoint = made.open();
    let held = execute(&checkpoint, &plan(&checkpoint, &tensor_parallel(2)).unwrap());
    let name = "model.layers.1.mlp.down_proj.g_idx";
    let (_, order) = stored(&checkpoint, name);
    let halves: Vec<u8> = held.iter().flat_map(|held| held[name].1.clone()).collect();
    assert!(halves == order && held[0][name].0 == [64]);
}

#[test]
fn methods_that_are_not_known_are_refused_for_any_number_of_ranks() {
    for name in ["q8_0", "", "GPTQ", "gptq_marlin", "fp8 "] {
        let headers = configured(GPTQ, "quant_method", json!(name));
        for tp in [1, 2] {
            let error = headers.refusal(tp);
            assert!(
                matches!(&error, RuleError::UnknownQuantization { method, known }
                if method == name && known.contains("compressed-tensors") && known.contains("bitsandbytes")),
                "{error}"
            );
        }
    }
    let nameless = changed(GPTQ, |config, _| {
        _ = config["quantization_config"]
            .as_object_mut()
            .unwrap()
            .remove("quant_method")
    });
    assert_eq!(nameless.refusal(1), RuleError::QuantizationUnnamed);
}

#[test]
fn methods_whose_tensors_are_not_known_are_served_by_one_rank() {
    let headers = [
        configured(GPTQ, "quant_method", json!("bitsandbytes")),
        configured(GPTQ, "quant_method", json!("torchao")),
        configured(GPTQ, "checkpoint_format", json!("marlin")),
        configured("awq, groups of 16", "version", json!("gemv")),
        configured(PACKED, "format", json!("marlin-24")),
        configured("modelopt fp8", "quant_algo", json!("W4A8_AWQ")),
    ];
    for headers in headers {
        assert!(headers.is_accepted(1));
        let method = headers.checkpoint.config().quant_method().unwrap().to_owned();
        for options in [tensor_parallel(2), world(2, 2, 1)] {
            let error = refusal(&headers.checkpoint, &options);
            assert!(
                matches!(&error, RuleError::QuantizedWhole { tensor, method: named }
                    if headers.checkpoint.tensors().contains_key(tensor) && *named == method),
                "{error}"
            );
        }
        assert!(
            plan(&headers.checkpoint, &world(1, 2, 1)).is_ok(),
            "stages split no tensor"
        );
    }
}

#[test]
fn no_method_has_the_layout_that_vllm_rearranges() {
    for method in methods() {
        let (config, tensors) = method.quantize(&GROUPED);
        let headers = headers(&config, tensors);
        for tp in [1, 2] {
            let options = ShardingOptions {
                layout: Layout::Vllm,
                ..tensor_parallel(tp)
            };
            let error = refusal(&headers.checkpoint, &options);
            assert!(
                matches!(&error, RuleError::QuantizedLayout { tensor, method: named }
                    if tensor.contains("_proj.") && method.config["quant_method"] == json!(named)),
                "{}: {error}",
                method.name
            );
        }
    }
}

#[test]
fn layers_that_are_not_all_quantized_alike_are_not_split() {
    let group = |bits: u64, size: u64| json!({ "weights": { "num_bits": bits, "group_size": size, "strategy": "group" } });
    for (groups, field) in [
        (json!({ "a": group(4, 16), "b": group(8, 16) }), "num_bits"),
        (json!({ "a": group(4, 16), "b": group(4, 32) }), "group_size"),
    ] {
        let headers = configured(PACKED, "config_groups", groups);
        assert!(headers.is_accepted(1));
        let error = headers.refusal(2);
        assert!(
            matches!(&error, RuleError::QuantizationField { field: found, .. } if *found == field),
            "{error}"
        );
    }
    let alike = configured(
        PACKED,
        "config_groups",
        json!({ "a": group(4, 16), "b": group(4, 16) }),
    );
    assert!(alike.is_accepted(2));
}

#[test]
fn numbers_that_splitting_needs_have_to_be_there_and_be_numbers() {
    let lacks = changed(GPTQ, |config, _| {
        _ = config["quantization_config"]
            .as_object_mut()
            .unwrap()
            .remove("bits")
    });
    assert!(lacks.is_accepted(1));
    assert!(matches!(
        lacks.refusal(2),
        RuleError::QuantizationLacks { what: "bits", .. }
    ));
    for (field, value) in [
        ("bits", json!(0)),
        ("bits", json!(-5)),
        ("bits", json!("4")),
        ("bits", json!(1e30)),
        ("group_size", json!(0)),
        ("group_size", json!(-2)),
        ("group_size", json!([32])),
        ("group_size", json!(u64::MAX)),
    ] {
        let headers = configured(GPTQ, field, value);
        assert!(headers.is_accepted(1));
        let error = headers.refusal(2);
        assert!(
            matches!(&error, RuleError::QuantizationField { field: found, .. } if *found == field),
            "{error}"
        );
    }
    for size in [
        json!([0, 8]),
        json!([8]),
        json!([8, 8, 8]),
        json!([-8, 8]),
        json!("8"),
        json!({}),
    ] {
        let error = configured("fp8 square blocks", "weight_block_size", size).refusal(2);
        assert!(
            matches!(
                &error,
                RuleError::QuantizationField {
                    field: "weight_block_size",
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn scales_of_another_shape_or_of_nothing_are_found() {
    let name = "model.layers.0.mlp.down_proj.scales";
    let scaled = |change: &dyn Fn(&mut Vec<u64>)| {
        changed(GPTQ, |_, tensors| {
            let scales = tensors.iter_mut().find(|tensor| tensor.0 == name).unwrap();
            change(&mut scales.2);
        })
    };
    let headers = scaled(&|shape| shape[0] = 8);
    assert!(headers.is_accepted(1));
    let expected = RuleError::QuantizedShape {
        tensor: name.into(),
        method: "gptq".into(),
        dim: 0,
        found: 8,
        expected: 4,
    };
    assert_eq!(headers.refusal(2), expected);
    assert!(matches!(
        scaled(&|shape| shape[1] = 64).refusal(2),
        RuleError::QuantizedShape {
            dim: 1,
            found: 64,
            expected: 128,
            ..
        }
    ));
    // As if groups were twice as large.
    let halved = configured(GPTQ, "group_size", json!(64));
    assert!(matches!(
        halved.refusal(2),
        RuleError::QuantizedShape {
            expected: 2,
            found: 4,
            ..
        }
    ));

    let alone = changed(GPTQ, |_, tensors| {
        tensors.retain(|tensor| tensor.0 != name.replace("scales", "qweight"))
    });
    assert!(alone.is_accepted(1));
    let error = alone.refusal(2);
    assert!(
        matches!(&error, RuleError::QuantizedAlone { tensor, .. } if tensor.contains("0.mlp.down_proj.")),
        "{error}"
    );
}

#[test]
fn quantized_weights_without_a_configuration_are_served_as_stored_and_not_otherwise() {
    for method in methods().iter().map(|method| method.name.as_str()) {
        let unsaid = changed(method, |config, _| {
            _ = config.as_object_mut().unwrap().remove("quantization_config");
        });
        assert!(plan(&unsaid.checkpoint, &tensor_parallel(1)).is_ok(), "{method}");
        let cast = ShardingOptions {
            dtype: FloatDtype::Float16,
            ..tensor_parallel(1)
        };
        let vllm = ShardingOptions {
            layout: Layout::Vllm,
            ..tensor_parallel(1)
        };
        for options in [tensor_parallel(2), cast, vllm] {
            let error = refusal(&unsaid.checkpoint, &options);
            assert!(
                matches!(error, RuleError::QuantizedUnsaid { .. }),
                "{method}: {error}"
            );
        }
    }
}
