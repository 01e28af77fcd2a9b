//! Pipeline stages, and layers that no stage has.

use super::made::execute::{Bytes, execute};
use super::made::generated::{Case, Family, Sizes};
use super::made::{Decoder, Made, SMALL, Tensor, tensor_parallel, world};
use super::{plan, refusal, stored};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use weightd_checkpoint::{Layout, RuleError, Sharding, ShardingOptions};
use weightd_core::plan::pipeline::PipelineError;

/// The layers that a rank has tensors of.
fn layers(held: &BTreeMap<String, Bytes>) -> BTreeSet<u64> {
    let layer = |name: &String| {
        name.strip_prefix("model.layers.")?
            .split('.')
            .next()?
            .parse()
            .ok()
    };
    held.keys().filter_map(layer).collect()
}

#[test]
fn a_partition_gives_the_layers_of_each_stage() {
    let checkpoint = Decoder { layers: 7, ..SMALL }.make().open();
    for layout in [Layout::Checkpoint, Layout::Vllm] {
        let stages = |layer_partition| {
            let options = ShardingOptions {
                layout,
                layer_partition,
                ..world(1, 3, 1)
            };
            let held = execute(&checkpoint, &plan(&checkpoint, &options).unwrap());
            held.iter()
                .map(|held| layers(held).into_iter().collect::<Vec<_>>())
                .collect::<Vec<_>>()
        };
        assert_eq!(stages(None), [vec![0, 1], vec![2, 3, 4], vec![5, 6]]);
        assert_eq!(
            stages(Some(vec![1, 1, 5])),
            [vec![0], vec![1], vec![2, 3, 4, 5, 6]]
        );
    }
    let refused = |partition: Vec<u64>| {
        refusal(
            &checkpoint,
            &ShardingOptions {
                layer_partition: Some(partition),
                ..world(1, 3, 1)
            },
        )
    };
    let sum = PipelineError::PartitionSum { sum: 8, layers: 7 };
    assert_eq!(refused(vec![4, 2, 2]), RuleError::Pipeline(sum));
    let count = PipelineError::PartitionCount { given: 2, stages: 3 };
    assert_eq!(refused(vec![4, 3]), RuleError::Pipeline(count));
    let too_few = PipelineError::TooFewLayers { layers: 7, stages: 8 };
    assert_eq!(
        refusal(&checkpoint, &world(1, 8, 1)),
        RuleError::Pipeline(too_few)
    );
}

#[test]
fn a_partition_for_one_stage_has_to_be_of_all_layers() {
    let checkpoint = SMALL.make().open();
    let options = |layers| ShardingOptions {
        layer_partition: Some(vec![layers]),
        ..world(2, 1, 1)
    };
    assert!(plan(&checkpoint, &options(2)).is_ok());
    let sum = PipelineError::PartitionSum { sum: 3, layers: 2 };
    assert_eq!(refusal(&checkpoint, &options(3)), RuleError::Pipeline(sum));
}

#[test]
fn stages_need_the_number_of_layers() {
    let mut config = SMALL.config();
    config.as_object_mut().unwrap().remove("num_hidden_layers");
    let checkpoint = Made::new(&config, &[SMALL.tensors()]).open();
    assert!(plan(&checkpoint, &tensor_parallel(2)).is_ok());
    let error = refusal(&checkpoint, &world(1, 2, 1));
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
}

#[test]
fn encoders_are_whole_on_every_rank_and_have_no_stages() {
    let config = json!({
        "architectures": ["BertModel"], "hidden_size": 6, "num_attention_heads": 2, "num_hidden_layers": 2,
    });
    let names = [
        "embeddings.word_embeddings.weight",
        "encoder.layer.0.output.dense.weight",
        "encoder.layer.1.attention.self.query.weight",
        "pooler.dense.weight",
    ];
    let tensors: Vec<Tensor> = names
        .iter()
        .map(|name| ((*name).to_owned(), "F32", vec![5, 6]))
        .collect();
    let checkpoint = Made::new(&config, &[tensors]).open();
    for held in execute(&checkpoint, &plan(&checkpoint, &world(2, 1, 2)).unwrap()) {
        for name in names {
            assert_eq!(held[name], stored(&checkpoint, name));
        }
    }
    let architecture = "BertModel".to_owned();
    assert_eq!(
        refusal(&checkpoint, &world(1, 2, 1)),
        RuleError::NoStages {
            architecture: architecture.clone()
        }
    );
    let vllm = ShardingOptions {
        layout: Layout::Vllm,
        ..world(1, 1, 1)
    };
    let error = refusal(&checkpoint, &vllm);
    assert!(
        matches!(&error, RuleError::NoLayout { architecture: named, known } if *named == architecture && known.contains("LlamaForCausalLM")),
        "{error}"
    );
}

#[test]
fn layers_that_predict_further_tokens_are_left_out() {
    let sizes = Sizes {
        layers: 3,
        hidden: 6,
        heads: 4,
        kv_heads: 4,
        head_dim: 3,
        intermediate: 8,
        experts: 4,
        vocabulary: 64,
    };
    let mut case = Case {
        family: Family::DeepseekV3,
        sizes,
        options: tensor_parallel(1),
    };
    let mut tensors: Vec<Tensor> = case.tensors().into_iter().map(|shared| shared.tensor).collect();
    // The last layer is one too many for the model, and has what no other layer has.
    case.sizes.layers = 2;
    let inside = case.tensors().len();
    for more in [
        "eh_proj",
        "enorm",
        "hnorm",
        "shared_head.head",
        "shared_head.norm",
        "embed_tokens",
    ] {
        tensors.push((format!("model.layers.2.{more}.weight"), "BF16", vec![64, 6]));
    }
    let beyond = tensors.len() - inside;
    let checkpoint = Made::new(&case.config(), &[tensors]).open();
    for (tp, pp) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        for layout in [Layout::Checkpoint, Layout::Vllm] {
            let options = ShardingOptions {
                layout,
                ..world(tp, pp, 1)
            };
            let sharding = Sharding::new(&checkpoint, &options).unwrap();
            assert_eq!(sharding.left_out(), beyond);
            let plan = plan(&checkpoint, &options).unwrap();
            let held: BTreeSet<u64> = execute(&checkpoint, &plan).iter().flat_map(layers).collect();
            assert_eq!(held, BTreeSet::from([0, 1]), "{layout} at tp {tp}, pp {pp}");
        }
    }
    assert_eq!(
        Sharding::new(&SMALL.make().open(), &tensor_parallel(2))
            .unwrap()
            .left_out(),
        0
    );
}
