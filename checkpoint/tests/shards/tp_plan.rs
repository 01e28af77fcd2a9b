//! Rules that a user passes.

use super::made::execute::execute;
use super::made::{Made, SMALL, Tensor, data, tensor_parallel, world};
use super::{plan, refusal, stored};
use serde_json::{Value, json};
use weightd_checkpoint::{Checkpoint, Layout, RuleError, ShardingOptions, TpPlan};

fn with(options: ShardingOptions, rules: &Value) -> ShardingOptions {
    ShardingOptions {
        tp_plan: Some(TpPlan::parse(rules.to_string().as_bytes()).unwrap()),
        ..options
    }
}

/// As Llama's in transformers 5.
fn llama() -> Value {
    json!({
        "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise", "lm_head": "colwise_gather_output",
    })
}

#[test]
fn the_plan_of_llama_shares_as_the_built_in_rules_do_what_it_names() {
    for checkpoint in [SMALL.make().open(), Checkpoint::open(&data("llama")).unwrap()] {
        for tp in [2, 4, 8] {
            let Ok(built_in) = plan(&checkpoint, &tensor_parallel(tp)) else {
                continue;
            };
            let built_in = execute(&checkpoint, &built_in);
            let planned = plan(&checkpoint, &with(tensor_parallel(tp), &llama())).unwrap();
            for (planned, built_in) in execute(&checkpoint, &planned).iter().zip(&built_in) {
                assert!(planned.keys().eq(built_in.keys()));
                for (name, held) in planned {
                    match name.contains("_proj") || name.starts_with("lm_head") {
                        true => assert_eq!(*held, built_in[name], "{name} at tp {tp}"),
                        false => assert_eq!(*held, stored(&checkpoint, name), "{name} at tp {tp}"),
                    }
                }
                let embedding = "model.embed_tokens.weight";
                assert_ne!(
                    planned[embedding], built_in[embedding],
                    "the plan does not name it"
                );
            }
        }
    }
}

/// An architecture of its own, with two layers.
fn unknown() -> Checkpoint {
    let mut tensors: Vec<Tensor> = Vec::new();
    for layer in 0..2 {
        for (name, shape) in [("up", [8, 6]), ("down", [6, 8])] {
            tensors.push((
                format!("backbone.layers.{layer}.mixer.{name}.weight"),
                "BF16",
                shape.to_vec(),
            ));
        }
        tensors.push((format!("backbone.layers.{layer}.norm.weight"), "BF16", vec![6]));
    }
    tensors.push(("backbone.embeddings.weight".into(), "BF16", vec![10, 6]));
    tensors.push(("backbone.norm_f.weight".into(), "BF16", vec![6]));
    let config = json!({ "architectures": ["MambaForCausalLM"], "num_hidden_layers": 2, "tie_word_embeddings": false });
    Made::new(&config, &[tensors]).open()
}

fn mamba() -> Value {
    json!({
        "backbone.layers.*.mixer.up": "colwise", "backbone.layers.*.mixer.down": "rowwise",
        "backbone.embeddings": "embedding_rowwise",
    })
}

#[test]
fn an_unknown_architecture_needs_a_plan_to_be_split() {
    let checkpoint = unknown();
    assert!(plan(&checkpoint, &tensor_parallel(1)).is_ok());
    for options in [tensor_parallel(2), world(1, 2, 1)] {
        let error = refusal(&checkpoint, &options);
        assert!(matches!(error, RuleError::UnknownArchitecture { .. }), "{error}");
        let message = error.to_string();
        for said in [
            "MambaForCausalLM",
            "--tp-plan",
            "backbone.layers.*.mixer.up.weight",
            "backbone.embeddings.weight",
            "LlamaForCausalLM",
            "GptOssForCausalLM",
        ] {
            assert!(message.contains(said), "{said}: {message}");
        }
        assert_eq!(message.lines().count(), 1);
    }
}

#[test]
fn the_plan_that_an_error_proposes_is_one() {
    let checkpoint = unknown();
    let message = refusal(&checkpoint, &tensor_parallel(2)).to_string();
    let proposed = &message[message.find('{').unwrap()..=message.find('}').unwrap()];
    let rules: Value = serde_json::from_str(proposed).unwrap();
    assert!(
        plan(&checkpoint, &with(tensor_parallel(2), &rules)).is_ok(),
        "{proposed}"
    );
}

#[test]
fn where_no_tensor_is_a_matrix_the_names_of_vectors_are_listed() {
    let config = json!({ "architectures": ["PlainModel"], "num_hidden_layers": 2 });
    let checkpoint = Made::new(&config, &[vec![("first.weight".into(), "BF16", vec![8])]]).open();
    let message = refusal(&checkpoint, &tensor_parallel(2)).to_string();
    assert!(
        message.contains(
            "{\"first\": \"colwise\"}, which has to cover such names as first.weight; or use one rank"
        ),
        "{message}"
    );
    let options = with(tensor_parallel(2), &json!({ "first": "colwise" }));
    assert!(plan(&checkpoint, &options).is_ok());
    let empty = Made::new(&config, &[vec![]]).open();
    let message = refusal(&empty, &tensor_parallel(2)).to_string();
    assert!(
        message.contains("which has to cover no tensors; or use one rank"),
        "{message}"
    );
    let message = refusal(&empty, &options).to_string();
    assert!(message.contains("which has no tensors: "), "{message}");
}

#[test]
fn a_plan_splits_an_unknown_architecture_over_ranks_and_stages() {
    let checkpoint = unknown();
    let plan = plan(&checkpoint, &with(world(2, 2, 1), &mamba())).unwrap();
    let held = execute(&checkpoint, &plan);
    for (number, held) in held.iter().enumerate() {
        let stage = number / 2;
        let shape = |name: &str| held.get(name).map(|(shape, _)| shape.clone());
        let layer = |name: &str| format!("backbone.layers.{stage}.{name}.weight");
        assert_eq!(shape(&layer("mixer.up")), Some(vec![4, 6]));
        assert_eq!(shape(&layer("mixer.down")), Some(vec![6, 4]));
        assert_eq!(shape(&layer("norm")), Some(vec![6]));
        assert_eq!(
            shape("backbone.embeddings.weight"),
            (stage == 0).then(|| vec![5, 6])
        );
        assert_eq!(shape("backbone.norm_f.weight"), (stage == 1).then(|| vec![6]));
        assert_eq!(held.len(), 4);
    }
}

#[test]
fn patterns_that_split_nothing_are_refused() {
    let checkpoint = SMALL.make().open();
    let mut rules = llama();
    rules["layers.*.mlp.up"] = json!("colwise");
    let error = refusal(&checkpoint, &with(tensor_parallel(2), &rules));
    let RuleError::UnusedPatterns { patterns, names } = error else {
        panic!("{error}")
    };
    assert_eq!(patterns, ["layers.*.mlp.up"]);
    assert!(names.iter().any(|name| name.contains("layers.*")), "{names:?}");
    // What is whole anyway may be named for nothing.
    let mut rules = llama();
    rules["layers.*.mlp.experts"] = json!("replicated");
    assert!(plan(&checkpoint, &with(tensor_parallel(2), &rules)).is_ok());
}

#[test]
fn a_plan_says_nothing_of_vllms_layout() {
    for tp in [1, 2] {
        let vllm = ShardingOptions {
            layout: Layout::Vllm,
            ..tensor_parallel(tp)
        };
        assert_eq!(
            refusal(&SMALL.make().open(), &with(vllm, &llama())),
            RuleError::PlanWithLayout
        );
    }
}

#[test]
fn an_embedding_that_a_plan_does_not_name_is_on_the_first_stage() {
    let checkpoint = SMALL.make().open();
    let rules = json!({ "layers.*.mlp.up_proj": "colwise" });
    let plan = plan(&checkpoint, &with(world(2, 2, 1), &rules)).unwrap();
    let has = |rank: usize, name: &str| plan.ranks()[rank].manifest.get(name).is_some();
    for rank in 0..4 {
        assert_eq!(has(rank, "model.embed_tokens.weight"), rank < 2);
        assert_eq!(has(rank, "lm_head.weight"), rank >= 2);
    }
}
