//! What cannot be split is refused, typed by cause and with its numbers.

use super::made::{Decoder, Made, SMALL, Tensor, tensor_parallel, world};
use super::{plan, refusal};
use serde_json::json;
use weightd_checkpoint::{Checkpoint, Layout, RuleError, ShardingOptions};

fn vllm(tp: u32) -> ShardingOptions {
    ShardingOptions {
        layout: Layout::Vllm,
        ..tensor_parallel(tp)
    }
}

fn with(change: impl FnOnce(&mut Vec<Tensor>)) -> Checkpoint {
    let mut tensors = SMALL.tensors();
    change(&mut tensors);
    Made::new(&SMALL.config(), &[tensors]).open()
}

#[test]
fn heads_that_config_and_tensors_do_not_agree_on() {
    for (field, value) in [
        ("num_key_value_heads", json!(1)),
        ("head_dim", json!(1)),
        ("num_attention_heads", json!(2)),
    ] {
        let mut config = SMALL.config();
        config[field] = value;
        let made = Made::new(&config, &[SMALL.tensors()]);
        let error = refusal(&made.open(), &tensor_parallel(2));
        assert!(matches!(error, RuleError::HeadSize { .. }), "{field}: {error}");
    }
}

#[test]
fn sizes_that_do_not_divide() {
    let refused = |decoder: Decoder, tp| refusal(&decoder.make().open(), &tensor_parallel(tp));
    assert_eq!(
        refused(
            Decoder {
                kv_heads: 3,
                intermediate: 42,
                ..SMALL
            },
            3
        ),
        RuleError::Heads { ranks: 3, heads: 8 }
    );
    let heads = Decoder {
        heads: 12,
        kv_heads: 4,
        intermediate: 42,
        ..SMALL
    };
    assert_eq!(refused(heads, 6), RuleError::KvHeads { ranks: 6, heads: 4 });
    let narrow = Decoder {
        intermediate: 41,
        ..SMALL
    };
    let tensor = "model.layers.0.mlp.down_proj.weight".to_owned();
    assert_eq!(
        refused(narrow, 2),
        RuleError::Indivisible {
            tensor,
            size: 41,
            parts: 2,
            of: "ranks"
        }
    );
}

#[test]
fn vocabularies_that_would_leave_a_rank_without_rows() {
    let tensor = "lm_head.weight".to_owned();
    let made = Decoder {
        vocabulary: 9,
        ..SMALL
    }
    .make();
    assert_eq!(
        refusal(&made.open(), &tensor_parallel(4)),
        RuleError::NothingLeft {
            tensor: tensor.clone(),
            size: 9,
            ranks: 4,
            per_rank: 3
        }
    );
    let heads = Decoder {
        heads: 6,
        kv_heads: 3,
        intermediate: 42,
        ..SMALL
    };
    assert_eq!(
        refusal(&heads.make().open(), &vllm(3)),
        RuleError::PaddedVocabulary {
            tensor,
            padded: 64,
            ranks: 3
        }
    );
}

#[test]
fn tensors_without_a_rule_are_listed() {
    let checkpoint = with(|tensors| {
        tensors.extend((0..7).map(|i| (format!("model.layers.1.extra_{i}.weight"), "BF16", vec![4])));
    });
    assert!(plan(&checkpoint, &tensor_parallel(1)).is_ok());
    let message = refusal(&checkpoint, &tensor_parallel(2)).to_string();
    assert!(
        message.contains("model.layers.1.extra_0.weight, model.layers.1.extra_1.weight"),
        "{message}"
    );
    assert!(
        message.contains("and 2 more") && message.contains("--tp-plan"),
        "{message}"
    );
}

#[test]
fn projections_with_parts_missing_or_unlike_are_not_fused() {
    let part = |name: &str| format!("model.layers.1.{name}.weight");
    for (gone, fused, part_gone) in [
        ("self_attn.v_proj", "self_attn.qkv_proj", "v_proj"),
        ("self_attn.k_proj", "self_attn.qkv_proj", "k_proj"),
        ("mlp.up_proj", "mlp.gate_up_proj", "up_proj"),
    ] {
        let checkpoint = with(|tensors| tensors.retain(|(name, ..)| *name != part(gone)));
        assert!(plan(&checkpoint, &tensor_parallel(2)).is_ok());
        let missing = RuleError::PartMissing {
            fused: part(fused),
            part: part_gone.into(),
        };
        assert_eq!(refusal(&checkpoint, &vllm(2)), missing);
    }
    let change = |to: &dyn Fn(&mut Tensor)| {
        let changed = |tensors: &mut Vec<Tensor>| {
            to(tensors
                .iter_mut()
                .find(|(name, ..)| *name == part("mlp.up_proj"))
                .unwrap());
        };
        refusal(&with(changed), &vllm(2))
    };
    for error in [change(&|up| up.1 = "F16"), change(&|up| up.2 = vec![40, 20])] {
        assert!(
            matches!(&error, RuleError::PartsDiffer { first, second, .. }
                if first.starts_with(&part("mlp.gate_proj")) && second.starts_with(&part("mlp.up_proj"))),
            "{error}"
        );
    }
}

#[test]
fn what_is_stored_both_fused_and_in_parts_is_not_fused() {
    let part = |name: &str| format!("model.layers.1.mlp.{name}.weight");
    let mut config = SMALL.config();
    config["architectures"] = json!(["Phi3ForCausalLM"]);
    for gone in [None, Some("gate_proj"), Some("up_proj")] {
        let mut tensors = SMALL.tensors();
        let gate = tensors.iter().find(|(name, ..)| *name == part("gate_proj"));
        let (_, dtype, shape) = gate.unwrap().clone();
        tensors.retain(|(name, ..)| gone.is_none_or(|gone| *name != part(gone)));
        tensors.push((part("gate_up_proj"), dtype, vec![2 * shape[0], shape[1]]));
        let error = refusal(&Made::new(&config, &[tensors]).open(), &vllm(2));
        assert!(
            matches!(&error, RuleError::StoredTwice { fused, first, second }
                if *fused == part("gate_up_proj") && [first, second].contains(&fused)),
            "{gone:?}: {error}"
        );
    }
}

#[test]
fn a_vocabulary_of_another_shape_is_not_padded() {
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        for more in [vec![], vec![2, 3]] {
            let checkpoint = with(|tensors| {
                let found = tensors.iter_mut().find(|(stored, ..)| stored == name).unwrap();
                found.2 = if more.is_empty() {
                    vec![]
                } else {
                    [&found.2[..], &more].concat()
                };
            });
            let error = refusal(&checkpoint, &vllm(2));
            assert!(
                matches!(&error, RuleError::NoVocabulary { tensor, .. } if tensor == name),
                "{error}"
            );
        }
    }
}

#[test]
fn an_architecture_whose_layout_in_vllm_is_not_known() {
    let mut config = SMALL.config();
    config["architectures"] = json!(["OPTForCausalLM"]);
    let checkpoint = Made::new(&config, &[SMALL.tensors()]).open();
    for tp in [1, 2] {
        let error = refusal(&checkpoint, &vllm(tp));
        assert!(
            matches!(&error, RuleError::NoLayout { architecture, known }
                if architecture == "OPTForCausalLM" && known.contains("GptOssForCausalLM")),
            "{error}"
        );
    }
}

#[test]
fn one_number_for_each_projection_is_not_fused() {
    let checkpoint = with(|tensors| {
        for name in ["q_proj", "k_proj", "v_proj"] {
            tensors.push((format!("model.layers.0.self_attn.{name}.gain"), "F32", vec![]));
        }
    });
    let error = refusal(&checkpoint, &vllm(1));
    let is_gain = |fused: &str| fused == "model.layers.0.self_attn.qkv_proj.gain";
    assert!(
        matches!(&error, RuleError::PartsDiffer { fused, .. } if is_gain(fused)),
        "{error}"
    );
}

#[test]
fn a_bias_of_some_of_what_is_fused() {
    let checkpoint = with(|tensors| {
        tensors.retain(|(name, ..)| {
            !(name.contains("layers.1") && (name.ends_with("q_proj.bias") || name.ends_with("v_proj.bias")))
        })
    });
    assert!(plan(&checkpoint, &tensor_parallel(2)).is_ok());
    let error = refusal(&checkpoint, &vllm(2));
    assert!(
        matches!(&error, RuleError::PartMissing { part, .. } if part == "q_proj"),
        "{error}"
    );
}

#[test]
fn layers_that_the_configuration_does_not_count_and_layers_that_are_not_there() {
    let layers = |stored: u64, stated: u64| {
        let decoder = Decoder {
            layers: stored,
            ..SMALL
        };
        let mut config = decoder.config();
        config["num_hidden_layers"] = json!(stated);
        Made::new(&config, &[decoder.tensors()]).open()
    };
    assert!(matches!(
        refusal(&layers(4, 3), &world(1, 3, 1)),
        RuleError::LayerBeyond {
            layer: 3,
            layers: 3,
            ..
        }
    ));
    assert_eq!(
        refusal(&layers(4, 8), &world(1, 4, 1)),
        RuleError::LayerMissing { layer: 4, layers: 8 }
    );
    // One stage holds whatever there is.
    for (stored, stated) in [(4, 3), (3, 4)] {
        let plan = plan(&layers(stored, stated), &tensor_parallel(2)).unwrap();
        let last = format!("model.layers.{}.input_layernorm.weight", stored - 1);
        assert!(plan.ranks()[0].manifest.get(&last).is_some());
    }
}
