//! Regions: no byte belongs to two tensors that are not views, each is written once and read once.

use super::made::execute::elements;
use super::made::generated::{Case, Expected, cases};
use super::made::{ranks, width};
use super::plan;
use proptest::prelude::*;
use std::collections::BTreeSet;
use weightd_checkpoint::{Checkpoint, NodePlan, Rank, RankPlan, Sharding};
use weightd_core::content::manifest::Tensor;
use weightd_core::content::{DeviceUuid, HandleKind};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn tensors_are_apart_or_views_and_every_byte_of_them_is_written_once(case in cases()) {
        let checkpoint = case.make().open();
        let plan = plan(&checkpoint, &case.options).unwrap();
        for (local, rank) in plan.ranks().iter().enumerate() {
            let owners = assert_apart(rank);
            let counts = writes(&plan, local);
            for (at, (owner, count)) in owners.iter().zip(&counts).enumerate() {
                prop_assert_eq!(u32::from(owner.is_some()), *count, "byte {} of {}", at, local);
            }
            let owned = owners.iter().filter(|owner| owner.is_some()).count() as u64;
            prop_assert_eq!(plan.read().written()[local], owned);
        }
    }

    #[test]
    fn the_plan_of_a_rank_depends_on_nothing_but_its_inputs(case in cases()) {
        let made = case.make();
        let checkpoint = made.open();
        let together = plan(&checkpoint, &case.options).unwrap();
        prop_assert_eq!(&together, &plan(&made.open(), &case.options).unwrap());
        for (rank, with_others) in ranks(&case.options.parallel).into_iter().zip(together.ranks()) {
            let alone = NodePlan::new(&Sharding::new(&checkpoint, &case.options).unwrap(), &[rank], HandleKind::Memfd).unwrap();
            prop_assert_eq!(&alone.ranks()[0], with_others);
            let elsewhere = (rank.0, DeviceUuid([0xee; 16]));
            let elsewhere = NodePlan::new(&Sharding::new(&checkpoint, &case.options).unwrap(), &[elsewhere], HandleKind::Memfd).unwrap();
            prop_assert_eq!(elsewhere.ranks()[0].manifest.regions()[0].device, DeviceUuid([0xee; 16]));
            prop_assert!(elsewhere.ranks()[0].manifest.tensors().eq(with_others.manifest.tensors()));
            prop_assert_eq!(alone.read(), elsewhere.read());
        }
    }

    #[test]
    fn what_is_needed_is_read_once_and_nothing_else(case in cases(), size in 1u64..5000) {
        let checkpoint = case.make().open();
        let all = ranks(&case.options.parallel);
        for here in [&all[..], &all[all.len() - 1..]] {
            let plan = NodePlan::new(&Sharding::new(&checkpoint, &case.options).unwrap(), here, HandleKind::Memfd).unwrap();
            let mut read = BTreeSet::new();
            for chunk in plan.read().chunks(size, 0) {
                for at in chunk.offset..chunk.offset + chunk.bytes {
                    prop_assert!(read.insert((chunk.file, at)), "byte {at} of file {} is read twice", chunk.file);
                }
            }
            let here: Vec<Rank> = here.iter().map(|(placement, _)| Rank::of(placement)).collect();
            prop_assert_eq!(read, needed(&case, &checkpoint, &here));
        }
    }
}

/// Checks that a rank's tensors are in different bytes, or views into larger ones and different again.
/// The tensor that each byte of the region belongs to, views left aside.
fn assert_apart(rank: &RankPlan) -> Vec<Option<usize>> {
    let tensors: Vec<Tensor<'_>> = rank.manifest.tensors().collect();
    let mut largest_first: Vec<usize> = (0..tensors.len()).collect();
    largest_first.sort_by_key(|&number| std::cmp::Reverse(tensors[number].packed_bytes()));
    let mut owners = vec![None; rank.region_bytes as usize];
    let mut views = owners.clone();
    let mut needed = 0;
    for number in largest_first {
        let tensor = &tensors[number];
        let width = (tensor.dtype.bits() / 8) as usize;
        let bytes: Vec<usize> = elements(tensor).flat_map(|at| at..at + width).collect();
        let Some(&first) = bytes.first() else { continue };
        let owner = owners[first];
        for &byte in &bytes {
            assert_eq!(owners[byte], owner, "{} is in several tensors", tensor.name);
        }
        let into = match owner {
            None => {
                assert!(
                    tensor.is_contiguous() && tensor.offset.is_multiple_of(256),
                    "{}",
                    tensor.name
                );
                needed += tensor.packed_bytes().next_multiple_of(256);
                &mut owners
            }
            Some(_) => &mut views,
        };
        for byte in bytes {
            assert_eq!(
                into[byte].replace(number),
                None,
                "{} overlaps another",
                tensor.name
            );
        }
    }
    assert!(
        rank.region_bytes <= needed,
        "{} for tensors of {needed}",
        rank.region_bytes
    );
    owners
}

/// How often each byte of a region is written.
fn writes(plan: &NodePlan, local: usize) -> Vec<u32> {
    let mut counts = vec![0; plan.read().regions()[local] as usize];
    let mut count = |from: u64, bytes: u64| {
        counts[from as usize..(from + bytes) as usize]
            .iter_mut()
            .for_each(|count| *count += 1);
    };
    for fill in plan
        .read()
        .fills()
        .iter()
        .filter(|fill| fill.rank as usize == local)
    {
        count(fill.offset, fill.bytes);
    }
    for chunk in plan.read().chunks(1000, 0) {
        for copy in plan
            .read()
            .copies(&chunk)
            .filter(|copy| copy.rank as usize == local)
        {
            (0..copy.from.rows).for_each(|row| count(copy.to + row * copy.to_pitch, copy.to_width()));
        }
    }
    counts
}

/// Every byte of the files that one of these ranks needs.
fn needed(case: &Case, checkpoint: &Checkpoint, ranks: &[Rank]) -> BTreeSet<(u32, u64)> {
    let mut needed = BTreeSet::new();
    for shared in case.tensors() {
        let (name, dtype, shape) = &shared.tensor;
        let stored = &checkpoint.tensors()[name];
        for rank in ranks {
            let Expected::Ranges(dim, ranges) = case.expected(&shared, *rank) else {
                continue;
            };
            let inner = shape[dim + 1..].iter().product::<u64>() * width(dtype);
            for outer in 0..shape[..dim].iter().product::<u64>() {
                for index in ranges.iter().cloned().flatten() {
                    let from = stored.offset + (outer * shape[dim] + index) * inner;
                    needed.extend((from..from + inner).map(|at| (stored.file as u32, at)));
                }
            }
        }
    }
    needed
}
