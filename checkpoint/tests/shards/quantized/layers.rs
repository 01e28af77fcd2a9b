//! Quantized layers: what a rank holds of one is such a layer again, of its outputs and inputs.

use crate::made::execute::{Bytes, execute};
use crate::made::generated::{Case, Expected, Family, Shared, Sizes};
use crate::made::methods::{Method, Stored, methods};
use crate::made::{Made, Tensor, width, world};
use crate::{plan, stored};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use weightd_checkpoint::{Checkpoint, Rank, ShardingOptions};
use weightd_core::plan::experts::ExpertPlacement;

#[test]
fn scales_zero_points_and_packs_follow_their_weights() {
    for method in methods() {
        // Large groups make large layers.
        let cases_of = if method.units.contains(&128) { 2 } else { 4 };
        let mut runner = TestRunner::new(ProptestConfig::with_cases(cases_of));
        let result = runner.run(&cases(&method), |case| {
            let quantized = Quantized::new(&case, &method);
            quantized.check(&quantized.make().open());
            Ok(())
        });
        result.unwrap_or_else(|error| panic!("{}: {error}", method.name));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Pairs of gate and up go along with the inputs of down, in blocks of 32.
    #[test]
    fn experts_in_mxfp4_have_whole_blocks_and_the_last_ranks_fewer_of_them(
        tp in 1u32..5, dp in 1u32..3, blocks in 1u64..11, spread in any::<bool>(),
    ) {
        let per_rank = blocks.div_ceil(tp.into());
        prop_assume!(per_rank * u64::from(tp - 1) < blocks);
        let case = Case {
            family: Family::GptOss,
            sizes: Sizes {
                layers: 1, hidden: 64, heads: tp.into(), kv_heads: tp.into(), head_dim: 2, intermediate: 32 * blocks,
                experts: 9, vocabulary: 8,
            },
            options: ShardingOptions { experts: spread.then_some(ExpertPlacement::Linear), ..world(tp, 1, dp) },
        };
        let checkpoint = mxfp4(&case).open();
        let plan = plan(&checkpoint, &case.options).unwrap();
        let held = execute(&checkpoint, &plan);
        let of = |name: &str| format!("model.layers.0.mlp.experts.{name}");
        for (rank, held) in plan.ranks().iter().zip(&held) {
            let rank = Rank::of(&rank.placement);
            let bias = case.tensors().into_iter().find(|shared| shared.tensor.0 == of("down_proj_bias")).unwrap();
            let Expected::Ranges(0, experts) = case.expected(&bias, rank) else { panic!("experts come first") };
            let first = if spread { 0 } else { per_rank * u64::from(rank.tp) };
            let mine = first..if spread { blocks } else { blocks.min(first + per_rank) };
            let pairs = 64 * mine.start..64 * mine.end;
            for (name, ranges) in [
                ("gate_up_proj_blocks", vec![pairs.clone(), 0..2, 0..16]),
                ("gate_up_proj_scales", vec![pairs.clone(), 0..2]),
                ("gate_up_proj_bias", vec![pairs]),
                ("down_proj_blocks", vec![0..64, mine.clone(), 0..16]),
                ("down_proj_scales", vec![0..64, mine]),
                ("down_proj_bias", std::iter::once(0..64).collect()),
            ] {
                let mut indices: Vec<Vec<u64>> = vec![experts.iter().cloned().flatten().collect()];
                indices.extend(ranges.into_iter().map(Iterator::collect));
                let expected = select(&stored(&checkpoint, &of(name)), &indices);
                let found = &held[&of(name)];
                prop_assert_eq!(&found.0, &expected.0, "{} on {:?}", name, rank);
                prop_assert!(found.1 == expected.1, "{} on {:?}", name, rank);
            }
        }
    }
}

/// gpt-oss as it is published.
fn mxfp4(case: &Case) -> Made {
    let mut config = case.config();
    config["quantization_config"] = json!({ "quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"] });
    let quantize = |Shared {
                        tensor: (name, dtype, shape),
                        ..
                    }: Shared| match name.rsplit('.').next() {
        Some("gate_up_proj" | "down_proj") => {
            let [experts, input, out] = shape[..] else {
                panic!("{shape:?}")
            };
            let blocks = vec![experts, out, input / 32, 16];
            let scales = blocks[..3].to_vec();
            vec![
                (format!("{name}_blocks"), "U8", blocks),
                (format!("{name}_scales"), "U8", scales),
            ]
        }
        _ => vec![(name, dtype, shape)],
    };
    Made::new(
        &config,
        &[case.tensors().into_iter().flat_map(quantize).collect()],
    )
}

/// The elements with these indices of each dimension.
fn select((shape, bytes): &Bytes, indices: &[Vec<u64>]) -> Bytes {
    assert_eq!(shape.len(), indices.len());
    let width = bytes.len() / shape.iter().product::<u64>() as usize;
    let mut elements = vec![0u64];
    for (size, indices) in shape.iter().zip(indices) {
        elements = elements
            .iter()
            .flat_map(|at| indices.iter().map(move |index| at * size + index))
            .collect();
    }
    let bytes = elements
        .iter()
        .flat_map(|&at| &bytes[at as usize * width..][..width])
        .copied()
        .collect();
    (
        indices.iter().map(|indices| indices.len() as u64).collect(),
        bytes,
    )
}

/// Any family and world, with sizes that the world can share in the method's units.
fn cases(method: &Method) -> impl Strategy<Value = Case> + use<> {
    use Family::*;
    let mut families = vec![Llama, Phi3, Mixtral, Qwen3Moe];
    // Its latent dimensions are odd.
    families.extend((method.whole == 1).then_some(DeepseekV3));
    let placements = vec![
        None,
        Some(ExpertPlacement::Linear),
        Some(ExpertPlacement::RoundRobin),
    ];
    let ([out, input], whole) = (method.units, method.whole);
    let unit = (out.max(input)..)
        .find(|unit| unit.is_multiple_of(out) && unit.is_multiple_of(input))
        .unwrap();
    let ranks = if unit < 64 {
        vec![1u32, 2, 3, 4]
    } else {
        vec![1, 2]
    };
    let choices = (
        prop::sample::select(families),
        prop::sample::select(placements),
        prop::sample::select(ranks),
    );
    let numbers = (1u32..3, 1u32..3, 0usize..4, 1u64..4, 1u64..3, 0u64..2);
    (choices, numbers).prop_map(
        move |((family, placement, tp), (pp, dp, kv, hidden, intermediate, experts))| {
            let ways = u64::from(tp);
            let divisors: Vec<u64> = (1..=ways)
                .filter(|divisor| ways.is_multiple_of(*divisor))
                .collect();
            let is_spread = placement.is_some() && family.has_experts();
            Case {
                family,
                sizes: Sizes {
                    layers: 2,
                    hidden: hidden * whole + if whole == 1 { 6 } else { 0 },
                    heads: ways,
                    kv_heads: *divisors.get(kv).unwrap_or(&ways),
                    head_dim: unit,
                    intermediate: unit * ways * intermediate,
                    experts: if is_spread {
                        u64::from(tp * dp) + experts
                    } else {
                        2
                    },
                    vocabulary: 3 * ways,
                },
                options: ShardingOptions {
                    experts: placement.filter(|_| is_spread),
                    ..world(tp, pp, dp)
                },
            }
        },
    )
}

/// A generated model with its layers quantized.
struct Quantized<'a> {
    case: &'a Case,
    method: &'a Method,
    layers: Vec<Shared>,
}

impl<'a> Quantized<'a> {
    fn new(case: &'a Case, method: &'a Method) -> Quantized<'a> {
        Quantized {
            case,
            method,
            layers: case.tensors(),
        }
    }

    fn make(&self) -> Made {
        let mut config = self.case.config();
        config["quantization_config"] = self.method.config.clone();
        let stored = |shared: &Shared| {
            let [out, input] = sizes(shared);
            let names = self.store(shared, out, input).into_iter();
            names
                .map(|(name, stored)| (name, stored.dtype, stored.shape))
                .collect::<Vec<Tensor>>()
        };
        let mut first: Vec<Tensor> = self.layers.iter().flat_map(stored).collect();
        let second = first.split_off(first.len() / 2);
        Made::new(&config, &[first, second])
    }

    /// The tensors of a layer of these sizes, by their names.
    fn store(&self, shared: &Shared, out: u64, input: u64) -> Vec<(String, Stored)> {
        let (name, dtype, shape) = &shared.tensor;
        // One projection is left as it was.
        match name
            .strip_suffix(".weight")
            .filter(|module| is_linear(module) && !module.contains(".0.self_attn.o_"))
        {
            None => {
                let shape = [out, input];
                vec![(
                    name.clone(),
                    Stored::plain(dtype, &shape[..shared.tensor.2.len()]),
                )]
            }
            Some(module) => {
                assert_eq!(shape.len(), 2, "{name}");
                let stored = self.method.store(out, input).into_iter();
                stored
                    .map(|stored| (format!("{module}.{}", stored.suffix), stored))
                    .collect()
            }
        }
    }

    /// Checks that each rank's tensors are those of layers of its outputs and inputs, that each weight's elements
    /// are the very ones which that weight is stored in, and that all ranks together have all of them.
    fn check(&self, checkpoint: &Checkpoint) {
        let plan = plan(checkpoint, &self.case.options).unwrap();
        let held = execute(checkpoint, &plan);
        let mut known = BTreeSet::new();
        for layer in &self.layers {
            let [out, input] = sizes(layer);
            let whole: Vec<(String, Stored, Bytes)> = (self.store(layer, out, input).into_iter())
                .map(|(name, of)| (name.clone(), of, stored(checkpoint, &name)))
                .collect();
            let mut missing: Vec<Vec<bool>> = whole
                .iter()
                .map(|(_, of, _)| vec![true; of.shape.iter().product::<u64>() as usize])
                .collect();
            for (rank, held) in plan.ranks().iter().zip(&held) {
                let rank = Rank::of(&rank.placement);
                let Expected::Ranges(dim, ranges) = self.case.expected(layer, rank) else {
                    let there = whole.iter().find(|(name, ..)| held.contains_key(name));
                    assert!(there.is_none(), "{} is on {rank:?}", there.unwrap().0);
                    continue;
                };
                let (outs, ins) = match dim {
                    0 => (indices(&ranges), (0..input).collect()),
                    _ => ((0..out).collect(), indices(&ranges)),
                };
                let part = self.store(layer, outs.len() as u64, ins.len() as u64);
                for (((name, of, whole), (_, part)), missing) in whole.iter().zip(&part).zip(&mut missing) {
                    assert_part((of, whole), (part, &held[name]), (&outs, &ins), missing, name);
                }
            }
            for ((name, ..), missing) in whole.iter().zip(&missing) {
                assert!(!missing.contains(&true), "{name} is not all there");
            }
            known.extend(whole.into_iter().map(|(name, ..)| name));
        }
        let names: BTreeSet<String> = held.iter().flat_map(BTreeMap::keys).cloned().collect();
        assert_eq!(names, known);
    }
}

fn assert_part(
    (of, whole): (&Stored, &Bytes),
    (part, held): (&Stored, &Bytes),
    (outs, ins): (&[u64], &[u64]),
    missing: &mut [bool],
    name: &str,
) {
    assert_eq!(held.0, part.shape, "{name}");
    let width = width(of.dtype) as usize;
    let (mut from, mut to) = (Vec::new(), Vec::new());
    // By the number of an element here, that of the one which it was compared with.
    let mut compared = vec![u64::MAX; part.shape.iter().product::<u64>() as usize];
    for (local_out, &out) in (0..).zip(outs) {
        for (local_in, &input) in (0..).zip(ins) {
            of.elements(out, input, &mut from);
            part.elements(local_out, local_in, &mut to);
            assert_eq!(from.len(), to.len(), "{name}: {out}, {input}");
            for (&from, &to) in from.iter().zip(&to) {
                if std::mem::replace(&mut compared[to as usize], from) == from {
                    continue;
                }
                assert_eq!(
                    element(whole, from, width),
                    element(held, to, width),
                    "{name}: of output {out} and input {input}, which are {local_out} and {local_in} here"
                );
                missing[from as usize] = false;
            }
        }
    }
}

fn element((_, bytes): &Bytes, at: u64, width: usize) -> &[u8] {
    &bytes[at as usize * width..][..width]
}

fn sizes(shared: &Shared) -> [u64; 2] {
    let shape = &shared.tensor.2;
    [shape[0], shape.get(1).copied().unwrap_or(1)]
}

fn indices(ranges: &[Range<u64>]) -> Vec<u64> {
    ranges.iter().cloned().flatten().collect()
}

/// Whether a module is one that methods quantize.
fn is_linear(module: &str) -> bool {
    let last = module.rsplit('.').next().unwrap();
    last.contains("_proj") || ["w1", "w2", "w3"].contains(&last)
}
