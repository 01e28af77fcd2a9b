//! `weightd plan`: which ranks this node, or each node, serves and, of a model, what each of them would
//! hold.

mod model;
mod world;

use crate::args::{ModelArgs, PlanArgs};
use crate::devices::Finder;
use crate::error::CliError;
use crate::models::{located, models};
use crate::node::{self, LocalRank};
use crate::output::{json_text, say};
use model::ModelPlan;
use serde_json::{Value, json};
use std::process::ExitCode;
use world::{NodeRanks, World};

pub fn run(args: &PlanArgs) -> Result<ExitCode, CliError> {
    let parallel = &args.sharding.parallel;
    let ranks = node::local_ranks(parallel, args.place.device, Finder::Ourselves)?;
    let world = match args.all_nodes {
        true => World::whole(parallel, ranks)?,
        false => World::here(parallel, ranks),
    };
    let model = model_plan(args, &world)?;
    if args.json {
        say(json_text(&as_json(args, &world, model.as_ref())))?;
    } else {
        print(args, &world, model.as_ref())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What the ranks hold of target and draft.
fn model_plan(args: &PlanArgs, world: &World) -> Result<Option<ModelPlan>, CliError> {
    let Some(model) = args.model.clone() else {
        return Ok(None);
    };
    let model = located(&ModelArgs {
        model,
        weights: args.weights.clone(),
        sharding: args.sharding.clone(),
    })?;
    let nodes = world.nodes.iter().map(|node| models(&model, &node.ranks));
    let nodes = nodes.collect::<Result<Vec<_>, _>>()?;
    ModelPlan::new(&nodes).map(Some)
}

fn as_json(args: &PlanArgs, world: &World, model: Option<&ModelPlan>) -> Value {
    let mut answer = if args.all_nodes {
        let node = |node: &NodeRanks| {
            let placements: Vec<_> = node.ranks.iter().map(|rank| rank.placement).collect();
            json!({ "node_rank": node.node_rank, "here": node.here, "placements": placements })
        };
        let nodes: Vec<Value> = world.nodes.iter().map(node).collect();
        json!({ "nodes": nodes, "complete": world.complete })
    } else {
        let ranks = world.nodes.iter().flat_map(|node| &node.ranks);
        json!({ "placements": ranks.map(placement).collect::<Vec<_>>() })
    };
    if let Some(model) = model {
        answer["ranks"] = model.ranks_json().into();
        answer["totals"] = model.totals_json();
    }
    answer
}

fn placement(rank: &LocalRank) -> Value {
    let p = &rank.placement;
    json!({
        "local_rank": p.local_rank,
        "global_rank": p.global_rank,
        "dp_rank": p.dp_rank,
        "pp_rank": p.pp_rank,
        "tp_rank": p.tp_rank,
    })
}

fn print(args: &PlanArgs, world: &World, model: Option<&ModelPlan>) -> Result<(), CliError> {
    let of_node = |column: String| if args.all_nodes { column } else { String::new() };
    say(format_args!(
        "{}local global   dp   pp   tp  device",
        of_node("node ".to_owned())
    ))?;
    for node in &world.nodes {
        for rank in &node.ranks {
            let p = rank.placement;
            // Nobody here can ask another node for its devices.
            let device = match node.here {
                true => rank.device.to_string(),
                false => format!("device {}", p.device),
            };
            say(format_args!(
                "{}{:>5} {:>6} {:>4} {:>4} {:>4}  {device}",
                of_node(format!("{:>4} ", node.node_rank)),
                p.local_rank,
                p.global_rank,
                p.dp_rank,
                p.pp_rank,
                p.tp_rank,
            ))?;
        }
    }
    if args.all_nodes && !world.complete {
        say(
            "this node alone: its --data-parallel-size-local does not fill the world evenly, so that other launchers \
             have flags of their own; ask for their plans with those",
        )?;
    }
    match model {
        Some(model) => model.say(),
        None => Ok(()),
    }
}
