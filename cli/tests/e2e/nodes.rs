//! Several nodes, each with a launcher and a socket directory of its own, on one machine.

use crate::checkpoints::*;
use crate::harness::*;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::Path;

/// One node of several: where it serves, and the flags that differ from node to node.
struct NodeOf {
    site: Site,
    own: Vec<String>,
}

impl NodeOf {
    /// The nodes that these flags describe.
    fn world(flags: &[&[&str]]) -> Vec<NodeOf> {
        let node = |own: &&[&str]| NodeOf {
            site: Site::new(),
            own: own.iter().map(|flag| (*flag).to_owned()).collect(),
        };
        flags.iter().map(node).collect()
    }

    fn flags<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        self.own
            .iter()
            .map(String::as_str)
            .chain(more.iter().copied())
            .collect()
    }

    #[track_caller]
    fn launch(&self, model: &Path, tp: u32, shared: &[&str]) -> (Running, String) {
        let mut launcher = self
            .site
            .start(self.site.on_model("preload", model, tp, &self.flags(shared)));
        let ready = launcher.ready();
        (launcher, ready)
    }

    /// What it serves, by global rank.
    fn served(&self) -> Vec<u64> {
        let rank = |daemon: &Value| daemon["global_rank"].as_u64().unwrap();
        self.site.status().iter().map(rank).collect()
    }

    /// An engine of this node attaches where it is, or where `site` is.
    fn attach(&self, site: &Site, model: &Path, tp: u32, shared: &[&str]) -> Ran {
        site.attach(model, tp, &self.flags(&[shared, &["--all", "--verify"]].concat()))
    }
}

#[test]
fn each_node_is_ready_alone_and_serves_its_own_in_any_order() {
    let llama = model("llama");
    let shared = [
        "--nnodes",
        "2",
        "--master-addr",
        "nowhere.invalid",
        "--master-port",
        "7000",
    ];
    for order in [[0, 1], [1, 0]] {
        let nodes = NodeOf::world(&[&["--node-rank", "0"], &["--node-rank", "1"]]);
        let mut launchers = Vec::new();
        for rank in order {
            let (launcher, ready) = nodes[rank].launch(&llama, 2, &shared);
            assert!(
                ready.starts_with(&format!("READY node {rank}/2 ranks 1 roles 1 ")),
                "{ready}"
            );
            assert_eq!(nodes[rank].served(), [rank as u64]);
            let ran = nodes[rank].attach(&nodes[rank].site, &llama, 2, &shared);
            assert_eq!(ran.code, Some(0), "{ran:?}");
            launchers.push((rank, launcher));
        }
        for (here, other) in [(0, 1), (1, 0)] {
            let error = nodes[other]
                .attach(&nodes[here].site, &llama, 2, &shared)
                .error(1);
            let expected = format!("serves something else: tp_rank (asked for {other}, served {here});");
            assert!(error.contains(&expected), "{error}");
        }
        for (rank, mut launcher) in launchers {
            launcher.signal(Signal::TERM);
            assert_eq!(launcher.code(), 143);
            nodes[rank].site.assert_clean();
        }
    }
}

#[test]
fn a_pipeline_over_nodes_has_its_draft_on_the_last() {
    let llama = model("llama");
    let draft = json!({ "method": "eagle", "model": model("eagle_llama") }).to_string();
    let shared = ["-pp", "2", "--nnodes", "2", "--speculative-config", &draft];
    let nodes = NodeOf::world(&[&["--node-rank", "0"], &["--node-rank", "1"]]);
    let (_last, ready) = nodes[1].launch(&llama, 1, &shared);
    assert!(ready.starts_with("READY node 1/2 ranks 1 roles 2 "), "{ready}");
    let (_first, ready) = nodes[0].launch(&llama, 1, &shared);
    assert!(ready.starts_with("READY node 0/2 ranks 1 roles 1 "), "{ready}");
    for node in &nodes {
        let ran = node.attach(&node.site, &llama, 1, &shared);
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }
    let of_draft = [&shared[..], &["--draft"]].concat();
    let ran = nodes[1].attach(&nodes[1].site, &llama, 1, &of_draft);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let error = nodes[0].attach(&nodes[1].site, &llama, 1, &shared).error(1);
    assert!(error.contains(": pp_rank (asked for 0, served 1);"), "{error}");
}

#[test]
fn replicas_and_stages_over_four_nodes_are_what_the_plan_of_the_world_says() {
    let llama = model("llama");
    let shared = ["-pp", "2", "-dp", "2", "-n", "4"];
    let nodes = NodeOf::world(&[&["-r", "0"], &["-r", "1"], &["-r", "2"], &["-r", "3"]]);
    let mut launchers = Vec::new();
    for rank in [2, 0, 3, 1] {
        launchers.push(nodes[rank].launch(&llama, 1, &shared));
    }
    let plan = ["--all-nodes", "--json", "--model", llama.to_str().unwrap()];
    let world = &nodes[2]
        .site
        .json(&[&["plan"], &nodes[2].flags(&shared)[..], &plan].concat())[0];
    assert_eq!(world["complete"], true);
    let planned = world["nodes"].as_array().unwrap();
    assert_eq!(planned.len(), 4);
    for (rank, (planned, node)) in planned.iter().zip(&nodes).enumerate() {
        assert_eq!(
            (&planned["node_rank"], &planned["here"]),
            (&json!(rank), &json!(rank == 2))
        );
        let placements = planned["placements"].as_array().unwrap();
        let of_world: Vec<_> = placements
            .iter()
            .map(|placement| placement["global_rank"].as_u64().unwrap())
            .collect();
        assert_eq!(node.served(), of_world);
        let ran = node.attach(&node.site, &llama, 1, &shared);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        // What the rank was to hold is what it holds.
        let held = node.site.status()[0]["bytes"].as_u64().unwrap();
        assert_eq!(world["ranks"][rank]["region_bytes"], held);
    }
    assert_eq!(planned[2]["placements"][0]["dp_rank"], 1);
    assert_eq!(planned[2]["placements"][0]["dp_rank_local"], 0);
    let pp_rank = "pp_rank (asked for 1, served 0)";
    let dp_rank = "dp_rank (asked for 0, served 1)";
    let both = format!("{pp_rank}, {dp_rank}");
    for (other, fields) in [(1, &both[..]), (0, dp_rank), (3, pp_rank)] {
        let error = nodes[other].attach(&nodes[2].site, &llama, 1, &shared).error(1);
        assert!(error.contains(&format!(": {fields};")), "{error}");
    }
}

#[test]
fn launchers_with_unequal_numbers_of_replicas_share_a_world() {
    let qwen = model("qwen3");
    let shared = [
        "--data-parallel-size",
        "3",
        "--data-parallel-address",
        "nowhere.invalid",
    ];
    let nodes = NodeOf::world(&[&["-dpl", "2"], &["-dpl", "1", "-dpr", "2"], &["-dpn", "2"]]);
    let (_second, ready) = nodes[1].launch(&qwen, 1, &shared);
    assert!(ready.contains(" ranks 1 "), "{ready}");
    let (_first, ready) = nodes[0].launch(&qwen, 1, &shared);
    assert!(ready.contains(" ranks 2 "), "{ready}");
    assert_eq!((nodes[0].served(), nodes[1].served()), (vec![0, 1], vec![2]));
    // Replica 2 by its start, and by its name.
    for node in &nodes[1..] {
        let ran = node.attach(&nodes[1].site, &qwen, 1, &shared);
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }
    let error = nodes[1].attach(&nodes[0].site, &qwen, 1, &shared).error(1);
    assert!(error.contains(": dp_rank (asked for 2, served 0);"), "{error}");
}

#[test]
fn a_plan_of_the_world_is_the_plans_of_its_nodes() {
    let site = Site::new();
    for (shared, flags) in [
        (
            &["-tp", "2", "-pp", "2", "-dp", "3", "-n", "3"][..],
            [["-r", "0"], ["-r", "1"], ["-r", "2"]],
        ),
        (
            &["-tp", "2", "-dp", "6", "-dpl", "2"],
            [["-dpr", "0"], ["-dpr", "2"], ["-dpr", "4"]],
        ),
    ] {
        for here in 0..3 {
            let all = [&["plan", "--all-nodes", "--json"], shared, &flags[here]].concat();
            let world = &site.json(&all)[0];
            assert_eq!(world["complete"], true);
            for (rank, own) in flags.iter().enumerate() {
                let alone = &site.json(&[&["plan", "--json"], shared, own].concat())[0];
                let planned = &world["nodes"][rank];
                assert_eq!(
                    (&planned["node_rank"], &planned["here"]),
                    (&json!(rank), &json!(rank == here))
                );
                let (planned, alone) = (&planned["placements"], &alone["placements"]);
                assert_eq!(planned.as_array().unwrap().len(), alone.as_array().unwrap().len());
                for (planned, alone) in planned.as_array().unwrap().iter().zip(alone.as_array().unwrap()) {
                    for (name, value) in alone.as_object().unwrap() {
                        assert_eq!(&planned[name], value, "{name}");
                    }
                }
            }
        }
    }
    let human = site
        .run(&["plan", "--all-nodes", "-tp", "2", "-n", "2", "-r", "1"])
        .stdout;
    let lines: Vec<&str> = human.lines().collect();
    assert_eq!(
        lines,
        [
            "node local global   dp   pp   tp  device",
            "   0     0      0    0    0    0  device 0",
            "   1     0      1    0    0    1  cpu:0",
        ]
    );
}

#[test]
fn a_world_that_one_node_cannot_know_is_said_to_be_unknown() {
    let site = Site::new();
    let uneven = ["plan", "--all-nodes", "-dp", "4", "-dpl", "3"];
    let human = site.run(&uneven).stdout;
    assert!(human.contains("this node alone"), "{human}");
    let world = &site.json(&[&uneven[..], &["--json"]].concat())[0];
    assert_eq!(world["complete"], false);
    assert_eq!(world["nodes"].as_array().unwrap().len(), 1);
    let error = site
        .run(&["plan", "--all-nodes", "-dp", "1000000", "-n", "1000000"])
        .error(2);
    assert!(error.contains("too large to print"), "{error}");
}

#[test]
fn a_plan_counts_what_drafts_hold() {
    let (site, llama) = (Site::new(), model("llama"));
    let draft = json!({ "method": "eagle", "model": model("eagle_llama") }).to_string();
    let flags = ["-pp", "2", "-n", "2", "--speculative-config", &draft];
    let model = llama.to_str().unwrap();
    let plan = &site.json(&[&["plan", model, "--json", "--all-nodes"], &flags[..]].concat())[0];
    let ranks = plan["ranks"].as_array().unwrap();
    let who: Vec<_> = ranks
        .iter()
        .map(|rank| {
            (
                rank["role"].as_str().unwrap(),
                rank["global_rank"].as_u64().unwrap(),
            )
        })
        .collect();
    assert_eq!(who, [("target", 0), ("target", 1), ("draft", 1)]);
    let bytes: Vec<u64> = ranks.iter().map(|rank| rank["bytes"].as_u64().unwrap()).collect();
    assert!(bytes.iter().all(|bytes| *bytes > 0));
    let totals = &plan["totals"];
    assert_eq!(totals["bytes"], bytes.iter().sum::<u64>());
    assert_eq!(totals["largest"], (bytes[1] + bytes[2]).max(bytes[0]));
    assert_eq!(totals["smallest"], (bytes[1] + bytes[2]).min(bytes[0]));
    let human = site
        .run(&[&["plan", model, "-r", "1"], &flags[..]].concat())
        .stdout;
    assert!(human.contains("\ndraft of rank 1 (dp 0 pp 1 tp 0): "), "{human}");
}
