//! Expert parallel: what vLLM's fused tensors hold where, and what is refused.

use super::made::execute::execute;
use super::made::generated::{Case, Family, Sizes};
use super::made::{Made, SMALL, Tensor, data, tensor_parallel, world};
use super::{plan, refusal, stored};
use serde_json::json;
use weightd_checkpoint::{Checkpoint, Draft, Layout, RuleError, ShardingOptions};
use weightd_core::plan::experts::ExpertPlacement;

fn case(family: Family, options: ShardingOptions) -> Case {
    let sizes = Sizes {
        layers: 2,
        hidden: 6,
        heads: 4,
        kv_heads: 2,
        head_dim: 3,
        intermediate: 8,
        experts: 5,
        vocabulary: 64,
    };
    Case {
        family,
        sizes,
        options,
    }
}

fn spread(placement: ExpertPlacement, layout: Layout, tp: u32, dp: u32) -> ShardingOptions {
    ShardingOptions {
        layout,
        experts: Some(placement),
        ..world(tp, 1, dp)
    }
}

use ExpertPlacement::{Linear, RoundRobin};

#[test]
fn fused_experts_are_in_the_order_of_the_ranks_own() {
    for (placement, here) in [
        (Linear, [vec![0, 1, 2], vec![3, 4]]),
        (RoundRobin, [vec![0, 2, 4], vec![1, 3]]),
    ] {
        let case = case(Family::DeepseekV3, spread(placement, Layout::Vllm, 2, 1));
        let checkpoint = case.make().open();
        let held = execute(&checkpoint, &plan(&checkpoint, &case.options).unwrap());
        for (rank, experts) in here.into_iter().enumerate() {
            let of = |name: &str, expert: &u64| {
                stored(
                    &checkpoint,
                    &format!("model.layers.1.mlp.experts.{expert}.{name}.weight"),
                )
                .1
            };
            let gate_up = |expert: &u64| [of("gate_proj", expert), of("up_proj", expert)].concat();
            let w13: Vec<u8> = experts.iter().flat_map(gate_up).collect();
            let w2: Vec<u8> = experts
                .iter()
                .flat_map(|expert| of("down_proj", expert))
                .collect();
            let (prefix, count) = ("model.layers.1.mlp.experts.routed_experts", experts.len() as u64);
            assert_eq!(
                held[rank][&format!("{prefix}.w13_weight")],
                (vec![count, 16, 6], w13)
            );
            assert_eq!(
                held[rank][&format!("{prefix}.w2_weight")],
                (vec![count, 6, 8], w2)
            );
        }
    }
}

#[test]
fn sliced_experts_are_shared_by_all_replicas_in_vllm_and_by_each_in_the_checkpoints_layout() {
    for (layout, rows) in [(Layout::Vllm, 2), (Layout::Checkpoint, 4)] {
        let case = case(
            Family::Mixtral,
            ShardingOptions {
                layout,
                ..world(2, 1, 2)
            },
        );
        let checkpoint = case.make().open();
        for rank in plan(&checkpoint, &case.options).unwrap().ranks() {
            let name = "model.layers.0.block_sparse_moe.experts.4.w1.weight";
            assert_eq!(rank.manifest.get(name).unwrap().shape, [rows, 6], "{layout}");
            let attention = "model.layers.0.self_attn.q_proj.weight";
            assert_eq!(rank.manifest.get(attention).unwrap().shape, [6, 6], "{layout}");
        }
    }
}

#[test]
fn stacked_experts_are_transposed_by_name() {
    let case = case(
        Family::GptOss,
        ShardingOptions {
            layout: Layout::Vllm,
            ..tensor_parallel(2)
        },
    );
    let checkpoint = case.make().open();
    let held = execute(&checkpoint, &plan(&checkpoint, &case.options).unwrap());
    let experts = "model.layers.1.mlp.experts";
    for held in &held {
        for (stored, vllm, shape) in [
            ("gate_up_proj", "w13_weight", [5, 8, 6]),
            ("down_proj", "w2_weight", [5, 6, 4]),
        ] {
            let (_, as_stored) = &held[&format!("{experts}.{stored}")];
            let (found, transposed) = &held[&format!("{experts}.routed_experts.{vllm}")];
            assert_eq!(found, &shape);
            let [count, outer, inner] = shape.map(|size| size as usize);
            for at in 0..count * outer * inner {
                let (expert, row, column) = (at / (outer * inner), at / inner % outer, at % inner);
                let from = (expert * inner + column) * outer + row;
                assert_eq!(
                    transposed[2 * at..2 * at + 2],
                    as_stored[2 * from..2 * from + 2],
                    "{vllm}"
                );
            }
        }
    }
}

#[test]
fn a_bias_beside_sliced_experts_is_on_the_first_rank_of_all_replicas() {
    let options = ShardingOptions {
        layout: Layout::Vllm,
        ..world(2, 1, 2)
    };
    let case = case(Family::GptOss, options);
    let checkpoint = case.make().open();
    let held = execute(&checkpoint, &plan(&checkpoint, &case.options).unwrap());
    let (_, whole) = stored(&checkpoint, "model.layers.1.mlp.experts.down_proj_bias");
    for (rank, held) in held.iter().enumerate() {
        let (_, bias) = &held["model.layers.1.mlp.experts.routed_experts.w2_bias"];
        let expected = if rank == 0 {
            whole.clone()
        } else {
            vec![0; whole.len()]
        };
        assert_eq!(*bias, expected, "rank {rank}");
    }
}

#[test]
fn a_bias_beside_whole_experts_is_whole_on_every_rank() {
    let case = case(Family::GptOss, spread(Linear, Layout::Vllm, 2, 1));
    let checkpoint = case.make().open();
    let held = execute(&checkpoint, &plan(&checkpoint, &case.options).unwrap());
    let (_, whole) = stored(&checkpoint, "model.layers.0.mlp.experts.down_proj_bias");
    let own = held.iter().flat_map(|held| {
        held["model.layers.0.mlp.experts.routed_experts.w2_bias"]
            .1
            .clone()
    });
    assert_eq!(own.collect::<Vec<_>>(), whole);
}

#[test]
fn models_without_experts_are_refused() {
    for layout in [Layout::Checkpoint, Layout::Vllm] {
        let error = refusal(&SMALL.make().open(), &spread(Linear, layout, 2, 1));
        assert_eq!(error, RuleError::NoExperts);
    }
}

#[test]
fn a_dense_draft_beside_spread_experts_is_none_the_worse() {
    let checkpoint = Checkpoint::open(&data("eagle_llama")).unwrap();
    let options = spread(Linear, Layout::Checkpoint, 2, 1).of_draft(Draft::Eagle);
    assert!(plan(&checkpoint, &options).is_ok());
}

#[test]
fn fewer_experts_than_ranks_are_refused() {
    for family in [Family::Mixtral, Family::GptOss] {
        let case = case(family, spread(Linear, Layout::Checkpoint, 2, 3));
        let error = refusal(&case.make().open(), &case.options);
        assert_eq!(error, RuleError::TooFewExperts { experts: 5, ranks: 6 });
    }
}

#[test]
fn a_checkpoint_without_all_experts_of_a_layer_is_refused() {
    let case = case(Family::Qwen3Moe, spread(Linear, Layout::Checkpoint, 2, 1));
    for missing in [0, 2, 4] {
        let gone = format!("model.layers.1.mlp.experts.{missing}.up_proj.weight");
        let tensors: Vec<Tensor> = all(&case)
            .into_iter()
            .filter(|(name, ..)| *name != gone)
            .collect();
        let error = refusal(&Made::new(&case.config(), &[tensors]).open(), &case.options);
        let RuleError::Experts {
            tensor,
            found,
            stated,
            ..
        } = error
        else {
            panic!("{error}")
        };
        assert!(
            tensor.starts_with("model.layers.1.mlp.experts.") && tensor.contains("up_proj"),
            "{tensor}"
        );
        assert_eq!((found, stated), (4, 5));
    }
    let mut config = case.config();
    config["num_local_experts"] = json!(6);
    let error = refusal(&Made::new(&config, &[all(&case)]).open(), &case.options);
    assert!(
        matches!(
            error,
            RuleError::Experts {
                found: 5,
                last: 4,
                stated: 6,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn vllm_deals_experts_out_in_groups_alone() {
    let options = |layout| spread(RoundRobin, layout, 2, 1);
    let case = case(Family::Qwen3Moe, options(Layout::Vllm));
    let checkpoint = case.make().open();
    assert_eq!(refusal(&checkpoint, &case.options), RuleError::UngroupedExperts);
    assert!(plan(&checkpoint, &options(Layout::Checkpoint)).is_ok());
}

#[test]
fn experts_with_parts_missing_or_unlike_are_not_fused() {
    let vllm = ShardingOptions {
        layout: Layout::Vllm,
        ..tensor_parallel(2)
    };
    let case = case(Family::Mixtral, vllm);
    let gone = "model.layers.1.block_sparse_moe.experts.3.w3.weight";
    let tensors: Vec<Tensor> = all(&case).into_iter().filter(|(name, ..)| name != gone).collect();
    let error = refusal(&Made::new(&case.config(), &[tensors]).open(), &case.options);
    let fused = "model.layers.1.block_sparse_moe.experts.routed_experts.w13_weight".to_owned();
    assert_eq!(
        error,
        RuleError::PartMissing {
            fused,
            part: "w3 of expert 3".into()
        }
    );

    let narrow = "model.layers.1.block_sparse_moe.experts.3.w3.weight";
    let mut tensors = all(&case);
    tensors.iter_mut().find(|(name, ..)| name == narrow).unwrap().2 = vec![4, 6];
    let error = refusal(&Made::new(&case.config(), &[tensors]).open(), &case.options);
    assert!(
        matches!(&error, RuleError::PartsDiffer { second, .. } if *second == format!("{narrow} (BF16 [4, 6])")),
        "{error}"
    );
}

#[test]
fn an_expert_beyond_those_of_the_configuration_and_one_that_is_there_twice() {
    let case = case(Family::Mixtral, spread(Linear, Layout::Checkpoint, 2, 1));
    let with = |name: &str, options: &ShardingOptions| {
        let mut tensors = all(&case);
        let twin = "model.layers.1.block_sparse_moe.experts.3.w3.weight";
        let (_, dtype, shape) = tensors.iter().find(|(name, ..)| name == twin).unwrap().clone();
        tensors.push((name.to_owned(), dtype, shape));
        refusal(&Made::new(&case.config(), &[tensors]).open(), options)
    };
    let beyond = with(
        "model.layers.1.block_sparse_moe.experts.7.w3.weight",
        &case.options,
    );
    assert!(
        matches!(
            beyond,
            RuleError::Experts {
                found: 6,
                last: 7,
                stated: 5,
                ..
            }
        ),
        "{beyond}"
    );
    let vllm = ShardingOptions {
        layout: Layout::Vllm,
        ..tensor_parallel(2)
    };
    let second = "model.layers.1.block_sparse_moe.experts.03.w3.weight";
    let twice = with(second, &vllm);
    assert!(
        matches!(&twice, RuleError::StoredTwice { second: name, .. } if name == second),
        "{twice}"
    );
}

#[test]
fn a_dimension_that_cannot_count_experts() {
    let case = case(Family::GptOss, spread(RoundRobin, Layout::Checkpoint, 2, 1));
    let mut config = case.config();
    config["num_local_experts"] = json!(1u64 << 30);
    let empty = |(name, dtype, shape): Tensor| match name.contains(".experts.") {
        true => (name, dtype, vec![1 << 30, 0, shape.last().copied().unwrap()]),
        false => (name, dtype, shape),
    };
    let tensors = all(&case).into_iter().map(empty).collect();
    let error = refusal(&Made::new(&config, &[tensors]).open(), &case.options);
    assert!(
        matches!(&error, RuleError::TooManyExperts { experts, .. } if *experts == 1 << 30),
        "{error}"
    );
}

fn all(case: &Case) -> Vec<Tensor> {
    case.tensors().into_iter().map(|shared| shared.tensor).collect()
}
