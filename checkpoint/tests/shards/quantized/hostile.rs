//! Configurations and shapes that no tool writes.

use super::empty;
use crate::made::methods::methods;
use crate::made::{Decoder, SMALL, world};
use crate::{cut_weights_off, plan};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use weightd_checkpoint::{Checkpoint, RuleError, ShardingOptions};
use weightd_core::plan::experts::ExpertPlacement;

/// Values that a configuration should not have, in any place.
fn hostile() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        prop::sample::select(vec![
            0,
            1,
            2,
            3,
            4,
            5,
            7,
            8,
            16,
            31,
            32,
            33,
            64,
            128,
            -1,
            -5,
            i64::MIN,
            i64::MAX,
            1 << 32
        ])
        .prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(vec![
            "",
            "4",
            "gptq",
            "group",
            "gemm",
            "pack-quantized",
            "NVFP4",
            "FP8"
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        let keys = prop::sample::select(vec![
            "weights",
            "num_bits",
            "group_size",
            "block_structure",
            "actorder",
            "group_0",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((keys, inner), 0..4).prop_map(|fields| {
                Value::from(
                    fields
                        .into_iter()
                        .map(|(key, value)| (key.to_owned(), value))
                        .collect::<Map<_, _>>(),
                )
            }),
        ]
    })
}

const FIELDS: [&str; 14] = [
    "bits",
    "w_bit",
    "num_bits",
    "group_size",
    "q_group_size",
    "weight_block_size",
    "block_structure",
    "desc_act",
    "actorder",
    "config_groups",
    "format",
    "checkpoint_format",
    "version",
    "quant_algo",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_configuration_and_no_shape_makes_planning_panic(
        choice in any::<prop::sample::Index>(), fields in prop::collection::vec((prop::sample::select(FIELDS.to_vec()), hostile()), 0..4),
        shapes in prop::collection::vec((any::<prop::sample::Index>(), prop::collection::vec(size(), 0..5)), 0..3),
        tp in 1u32..9, pp in 1u32..3, gpt_oss in any::<bool>(), spread in any::<bool>(),
    ) {
        let all = methods();
        let (mut config, mut tensors) = all[choice.index(all.len())].quantize(&SIMPLE);
        if gpt_oss {
            config["architectures"] = json!(["GptOssForCausalLM"]);
            let of = |name: &str| format!("model.layers.0.mlp.experts.{name}");
            tensors.retain(|tensor| !tensor.0.contains(".mlp."));
            tensors.push((of("gate_up_proj_bias"), "BF16", vec![2, 128]));
            tensors.push((of("gate_up_proj_blocks"), "U8", vec![2, 128, 2, 16]));
            tensors.push((of("gate_up_proj_scales"), "U8", vec![2, 128, 2]));
        }
        for (field, value) in fields {
            config["quantization_config"][field] = value;
        }
        for (tensor, shape) in shapes {
            // Nothing has to be stored of a tensor without elements, whatever its other sizes are.
            let at = tensor.index(tensors.len());
            let small = shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size)).is_some_and(|all| all < 1 << 16);
            tensors[at].2 = if small { shape } else { [&[0], &shape[..]].concat() };
        }
        // Such a tensor may not even be opened.
        let made = empty(&config, tensors);
        if let Ok(checkpoint) = Checkpoint::open(made.path()) {
            cut_weights_off(&checkpoint);
            let experts = spread.then_some(ExpertPlacement::Linear);
            let planned = plan(&checkpoint, &ShardingOptions { experts, ..world(tp, pp, 1) });
            if let Err(error) = planned {
                prop_assert!(!matches!(&error, RuleError::Unreadable { .. }), "{}", error);
                prop_assert_eq!(error.to_string().lines().count(), 1);
            }
        }
    }
}

const SIMPLE: Decoder = Decoder {
    layers: 2,
    hidden: 32,
    heads: 4,
    kv_heads: 2,
    head_dim: 32,
    intermediate: 64,
    vocabulary: 16,
    ..SMALL
};

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..70,
        prop::sample::select(vec![128, 1 << 31, 1 << 32, 1 << 62, 1 << 63, u64::MAX])
    ]
}
