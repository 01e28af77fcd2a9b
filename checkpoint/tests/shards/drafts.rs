//! Drafts of speculative decoding: which tensors they are, and which part of each a rank has.

use super::made::execute::{Bytes, execute};
use super::made::{Decoder, Made, SMALL, data, tensor_parallel, world};
use super::{plan, refusal, stored};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use weightd_checkpoint::{
    Checkpoint, Draft, Layout, ModelPart, NodePlan, RuleError, Sharding, ShardingOptions, TpPlan,
};
use weightd_core::plan::experts::ExpertPlacement;

fn draft(options: &ShardingOptions, draft: Draft) -> ShardingOptions {
    options.of_draft(draft)
}

fn names(held: &[BTreeMap<String, Bytes>]) -> BTreeSet<&str> {
    held.iter().flat_map(BTreeMap::keys).map(String::as_str).collect()
}

fn attrs(plan: &NodePlan) -> Vec<Vec<(&str, bool)>> {
    plan.ranks()
        .iter()
        .map(|rank| rank.manifest.attrs().collect())
        .collect()
}

/// Whether parts of all ranks are a tensor's, one after another along a dimension, or the whole of it each.
fn assert_shared(held: &[BTreeMap<String, Bytes>], name: &str, whole: &Bytes, dim: Option<usize>) {
    let Some(dim) = dim else {
        return assert!(held.iter().all(|held| held[name] == *whole), "{name}");
    };
    let outer: u64 = whole.0[..dim].iter().product();
    let mut gathered: Vec<u8> = Vec::new();
    for row in 0..outer as usize {
        for held in held {
            let (shape, bytes) = &held[name];
            assert_eq!(shape[..dim], whole.0[..dim], "{name}");
            let row_bytes = bytes.len() / outer as usize;
            gathered.extend(&bytes[row * row_bytes..][..row_bytes]);
        }
    }
    assert!(gathered == whole.1, "{name} along {dim}");
    assert!(
        held[0][name].0[dim] * held.len() as u64 == whole.0[dim],
        "{name} in equal parts"
    );
}

#[test]
fn the_parts_of_an_eagle_draft_are_its_checkpoint() {
    for (model, own_head) in [("eagle_llama", false), ("eagle3_llama", true)] {
        let checkpoint = Checkpoint::open(&data(model)).unwrap();
        for tp in [1, 2, 4] {
            let plan = plan(&checkpoint, &draft(&tensor_parallel(tp), Draft::Eagle)).unwrap();
            let held = execute(&checkpoint, &plan);
            for name in checkpoint.tensors().keys() {
                let module = name.trim_end_matches(".weight").rsplit('.').next().unwrap();
                let dim = match module {
                    "q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj" | "lm_head" => Some(0),
                    "o_proj" | "down_proj" => Some(1),
                    "fc" | "d2t" | "t2d" | "norm" | "hidden_norm" => None,
                    _ if module.ends_with("layernorm") => None,
                    other => panic!("{other} is not expected in {model}"),
                };
                assert_shared(&held, name, &stored(&checkpoint, name), dim);
            }
            assert_eq!(names(&held).len(), checkpoint.tensors().len());
            let expected = [("has_own_embed_tokens", false), ("has_own_lm_head", own_head)];
            assert!(
                attrs(&plan).iter().all(|attrs| *attrs == expected),
                "{model}: {:?}",
                attrs(&plan)
            );
        }
    }
}

#[test]
fn target_and_draft_of_one_checkpoint_are_all_of_it_and_share_nothing() {
    let checkpoint = Checkpoint::open(&data("deepseek_v3_mtp")).unwrap();
    for tp in [1, 2, 4] {
        for experts in [
            None,
            Some(ExpertPlacement::Linear),
            Some(ExpertPlacement::RoundRobin),
        ] {
            let options = ShardingOptions {
                experts,
                ..tensor_parallel(tp)
            };
            let held = |options: &ShardingOptions| execute(&checkpoint, &plan(&checkpoint, options).unwrap());
            let (of_target, of_draft) = (held(&options), held(&draft(&options, Draft::Mtp)));
            let (target, further) = (names(&of_target), names(&of_draft));
            assert!(target.is_disjoint(&further));
            assert_eq!(target.len() + further.len(), checkpoint.tensors().len());
            assert!(
                further.iter().all(|name| name.starts_with("model.layers.3.")),
                "{further:?}"
            );
            assert!(further.contains("model.layers.3.eh_proj.weight"));
        }
    }
}

#[test]
fn a_layer_that_predicts_further_tokens_is_shared_as_decoder_layers_are() {
    let checkpoint = Checkpoint::open(&data("deepseek_v3_mtp")).unwrap();
    for experts in [None, Some(ExpertPlacement::Linear)] {
        let options = ShardingOptions {
            experts,
            ..tensor_parallel(2)
        };
        let plan = plan(&checkpoint, &draft(&options, Draft::Mtp)).unwrap();
        let held = execute(&checkpoint, &plan);
        for name in names(&held) {
            let whole = stored(&checkpoint, name);
            let module = name.trim_end_matches(".weight").rsplit('.').next().unwrap();
            if name.contains(".experts.") && experts.is_some() {
                let expert: usize = name.split('.').nth(5).unwrap().parse().unwrap();
                // Eight, the first half on the first rank.
                assert_eq!(held[expert / 4].get(name), Some(&whole), "{name}");
                assert!(!held[1 - expert / 4].contains_key(name), "{name}");
                continue;
            }
            let dim = match module {
                "q_b_proj" | "kv_b_proj" | "gate_proj" | "up_proj" | "embed_tokens" | "head" => Some(0),
                "o_proj" | "down_proj" => Some(1),
                _ => None,
            };
            assert_shared(&held, name, &whole, dim);
        }
        let expected = [("has_own_embed_tokens", true), ("has_own_lm_head", true)];
        assert!(
            attrs(&plan).iter().all(|attrs| *attrs == expected),
            "{:?}",
            attrs(&plan)
        );
    }
}

#[test]
fn attributes_follow_from_the_tensors_that_a_draft_has() {
    let config = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 4,
    });
    for (embedding, head) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut tensors = vec![
            ("model.embed_tokens.weight".to_owned(), "BF16", vec![6, 4]),
            ("lm_head.weight".to_owned(), "BF16", vec![6, 4]),
            ("model.layers.1.eh_proj.weight".to_owned(), "BF16", vec![4, 8]),
        ];
        let own = [(embedding, "embed_tokens"), (head, "shared_head.head")];
        tensors.extend(
            (own.iter().filter(|(has, _)| *has))
                .map(|(_, module)| (format!("model.layers.1.{module}.weight"), "BF16", vec![6, 4])),
        );
        let checkpoint = Made::new(&config, &[tensors]).open();
        let of_draft = plan(&checkpoint, &draft(&tensor_parallel(2), Draft::Mtp)).unwrap();
        let expected = vec![("has_own_embed_tokens", embedding), ("has_own_lm_head", head)];
        assert_eq!(attrs(&of_draft), vec![expected; 2]);
        let of_target = plan(&checkpoint, &tensor_parallel(2)).unwrap();
        assert_eq!(attrs(&of_target), vec![vec![]; 2], "a target has none");
    }
    // By both kinds of names.
    for (prefix, head) in [("", "lm_head.weight"), ("model.", "lm_head.weight")] {
        let embedding = format!("{prefix}embed_tokens.weight");
        let tensors = [&embedding, head, &format!("{prefix}fc.weight")]
            .map(|name| (name.to_owned(), "BF16", vec![6, 4]));
        let checkpoint = Made::new(&json!({ "architectures": ["Any"] }), &[tensors.to_vec()]).open();
        let plan = plan(&checkpoint, &draft(&tensor_parallel(2), Draft::Eagle)).unwrap();
        assert_eq!(
            attrs(&plan)[1],
            [("has_own_embed_tokens", true), ("has_own_lm_head", true)],
            "{prefix}"
        );
        let held = execute(&checkpoint, &plan);
        assert_shared(&held, &embedding, &stored(&checkpoint, &embedding), Some(0));
        assert_shared(&held, head, &stored(&checkpoint, head), Some(0));
    }
}

#[test]
fn a_draft_has_the_targets_ranks_without_its_stages_and_its_plan_where_names_are_the_same() {
    let target = ShardingOptions {
        experts: Some(ExpertPlacement::RoundRobin),
        layer_partition: Some(vec![1, 2]),
        tp_plan: Some(TpPlan::parse(br#"{"lm_head": "colwise"}"#).unwrap()),
        ..world(2, 2, 3)
    };
    for (draft, tp_plan) in [(Draft::Mtp, target.tp_plan.clone()), (Draft::Eagle, None)] {
        assert_eq!(
            target.of_draft(draft),
            ShardingOptions {
                part: ModelPart::Draft(draft),
                experts: Some(ExpertPlacement::RoundRobin),
                tp_plan,
                ..world(2, 1, 3)
            }
        );
    }
}

#[test]
fn a_draft_that_is_not_there_is_refused() {
    let checkpoint = Decoder { layers: 2, ..SMALL }.make().open();
    let mtp = draft(&tensor_parallel(2), Draft::Mtp);
    assert_eq!(
        refusal(&checkpoint, &mtp),
        RuleError::NoFurtherLayers { layers: 2 }
    );

    let mtp_checkpoint = Checkpoint::open(&data("deepseek_v3_mtp")).unwrap();
    let vllm = ShardingOptions {
        layout: Layout::Vllm,
        ..mtp
    };
    assert_eq!(refusal(&mtp_checkpoint, &vllm), RuleError::DraftLayout);

    let mut config = SMALL.config();
    config.as_object_mut().unwrap().remove("num_hidden_layers");
    let checkpoint = Made::new(&config, &[SMALL.tensors()]).open();
    let error = refusal(&checkpoint, &draft(&tensor_parallel(1), Draft::Mtp));
    assert!(
        matches!(
            error,
            RuleError::ConfigLacks {
                field: "num_hidden_layers",
                ..
            }
        ),
        "{error}"
    );

    // A whole decoder is no draft of EAGLE's names, but for those that it has too.
    let config = json!({ "architectures": ["LlamaForCausalLMEagle3"], "num_attention_heads": 2, "num_key_value_heads": 2 });
    let other = vec![
        ("fc.weight".to_owned(), "BF16", vec![4, 8]),
        ("layers.0.mixer.weight".to_owned(), "BF16", vec![4, 4]),
    ];
    let checkpoint = Made::new(&config, &[other]).open();
    assert!(plan(&checkpoint, &draft(&tensor_parallel(1), Draft::Eagle)).is_ok());
    let error = refusal(&checkpoint, &draft(&tensor_parallel(2), Draft::Eagle));
    assert!(
        matches!(&error, RuleError::UncoveredDraft { tensors, .. } if tensors == &["layers.0.mixer.weight"]),
        "{error}"
    );
}

#[test]
fn a_target_says_how_many_tensors_it_goes_without() {
    let checkpoint = Checkpoint::open(&data("deepseek_v3_mtp")).unwrap();
    let further = checkpoint
        .tensors()
        .keys()
        .filter(|name| name.starts_with("model.layers.3."))
        .count();
    let target = Sharding::new(&checkpoint, &tensor_parallel(2)).unwrap();
    assert_eq!(target.left_out(), further);
    assert!(further > 30);
}
