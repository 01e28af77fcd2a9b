//! Placement against the expected values in `vectors/plan.json`, and its properties.

use proptest::prelude::*;
use serde_json::Value;
use std::collections::BTreeSet;
use weightd_core::plan::placement::{MAX_LOCAL_RANKS, Node, Parallel, Placement, PlacementError, place};

fn parallel(tensor: u32, pipeline: u32, data: u32) -> Parallel {
    Parallel {
        tensor,
        pipeline,
        data,
    }
}

fn nodes(nnodes: u32, node_rank: u32) -> Node {
    Node {
        nnodes,
        node_rank,
        ..Node::single(1)
    }
}

#[test]
fn placements_are_the_expected_ones() {
    let vectors: Value = serde_json::from_str(include_str!("vectors/plan.json")).unwrap();
    let cases = vectors["placement"].as_array().unwrap();
    assert_eq!(cases.len(), 9);
    for case in cases {
        let size = |name: &str| u32::try_from(case["config"][name].as_u64().unwrap()).unwrap();
        let parallel = parallel(
            size("tensor_parallel_size"),
            size("pipeline_parallel_size"),
            size("data_parallel_size"),
        );
        let node = Node {
            data_parallel_size_local: size("data_parallel_size_local"),
            data_parallel_start_rank: size("data_parallel_start_rank"),
            ..nodes(size("nnodes"), size("node_rank"))
        };
        match place(&parallel, &node) {
            Ok(placements) => {
                let got = serde_json::to_value(&placements).unwrap();
                let expected = case["placements"].as_array().expect("a rejection was expected");
                assert_eq!(placements.len(), expected.len());
                for (got, expected) in got.as_array().unwrap().iter().zip(expected) {
                    for (name, value) in expected.as_object().unwrap() {
                        assert_eq!(&got[name], value, "{name} in {case}");
                    }
                }
            }
            Err(error) => {
                let expected = case["error"].as_str().expect("a placement was expected");
                assert!(error.to_string().contains(expected), "{error}");
            }
        }
    }
}

#[test]
fn local_dp_ranks_count_from_the_nodes_first_also_when_stages_span_nodes() {
    // TP 1, PP 2, DP 2 on 4 nodes: node 2 serves stage 0 of DP rank 1.
    let placements = place(&parallel(1, 2, 2), &nodes(4, 2)).unwrap();
    let expected = Placement {
        local_rank: 0,
        global_rank: 2,
        dp_rank: 1,
        pp_rank: 0,
        tp_rank: 0,
        dp_rank_local: 0,
        device: 0,
        slot: 0,
    };
    assert_eq!(placements, [expected]);
}

#[test]
fn uneven_data_parallel_over_launchers_is_valid() {
    let first = Node {
        data_parallel_size_local: 3,
        ..Node::single(3)
    };
    let second = Node {
        data_parallel_start_rank: 3,
        ..Node::single(1)
    };
    let world: Vec<u32> = [first, second]
        .iter()
        .flat_map(|node| place(&parallel(2, 1, 4), node).unwrap())
        .map(|placement| placement.global_rank)
        .collect();
    assert_eq!(world, (0..8).collect::<Vec<_>>());
}

#[test]
fn consecutive_ranks_share_a_device() {
    let node = Node {
        ranks_per_device: 2,
        device_slots: Some(4),
        ..Node::single(1)
    };
    let on: Vec<(u32, u32)> = place(&parallel(3, 1, 1), &node)
        .unwrap()
        .iter()
        .map(|p| (p.device, p.slot))
        .collect();
    assert_eq!(on, [(0, 0), (0, 1), (1, 0)]);
}

#[test]
fn as_many_slots_as_ranks_are_enough() {
    let node = |slots| Node {
        device_slots: Some(slots),
        ..Node::single(1)
    };
    assert_eq!(place(&parallel(4, 1, 1), &node(4)).unwrap().len(), 4);
    assert!(place(&parallel(4, 1, 1), &node(3)).is_err());
}

#[test]
fn contradictions_are_refused_with_their_numbers() {
    let refused = |parallel: Parallel, node: Node| place(&parallel, &node).unwrap_err().to_string();
    let one = parallel(1, 1, 1);
    for (message, words) in [
        (
            refused(parallel(0, 1, 1), Node::single(1)),
            "tensor parallel size is 0",
        ),
        (
            refused(parallel(1, 0, 1), Node::single(1)),
            "pipeline parallel size is 0",
        ),
        (
            refused(parallel(1, 1, 0), Node::single(1)),
            "data parallel size is 0",
        ),
        (refused(one, Node::single(0)), "local data parallel size is 0"),
        (refused(one, nodes(0, 0)), "number of nodes is 0"),
        (
            refused(
                one,
                Node {
                    ranks_per_device: 0,
                    ..Node::single(1)
                },
            ),
            "ranks per device is 0",
        ),
        (
            refused(parallel(2, 1, 1), nodes(2, 2)),
            "node rank 2 is outside the 2 nodes",
        ),
        (
            refused(parallel(3, 1, 1), nodes(2, 0)),
            "2 nodes do not evenly divide the world of 3 ranks",
        ),
        (
            refused(
                parallel(1, 1, 4),
                Node {
                    data_parallel_start_rank: u32::MAX,
                    ..Node::single(2)
                },
            ),
            "4294967295 + local size 2 = 4294967297 exceeds the data parallel size 4",
        ),
        (
            refused(
                parallel(4, 1, 1),
                Node {
                    device_slots: Some(2),
                    ..Node::single(1)
                },
            ),
            "4 local ranks do not fit the 2 device slots",
        ),
        (
            refused(
                one,
                Node {
                    master_port: Some(7),
                    draft_master_port: Some(7),
                    ..Node::single(1)
                },
            ),
            "port 7 is the target's own",
        ),
        (
            refused(
                one,
                Node {
                    master_port: Some(65535),
                    ..Node::single(1)
                },
            ),
            "no port after",
        ),
    ] {
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn a_draft_whose_port_is_named_needs_none_after_the_masters() {
    let node = Node {
        master_port: Some(65535),
        draft_master_port: Some(7),
        ..Node::single(1)
    };
    assert!(place(&parallel(1, 1, 1), &node).is_ok());
}

#[test]
fn huge_sizes_are_errors() {
    let most = u32::MAX;
    assert_eq!(
        place(&parallel(most, most, most), &Node::single(1)),
        Err(PlacementError::WorldTooLarge {
            data: most,
            pipeline: most,
            tensor: most
        })
    );
    assert_eq!(
        place(&parallel(most, 1, 1), &Node::single(1)),
        Err(PlacementError::TooManyRanks { ranks: most })
    );
    assert!(place(&parallel(MAX_LOCAL_RANKS, 1, 1), &Node::single(1)).is_ok());
}

proptest! {
    #[test]
    fn nodes_together_serve_each_global_rank_once(
        tensor in 1u32..5, pipeline in 1u32..4, data in 1u32..5, nnodes in 2u32..9,
    ) {
        let parallel = parallel(tensor, pipeline, data);
        let world = tensor * pipeline * data;
        let served: Result<Vec<_>, _> = (0..nnodes).map(|rank| place(&parallel, &nodes(nnodes, rank))).collect();
        prop_assert_eq!(served.is_ok(), world % nnodes == 0);
        for placements in served.iter().flatten() {
            prop_assert_eq!(placements[0].dp_rank_local, 0);
        }
        if let Ok(served) = served {
            let ranks: Vec<Placement> = served.concat();
            prop_assert_eq!(
                ranks.iter().map(|p| p.global_rank).collect::<Vec<_>>(),
                (0..world).collect::<Vec<_>>()
            );
            for p in &ranks {
                prop_assert_eq!(p.global_rank, p.dp_rank * pipeline * tensor + p.pp_rank * tensor + p.tp_rank);
                prop_assert!(p.tp_rank < tensor && p.pp_rank < pipeline && p.dp_rank < data);
            }
        }
    }

    #[test]
    fn launchers_of_consecutive_dp_ranks_serve_the_world_once(
        tensor in 1u32..4, pipeline in 1u32..4, cuts in prop::collection::vec(1u32..4, 1..5), per_device in 1u32..4,
    ) {
        let parallel = parallel(tensor, pipeline, cuts.iter().sum());
        let mut start = 0;
        let mut seen = BTreeSet::new();
        for local in cuts {
            let node = Node {
                data_parallel_start_rank: start,
                ranks_per_device: per_device,
                ..Node::single(local)
            };
            let placements = place(&parallel, &node).unwrap();
            let on: BTreeSet<(u32, u32)> = placements.iter().map(|p| (p.device, p.slot)).collect();
            prop_assert_eq!(on.len(), placements.len());
            for p in placements {
                prop_assert!(p.slot < per_device);
                prop_assert_eq!(p.dp_rank_local, p.dp_rank - start);
                prop_assert!(seen.insert(p.global_rank));
            }
            start += local;
        }
        prop_assert_eq!(seen, (0..start * pipeline * tensor).collect::<BTreeSet<_>>());
    }

    #[test]
    fn any_numbers_give_an_answer(
        sizes in prop::array::uniform7(prop_oneof![0u32..9, any::<u32>()]), slots in any::<Option<u32>>(),
    ) {
        let [tensor, pipeline, data, nnodes, node_rank, local, start] = sizes;
        let node = Node {
            data_parallel_start_rank: start, data_parallel_size_local: local, device_slots: slots,
            ..nodes(nnodes, node_rank)
        };
        if let Ok(placements) = place(&parallel(tensor, pipeline, data), &node) {
            prop_assert!(!placements.is_empty() && placements.len() <= MAX_LOCAL_RANKS as usize);
        }
    }
}
