//! `weightd plan`: which ranks this node serves and, of a model, what each of them would hold.

mod model;

use crate::args::PlanArgs;
use crate::devices::Finder;
use crate::error::CliError;
use crate::node::{self, LocalRank};
use crate::output::say;
use model::ModelPlan;
use serde_json::{Value, json};
use std::process::ExitCode;

pub fn run(args: &PlanArgs) -> Result<ExitCode, CliError> {
    let ranks = node::local_ranks(&args.sharding.parallel, args.place.device, Finder::Ourselves)?;
    let sharding = node::sharding(&args.sharding)?;
    let model = match &args.model {
        Some(model) => Some(ModelPlan::new(model, &sharding, &ranks)?),
        None => None,
    };
    if args.json {
        let placements: Vec<Value> = ranks.iter().map(placement).collect();
        let mut answer = json!({ "placements": placements });
        if let Some(model) = model {
            answer["ranks"] = model.ranks_json().into();
            answer["totals"] = model.totals_json();
        }
        say(answer)?;
        return Ok(ExitCode::SUCCESS);
    }
    say("local global   dp   pp   tp  device")?;
    for rank in ranks {
        let p = rank.placement;
        say(format_args!(
            "{:>5} {:>6} {:>4} {:>4} {:>4}  {}",
            p.local_rank, p.global_rank, p.dp_rank, p.pp_rank, p.tp_rank, rank.device
        ))?;
    }
    if let Some(model) = model {
        model.say()?;
    }
    Ok(ExitCode::SUCCESS)
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
