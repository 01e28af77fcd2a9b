//! Layers on pipeline stages and experts on expert parallel ranks, against the expected values in
//! `vectors/plan.json`, and their properties.

use proptest::prelude::*;
use serde_json::{Value, json};
use weightd_core::plan::experts::{ExpertError, ExpertPlacement, local_experts};
use weightd_core::plan::pipeline::{MAX_STAGES, PipelineError, stages};

fn vectors(name: &str) -> Vec<Value> {
    let vectors: Value = serde_json::from_str(include_str!("vectors/plan.json")).unwrap();
    vectors[name].as_array().unwrap().clone()
}

fn size(case: &Value, name: &str) -> u32 {
    u32::try_from(case[name].as_u64().unwrap()).unwrap()
}

#[test]
fn stages_are_the_expected_ones() {
    let cases = vectors("pipeline");
    assert_eq!(cases.len(), 4);
    for case in cases {
        let got = stages(size(&case, "layers").into(), size(&case, "pp_size"), None).unwrap();
        let got: Vec<_> = got.iter().map(|stage| [stage.start, stage.end]).collect();
        assert_eq!(json!(got), case["partition"], "{case}");
    }
}

#[test]
fn a_partition_overrides() {
    let got = stages(32, 4, Some(&[8, 8, 9, 7])).unwrap();
    assert_eq!(got, [0..8, 8..16, 16..25, 25..32]);
}

#[test]
fn layers_that_do_not_fit_the_stages_are_refused_with_their_numbers() {
    let refused = |layers, pipeline, partition| stages(layers, pipeline, partition).unwrap_err().to_string();
    for (message, words) in [
        (refused(4, 0, None), "size is 0: it must be at least 1"),
        (refused(4, 5, None), "4 layers do not fill 5 pipeline stages"),
        (refused(0, u32::MAX, None), "0 layers do not fill 4294967295"),
        (
            refused(u64::MAX, MAX_STAGES + 1, None),
            "4097 is too large: at most 4096",
        ),
        (refused(4, 2, Some(&[4])), "1 entries for 2 pipeline stages"),
        (refused(4, 2, Some(&[])), "0 entries for 2 pipeline stages"),
        (refused(4, 2, Some(&[4, 0])), "gives stage 1 no layers"),
        (refused(4, 2, Some(&[2, 3])), "has 5 layers and the model 4"),
        (
            refused(4, 2, Some(&[u64::MAX, 5])),
            "has 18446744073709551620 layers",
        ),
    ] {
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn experts_are_the_expected_ones() {
    let cases = vectors("experts");
    assert_eq!(cases.len(), 3);
    for case in cases {
        let placement: ExpertPlacement = case["strategy"].as_str().unwrap().parse().unwrap();
        let (experts, ep_size) = (size(&case, "experts").into(), size(&case, "ep_size"));
        let local = |rank| local_experts(experts, ep_size, rank, placement).unwrap();
        let got: Vec<Vec<u64>> = (0..ep_size)
            .map(|rank| local(rank).ranges().flatten().collect())
            .collect();
        assert_eq!(json!(got), case["local"], "{case}");
    }
}

#[test]
fn placements_go_by_their_names() {
    for placement in [ExpertPlacement::Linear, ExpertPlacement::RoundRobin] {
        assert_eq!(placement.name().parse(), Ok(placement));
    }
    let error = "Linear".parse::<ExpertPlacement>().unwrap_err().to_string();
    assert_eq!(
        error,
        "there is no expert placement strategy \"Linear\": use linear or round_robin"
    );
}

#[test]
fn expert_ranks_that_do_not_exist_are_refused() {
    let local = |size, rank| local_experts(8, size, rank, ExpertPlacement::Linear).unwrap_err();
    assert_eq!(local(0, 0), ExpertError::NoRanks);
    assert_eq!(
        local(4, 4),
        ExpertError::NoSuchRank {
            ep_rank: 4,
            ep_size: 4
        }
    );
}

fn placements() -> impl Strategy<Value = ExpertPlacement> {
    prop::sample::select(&[ExpertPlacement::Linear, ExpertPlacement::RoundRobin][..])
}

proptest! {
    #[test]
    fn each_layer_is_on_one_stage_and_stages_are_equal_but_for_one(pipeline in 1u32..40, more in 0u64..200) {
        let layers = u64::from(pipeline) + more;
        let got = stages(layers, pipeline, None).unwrap();
        prop_assert_eq!(got.len(), pipeline as usize);
        prop_assert!(got.iter().cloned().flatten().eq(0..layers));
        let sizes: Vec<u64> = got.iter().map(|stage| stage.end - stage.start).collect();
        let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
        prop_assert!(most - least <= 1);
        prop_assert_eq!(sizes.last(), Some(least));
        prop_assert!(sizes[..sizes.len() - 1].is_sorted());
    }

    #[test]
    fn a_partition_is_what_its_stages_have(partition in prop::collection::vec(1u64..100, 1..20)) {
        let (layers, pipeline) = (partition.iter().sum(), partition.len() as u32);
        let got = stages(layers, pipeline, Some(&partition)).unwrap();
        prop_assert!(got.iter().cloned().flatten().eq(0..layers));
        let sizes: Vec<u64> = got.iter().map(|stage| stage.end - stage.start).collect();
        prop_assert_eq!(sizes, partition);
    }

    #[test]
    fn any_layers_and_stages_give_an_answer(
        layers in prop_oneof![0u64..9, any::<u64>()],
        pipeline in prop_oneof![0u32..9, any::<u32>()],
        partition in any::<Option<[u64; 3]>>(),
    ) {
        match stages(layers, pipeline, partition.as_ref().map(|p| &p[..])) {
            Ok(got) => {
                prop_assert_eq!(got.len(), pipeline as usize);
                prop_assert_eq!(got.last().map(|stage| stage.end), Some(layers));
            }
            Err(PipelineError::PartitionSum { sum, .. }) => prop_assert_ne!(sum, u128::from(layers)),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn each_expert_is_on_one_rank_in_ascending_slots(
        experts in 0u64..300, ep_size in 1u32..40, placement in placements(),
    ) {
        let ranks: Vec<_> = (0..ep_size).map(|rank| local_experts(experts, ep_size, rank, placement).unwrap()).collect();
        let mut seen = vec![0; experts as usize];
        for local in &ranks {
            let mine: Vec<u64> = local.ranges().flatten().collect();
            prop_assert_eq!(mine.len() as u64, local.count());
            prop_assert!(mine.is_sorted());
            for (slot, &expert) in (0..).zip(&mine) {
                prop_assert_eq!(local.slot_of(expert), Some(slot));
                seen[expert as usize] += 1;
            }
            let others = (0..experts + 50).filter(|expert| !mine.contains(expert));
            prop_assert!(others.into_iter().all(|expert| local.slot_of(expert).is_none()));
        }
        prop_assert!(seen.iter().all(|&times| times == 1));
        let counts = || ranks.iter().map(|local| local.count());
        prop_assert!(counts().max().unwrap() - counts().min().unwrap() <= 1);
    }

    #[test]
    fn any_experts_and_ranks_give_an_answer(
        experts in any::<u64>(), ep_size in any::<u32>(), ep_rank in any::<u32>(), expert in any::<u64>(),
        placement in placements(),
    ) {
        if let Ok(local) = local_experts(experts, ep_size, ep_rank, placement) {
            prop_assert!(local.slot_of(expert).is_none_or(|slot| slot < local.count() && expert < experts));
            prop_assert!(local.ranges().take(3).all(|run| run.end <= experts && local.slot_of(run.start).is_some()));
        }
    }
}
