//! The shards of all ranks, put together, are the checkpoint.

use super::made::execute::{Bytes, execute};
use super::made::generated::{Case, Expected, Shared, cases};
use super::made::{Decoder, SMALL, data, tensor_parallel, width};
use super::{plan, stored};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use weightd_checkpoint::{Checkpoint, Layout, Rank};
use weightd_core::content::Dtype;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]

    #[test]
    fn shards_of_any_model_gather_to_the_checkpoint(case in cases()) {
        let checkpoint = case.make().open();
        assert_gathers(&case, &checkpoint, |shared| {
            let (name, dtype, _) = &shared.tensor;
            (*dtype, stored(&checkpoint, name).1)
        });
    }
}

/// Checks that every rank holds what it has to, and that all ranks' shards together are every tensor
/// as `whole` has it: of this type and these bytes.
pub fn assert_gathers(
    case: &Case,
    checkpoint: &Checkpoint,
    whole: impl Fn(&Shared) -> (&'static str, Vec<u8>),
) {
    let plan = plan(checkpoint, &case.options).unwrap();
    let held = execute(checkpoint, &plan);
    let ranks: Vec<Rank> = plan
        .ranks()
        .iter()
        .map(|rank| Rank::of(&rank.placement))
        .collect();
    let tensors = case.tensors();
    for shared in &tensors {
        let name = &shared.tensor.0;
        let (dtype, bytes) = whole(shared);
        let mut gathered = Gathered::new(shared, width(dtype), bytes.len());
        let mut holders = BTreeSet::new();
        for ((held, &rank), plan) in held.iter().zip(&ranks).zip(plan.ranks()) {
            match case.expected(shared, rank) {
                Expected::Absent => assert!(!held.contains_key(name), "{name} on {rank:?}"),
                Expected::Ranges(dim, ranges) => {
                    let shard = held
                        .get(name)
                        .unwrap_or_else(|| panic!("{name} is not on {rank:?}"));
                    let listed = plan.manifest.get(name).unwrap();
                    assert_eq!(listed.dtype.name(), dtype, "{name}");
                    gathered.put(dim, &ranges, &canonical(listed.dtype, shard));
                    holders.insert((rank.dp, rank.pp, rank.tp));
                }
            }
        }
        assert_eq!(gathered.whole(), canonical_bytes(dtype, &bytes), "{name}");
        if shared.is_of_one_expert() && case.options.experts.is_some() {
            assert_eq!(holders.len(), 1, "{name} is on {holders:?}");
        }
        if name.contains("layers.") {
            let stages: BTreeSet<u32> = holders.iter().map(|holder| holder.1).collect();
            assert_eq!(stages.len(), 1, "{name} is on stages {stages:?}");
        }
    }
    let known: BTreeSet<&str> = tensors.iter().map(|shared| shared.tensor.0.as_str()).collect();
    for held in &held {
        let more: Vec<&String> = held
            .keys()
            .filter(|name| !known.contains(name.as_str()))
            .collect();
        assert!(case.options.layout == Layout::Vllm || more.is_empty(), "{more:?}");
    }
}

/// A tensor that is put together of shards.
struct Gathered<'a> {
    shared: &'a Shared,
    width: u64,
    bytes: Vec<Option<u8>>,
}

impl<'a> Gathered<'a> {
    fn new(shared: &'a Shared, width: u64, bytes: usize) -> Gathered<'a> {
        Gathered {
            shared,
            width,
            bytes: vec![None; bytes],
        }
    }

    /// Adds a shard, which has just these indices of a dimension; or more, which are zero.
    fn put(&mut self, dim: usize, ranges: &[Range<u64>], (shape, shard): &Bytes) {
        let (name, _, whole) = &self.shared.tensor;
        let indices: Vec<u64> = ranges.iter().cloned().flatten().collect();
        let size = shape[dim];
        let others = |shape: &[u64]| [&shape[..dim], &shape[dim + 1..]].concat();
        assert_eq!(others(shape), others(whole), "{name}");
        let is_padded = size > indices.len() as u64 && !name.contains("layers.");
        assert!(
            size == indices.len() as u64 || is_padded,
            "{name}: {shape:?} of {whole:?}, {ranges:?}"
        );
        let inner = (whole[dim + 1..].iter().product::<u64>() * self.width) as usize;
        for outer in 0..whole[..dim].iter().product::<u64>() {
            for at in 0..size {
                let from = (outer * size + at) as usize * inner;
                let from = &shard[from..from + inner];
                let Some(index) = indices.get(at as usize) else {
                    assert!(
                        from.iter().all(|&byte| byte == 0),
                        "{name} is padded with other than zero"
                    );
                    continue;
                };
                let to = (outer * whole[dim] + index) as usize * inner;
                for (to, from) in self.bytes[to..to + inner].iter_mut().zip(from) {
                    assert!(
                        to.is_none_or(|to| to == *from),
                        "{name} is not the same on two ranks"
                    );
                    *to = Some(*from);
                }
            }
        }
    }

    fn whole(self) -> Vec<u8> {
        let name = &self.shared.tensor.0;
        let bytes = self
            .bytes
            .into_iter()
            .map(|byte| byte.unwrap_or_else(|| panic!("{name} is not all there")));
        bytes.collect()
    }
}

fn canonical(dtype: Dtype, (shape, bytes): &Bytes) -> Bytes {
    (shape.clone(), canonical_bytes(dtype.name(), bytes))
}

/// The same with every NaN the quiet one without a payload: which NaN a cast makes is not said.
fn canonical_bytes(dtype: &str, bytes: &[u8]) -> Vec<u8> {
    let (infinity, quiet) = match dtype {
        "F32" => (0x7f80_0000, 0x7fc0_0000),
        "BF16" => (0x7f80, 0x7fc0),
        "F16" => (0x7c00, 0x7e00),
        _ => return bytes.to_vec(),
    };
    let width = width(dtype) as usize;
    let element = |element: &[u8]| {
        let mut bits = [0; 4];
        bits[..width].copy_from_slice(element);
        let (bits, sign) = (u32::from_le_bytes(bits), 1u32 << (8 * width - 1));
        let bits = if bits & !sign > infinity {
            quiet | bits & sign
        } else {
            bits
        };
        bits.to_le_bytes()[..width].to_vec()
    };
    bytes.chunks(width).flat_map(element).collect()
}

/// Puts shards together along a dimension, as `torch.cat` does.
fn concatenate(shards: &[&Bytes], dim: usize) -> Bytes {
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

/// Checks a decoder's shards by names alone.
fn assert_concatenates(checkpoint: &Checkpoint, tp: u32) {
    let kv_heads = checkpoint.config().num_key_value_heads.unwrap() as u32;
    let plan = plan(checkpoint, &tensor_parallel(tp)).unwrap();
    let held: Vec<BTreeMap<String, Bytes>> = execute(checkpoint, &plan);
    for name in checkpoint.tensors().keys() {
        let whole = stored(checkpoint, name);
        let shards: Vec<&Bytes> = held.iter().map(|rank| &rank[name]).collect();
        let row = name.contains("o_proj") || name.contains("down_proj");
        if name.contains("norm") || row && name.ends_with(".bias") {
            assert!(shards.iter().all(|&shard| *shard == whole), "{name}");
            continue;
        }
        let is_kv = name.contains("k_proj") || name.contains("v_proj");
        let copies = if is_kv { (tp / kv_heads).max(1) as usize } else { 1 };
        for twins in shards.chunks(copies) {
            assert!(twins.iter().all(|shard| *shard == twins[0]), "{name}");
        }
        let distinct: Vec<&Bytes> = shards.into_iter().step_by(copies).collect();
        assert_eq!(
            concatenate(&distinct, usize::from(row)),
            whole,
            "{name} at tp {tp}"
        );
    }
}

#[test]
fn shards_of_checkpoints_that_transformers_wrote_concatenate() {
    for (name, sizes) in [("llama", &[1, 2, 4][..]), ("qwen3", &[1, 2, 4, 8])] {
        let checkpoint = Checkpoint::open(&data(name)).unwrap();
        sizes.iter().for_each(|&tp| assert_concatenates(&checkpoint, tp));
    }
}

#[test]
fn key_and_value_heads_fewer_than_ranks_are_repeated_on_consecutive_ranks() {
    let checkpoint = Checkpoint::open(&data("qwen3")).unwrap();
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
fn a_vocabulary_that_does_not_divide_leaves_the_last_rank_less() {
    let checkpoint = Decoder {
        vocabulary: 30,
        ..SMALL
    }
    .make()
    .open();
    assert_concatenates(&checkpoint, 4);
    let plan = plan(&checkpoint, &tensor_parallel(4)).unwrap();
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let rows = plan
            .ranks()
            .iter()
            .map(|rank| rank.manifest.get(name).unwrap().shape[0]);
        assert_eq!(rows.collect::<Vec<_>>(), [8, 8, 8, 6]);
    }
}
