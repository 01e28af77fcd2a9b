//! Which bytes of a checkpoint each rank gets, by executing read plans in plain memory.

mod made;

use made::{Decoder, Made, SMALL, data, ranks, tensor_parallel};
use proptest::prelude::*;
use serde_json::json;
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use weightd_checkpoint::{Checkpoint, NodePlan, PlanError, RuleError};
use weightd_core::content::manifest::TensorKind;
use weightd_core::content::{HandleKind, Manifest};
use weightd_core::plan::placement::Parallel;

fn plan(checkpoint: &Checkpoint, parallel: &Parallel) -> Result<NodePlan, PlanError> {
    NodePlan::new(checkpoint, parallel, &ranks(parallel), HandleKind::Memfd)
}

fn refusal(checkpoint: &Checkpoint, parallel: &Parallel) -> RuleError {
    match plan(checkpoint, parallel) {
        Err(PlanError::Rule(error)) => error,
        other => panic!("a refusal by the rules was expected, not {other:?}"),
    }
}

/// A tensor's shape and packed bytes.
type Held = (Vec<u64>, Vec<u8>);

/// What each rank holds after the plan was executed, byte by byte.
fn execute(checkpoint: &Checkpoint, plan: &NodePlan) -> Vec<BTreeMap<String, Held>> {
    let mut regions: Vec<Vec<u8>> = plan
        .read()
        .regions()
        .iter()
        .map(|&bytes| vec![0; bytes as usize])
        .collect();
    for chunk in plan.read().chunks(1000, 0) {
        let mut read = vec![0; chunk.bytes as usize];
        checkpoint.files()[chunk.file as usize]
            .file
            .read_exact_at(&mut read, chunk.offset)
            .unwrap();
        for copy in plan.read().copies(&chunk) {
            for row in 0..copy.from.rows {
                let from = (copy.from.start + row * copy.from.pitch) as usize;
                let to = (copy.to + row * copy.to_pitch) as usize;
                let width = copy.from.width as usize;
                regions[copy.rank as usize][to..to + width].copy_from_slice(&read[from..from + width]);
            }
        }
    }
    let held = |region: &Vec<u8>, manifest: &Manifest| {
        let bytes = |tensor: &weightd_core::content::manifest::Tensor<'_>| {
            let start = tensor.offset as usize;
            region[start..start + tensor.packed_bytes() as usize].to_vec()
        };
        manifest
            .tensors()
            .map(|t| (t.name.to_owned(), (t.shape.to_vec(), bytes(&t))))
            .collect()
    };
    regions
        .iter()
        .zip(plan.ranks())
        .map(|(region, rank)| held(region, &rank.manifest))
        .collect()
}

/// A stored tensor, read whole.
fn stored(checkpoint: &Checkpoint, name: &str) -> Held {
    let tensor = &checkpoint.tensors()[name];
    let mut bytes = vec![0; tensor.bytes as usize];
    checkpoint.files()[tensor.file]
        .file
        .read_exact_at(&mut bytes, tensor.offset)
        .unwrap();
    (tensor.shape.clone(), bytes)
}

/// Puts shards together along a dimension, as `torch.cat` does.
fn concatenate(shards: &[&Held], dim: usize) -> Held {
    let shape = &shards[0].0;
    let outer: u64 = shape[..dim].iter().product();
    let mut whole = shape.clone();
    whole[dim] = shards.iter().map(|(shape, _)| shape[dim]).sum();
    let mut bytes = Vec::new();
    for row in 0..outer as usize {
        for (_, shard) in shards {
            let width = shard.len() / outer as usize;
            bytes.extend(&shard[row * width..(row + 1) * width]);
        }
    }
    (whole, bytes)
}

/// How the ranks' shards make up the tensor: the dimension, or nothing for copies.
fn dimension(name: &str) -> Option<usize> {
    let row = name.contains("o_proj") || name.contains("down_proj");
    match () {
        () if name.contains("norm") || row && name.ends_with(".bias") => None,
        () if row => Some(1),
        () => Some(0),
    }
}

/// Checks that the shards of all ranks give back every tensor of the checkpoint.
fn assert_gathers(checkpoint: &Checkpoint, tp: u32) {
    let kv_heads = checkpoint.config().num_key_value_heads.unwrap() as u32;
    let plan = plan(checkpoint, &tensor_parallel(tp)).unwrap();
    let held = execute(checkpoint, &plan);
    for name in checkpoint.tensors().keys() {
        let whole = stored(checkpoint, name);
        let shards: Vec<&Held> = held.iter().map(|rank| &rank[name]).collect();
        let Some(dim) = dimension(name) else {
            assert!(shards.iter().all(|&shard| *shard == whole), "{name}");
            continue;
        };
        let copies = if name.contains("k_proj") || name.contains("v_proj") {
            (tp / kv_heads).max(1)
        } else {
            1
        };
        for twins in shards.chunks(copies as usize) {
            assert!(twins.iter().all(|shard| *shard == twins[0]), "{name}");
        }
        let distinct: Vec<&Held> = shards.into_iter().step_by(copies as usize).collect();
        assert_eq!(concatenate(&distinct, dim), whole, "{name} at tp {tp}");
    }
}

#[test]
fn shards_of_llama_gather_to_the_checkpoint() {
    let checkpoint = Checkpoint::open(&data("llama")).unwrap();
    for tp in [1, 2, 4] {
        assert_gathers(&checkpoint, tp);
    }
}

#[test]
fn shards_of_qwen3_gather_to_the_checkpoint_with_its_kv_heads_repeated() {
    let checkpoint = Checkpoint::open(&data("qwen3")).unwrap();
    for tp in [1, 2, 4, 8] {
        assert_gathers(&checkpoint, tp);
    }
    let plan = plan(&checkpoint, &tensor_parallel(4)).unwrap();
    let held = execute(&checkpoint, &plan);
    let (_, whole) = stored(&checkpoint, "model.layers.2.self_attn.k_proj.weight");
    let head = whole.len() / 2;
    for (rank, range) in [
        (0, 0..head),
        (1, 0..head),
        (2, head..2 * head),
        (3, head..2 * head),
    ] {
        assert_eq!(
            held[rank]["model.layers.2.self_attn.k_proj.weight"].1,
            whole[range]
        );
    }
}

#[test]
fn a_tied_head_that_the_checkpoint_lacks_is_an_alias() {
    let checkpoint = Checkpoint::open(&data("qwen3")).unwrap();
    for rank in plan(&checkpoint, &tensor_parallel(2)).unwrap().ranks() {
        let aliases: Vec<_> = rank
            .manifest
            .aliases()
            .map(|(alias, tensor)| (alias, tensor.name))
            .collect();
        assert_eq!(aliases, [("lm_head.weight", "model.embed_tokens.weight")]);
    }
}

#[test]
fn a_tied_head_that_the_checkpoint_has_is_not_stored_twice() {
    let tied = |tied: serde_json::Value| {
        let mut config = SMALL.config();
        config["tie_word_embeddings"] = tied;
        let made = Made::new(&config, &[SMALL.tensors()]);
        let plan = plan(&made.open(), &tensor_parallel(2)).unwrap();
        let manifest = &plan.ranks()[0].manifest;
        (
            manifest.tensors().len(),
            manifest
                .aliases()
                .map(|(name, _)| name.to_owned())
                .collect::<Vec<_>>(),
        )
    };
    let all = SMALL.tensors().len();
    assert_eq!(tied(json!(true)), (all - 1, vec!["lm_head.weight".to_owned()]));
    assert_eq!(tied(json!(false)), (all, vec![]));
    assert_eq!(tied(json!(null)), (all, vec![]), "Llama's default");
}

#[test]
fn heads_that_config_and_tensors_do_not_agree_on_are_refused() {
    for (field, value) in [
        ("num_key_value_heads", json!(1)),
        ("head_dim", json!(1)),
        ("num_attention_heads", json!(2)),
    ] {
        let mut config = SMALL.config();
        config[field] = value;
        let made = Made::new(&config, &[SMALL.tensors()]);
        let error = refusal(&made.open(), &tensor_parallel(2));
        assert!(
            matches!(error, RuleError::HeadSize { .. } | RuleError::Indivisible { .. }),
            "{field}: {error}"
        );
    }
}

#[test]
fn a_model_without_a_language_head_gets_none() {
    for (architecture, aliases) in [
        ("BertForSequenceClassification", 0),
        ("LlamaModel", 0),
        ("UnknownForCausalLM", 1),
    ] {
        let mut config = SMALL.config();
        config["architectures"] = json!([architecture]);
        config["tie_word_embeddings"] = json!(true);
        let mut tensors = SMALL.tensors();
        tensors.retain(|(name, ..)| name != "lm_head.weight");
        let made = Made::new(&config, &[tensors]);
        let plan = plan(&made.open(), &tensor_parallel(1)).unwrap();
        assert_eq!(
            plan.ranks()[0].manifest.aliases().len(),
            aliases,
            "{architecture}"
        );
    }
}

#[test]
fn a_checkpoint_that_kept_only_the_tied_head_lists_the_embedding() {
    let mut config = SMALL.config();
    config["tie_word_embeddings"] = json!(true);
    let made = Made::new(&config, &[SMALL.tensors().split_off(1)]);
    let plan = plan(&made.open(), &tensor_parallel(2)).unwrap();
    let of = plan.ranks()[1]
        .manifest
        .get("model.embed_tokens.weight")
        .unwrap()
        .name;
    assert_eq!(of, "lm_head.weight");
}

#[test]
fn a_vocabulary_that_does_not_divide_leaves_the_last_rank_less() {
    let vocabulary = |vocabulary| Decoder { vocabulary, ..SMALL }.make();
    let checkpoint = vocabulary(30).open();
    assert_gathers(&checkpoint, 4);
    let plan = plan(&checkpoint, &tensor_parallel(4)).unwrap();
    let rows = |name: &str| -> Vec<u64> {
        plan.ranks()
            .iter()
            .map(|rank| rank.manifest.get(name).unwrap().shape[0])
            .collect()
    };
    assert_eq!(rows("model.embed_tokens.weight"), [8, 8, 8, 6]);
    assert_eq!(rows("lm_head.weight"), [8, 8, 8, 6]);

    let made = vocabulary(9);
    assert_eq!(
        refusal(&made.open(), &tensor_parallel(4)),
        RuleError::EmptyVocabulary {
            tensor: "lm_head.weight".into(),
            size: 9,
            tp: 4,
            per_rank: 3
        }
    );
}

#[test]
fn every_data_parallel_replica_holds_the_same_and_bytes_are_read_once() {
    let checkpoint = SMALL.make().open();
    let parallel = Parallel {
        data: 3,
        ..tensor_parallel(2)
    };
    let plan = plan(&checkpoint, &parallel).unwrap();
    let held = execute(&checkpoint, &plan);
    for rank in 0..6 {
        assert_eq!(held[rank], held[rank % 2]);
    }
    let read: u64 = plan.read().chunks(1 << 20, 0).map(|chunk| chunk.bytes).sum();
    assert_eq!(
        read,
        checkpoint
            .tensors()
            .values()
            .map(|tensor| tensor.bytes)
            .sum::<u64>()
    );
}

#[test]
fn ranks_elsewhere_are_not_read_for() {
    let checkpoint = SMALL.make().open();
    let parallel = tensor_parallel(4);
    let here = &ranks(&parallel)[..1];
    let plan = NodePlan::new(&checkpoint, &parallel, here, HandleKind::Memfd).unwrap();
    let read: u64 = plan.read().chunks(1 << 20, 0).map(|chunk| chunk.bytes).sum();
    assert_eq!(read, plan.read().written()[0]);
}

#[test]
fn rotary_frequencies_of_old_checkpoints_are_buffers() {
    let mut tensors = SMALL.tensors();
    tensors.push((
        "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
        "F32",
        vec![7],
    ));
    let checkpoint = Made::new(&SMALL.config(), &[tensors]).open();
    let plan = plan(&checkpoint, &tensor_parallel(2)).unwrap();
    for rank in plan.ranks() {
        let buffers: Vec<_> = rank
            .manifest
            .tensors()
            .filter(|t| t.kind == TensorKind::Buffer)
            .collect();
        assert_eq!(buffers.len(), 1);
        assert_eq!(buffers[0].shape, [7]);
        assert!(buffers[0].persistent, "the checkpoint has it");
    }
}

#[test]
fn what_the_rules_do_not_know_is_served_whole_and_never_split() {
    let mut config = SMALL.config();
    config["architectures"] = json!(["MambaForCausalLM"]);
    let checkpoint = Made::new(&config, &[vec![("backbone.mixer.A".into(), "F32", vec![5, 3])]]).open();
    let held = execute(&checkpoint, &plan(&checkpoint, &tensor_parallel(1)).unwrap());
    assert_eq!(
        held[0]["backbone.mixer.A"],
        stored(&checkpoint, "backbone.mixer.A")
    );
    let message = refusal(&checkpoint, &tensor_parallel(2)).to_string();
    assert!(
        message.contains("MambaForCausalLM") && message.contains("LlamaForCausalLM"),
        "{message}"
    );
}

#[test]
fn a_quantized_checkpoint_is_served_whole_and_never_split() {
    let mut config = SMALL.config();
    config["quantization_config"] = json!({ "quant_method": "gptq", "bits": 4 });
    let checkpoint = Made::new(&config, &[SMALL.tensors()]).open();
    assert!(plan(&checkpoint, &tensor_parallel(1)).is_ok());
    assert_eq!(
        refusal(&checkpoint, &tensor_parallel(2)),
        RuleError::Quantized {
            method: "gptq".into(),
            tp: 2
        }
    );
}

#[test]
fn tensors_without_a_rule_are_listed() {
    let mut tensors = SMALL.tensors();
    tensors.extend((0..7).map(|i| (format!("model.layers.{i}.extra.weight"), "BF16", vec![4])));
    let checkpoint = Made::new(&SMALL.config(), &[tensors]).open();
    assert!(plan(&checkpoint, &tensor_parallel(1)).is_ok());
    let message = refusal(&checkpoint, &tensor_parallel(2)).to_string();
    assert!(
        message.contains("model.layers.0.extra.weight, model.layers.1.extra.weight"),
        "{message}"
    );
    assert!(message.contains("and 2 more"), "{message}");
}

#[test]
fn sizes_that_do_not_divide_are_refused_with_their_numbers() {
    let refused = |decoder: Decoder, tp| refusal(&decoder.make().open(), &tensor_parallel(tp));
    assert_eq!(refused(SMALL, 3), RuleError::Heads { tp: 3, heads: 8 });
    let heads = Decoder {
        heads: 12,
        kv_heads: 4,
        ..SMALL
    };
    assert_eq!(refused(heads, 6), RuleError::KvHeads { tp: 6, heads: 4 });
    let narrow = Decoder {
        intermediate: 41,
        ..SMALL
    };
    assert_eq!(
        refused(narrow, 2),
        RuleError::Indivisible {
            tensor: "model.layers.0.mlp.down_proj.weight".into(),
            dim: 1,
            size: 41,
            parts: 2,
            of: "ranks"
        }
    );
    let parallel = Parallel {
        pipeline: 2,
        ..tensor_parallel(1)
    };
    assert_eq!(
        refusal(&SMALL.make().open(), &parallel),
        RuleError::Pipeline { pp: 2 }
    );
}

#[test]
fn planning_and_refusing_read_no_weights() {
    let made = SMALL.make();
    let checkpoint = made.open();
    // Whoever reads a weight now meets the end of the file.
    for file in checkpoint.files() {
        let first = checkpoint
            .tensors()
            .values()
            .filter(|t| checkpoint.files()[t.file].name == file.name);
        let header = first.map(|tensor| tensor.offset).min().unwrap();
        std::fs::OpenOptions::new()
            .write(true)
            .open(&file.path)
            .unwrap()
            .set_len(header)
            .unwrap();
    }
    assert!(plan(&checkpoint, &tensor_parallel(4)).is_ok());
    assert_eq!(
        refusal(&checkpoint, &tensor_parallel(5)),
        RuleError::Heads { tp: 5, heads: 8 }
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn shards_of_any_decoder_gather_to_the_checkpoint(
        tp in 1u32..7, heads in 1u64..4, kv in 1u64..4, repeat in any::<bool>(), head_dim in 1u64..5, hidden in 1u64..9,
        intermediate in 1u64..6, vocabulary in 1u64..60, qwen in any::<bool>(),
    ) {
        let size = u64::from(tp);
        let divisors: Vec<u64> = (1..=size).filter(|d| size.is_multiple_of(*d)).collect();
        let decoder = Decoder {
            architecture: if qwen { "Qwen3ForCausalLM" } else { "LlamaForCausalLM" },
            layers: 1,
            hidden,
            heads: heads * size,
            kv_heads: if repeat { divisors[kv as usize % divisors.len()] } else { kv * size },
            head_dim,
            intermediate: intermediate * size,
            vocabulary,
        };
        let checkpoint = decoder.make().open();
        match plan(&checkpoint, &tensor_parallel(tp)) {
            Err(PlanError::Rule(RuleError::EmptyVocabulary { per_rank, .. })) => {
                prop_assert!(per_rank * (size - 1) >= vocabulary)
            }
            other => {
                other.unwrap();
                assert_gathers(&checkpoint, tp);
            }
        }
    }

    #[test]
    fn tensors_are_aligned_and_apart_and_every_byte_of_them_is_written_once(
        tp in prop::sample::select(vec![1u32, 2, 4]), dp in 1u32..3, vocabulary in 4u64..40,
    ) {
        let checkpoint = Decoder { vocabulary, ..SMALL }.make().open();
        let parallel = Parallel { data: dp, ..tensor_parallel(tp) };
        let Ok(plan) = plan(&checkpoint, &parallel) else { return Ok(()) };
        for (rank, written) in plan.ranks().iter().zip(plan.read().written()) {
            let mut ranges: Vec<(u64, u64)> =
                rank.manifest.tensors().map(|t| (t.offset, t.offset + t.packed_bytes())).collect();
            ranges.sort();
            prop_assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            prop_assert!(ranges.iter().all(|range| range.0.is_multiple_of(256)));
            // No byte is written twice (the plan was checked), so equal sums mean once each.
            prop_assert_eq!(*written, ranges.iter().map(|(start, end)| end - start).sum::<u64>());
        }
        prop_assert_eq!(plan.clone(), self::plan(&checkpoint, &parallel).unwrap(), "nothing but the inputs");
    }
}
