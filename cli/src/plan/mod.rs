//! `weightd plan`: which ranks this node serves.

use crate::args::PlanArgs;
use crate::devices::Finder;
use crate::error::CliError;
use crate::node;
use crate::output::say;
use std::process::ExitCode;

pub fn run(args: &PlanArgs) -> Result<ExitCode, CliError> {
    let ranks = node::local_ranks(&args.parallel, args.place.device, Finder::Ourselves)?;
    if args.json {
        let placements: Vec<_> = ranks
            .iter()
            .map(|rank| {
                let p = &rank.placement;
                serde_json::json!({
                    "local_rank": p.local_rank,
                    "global_rank": p.global_rank,
                    "dp_rank": p.dp_rank,
                    "pp_rank": p.pp_rank,
                    "tp_rank": p.tp_rank,
                })
            })
            .collect();
        say(serde_json::json!({ "placements": placements }))?;
    } else {
        say("local global   dp   pp   tp  device")?;
        for rank in ranks {
            let p = rank.placement;
            say(format_args!(
                "{:>5} {:>6} {:>4} {:>4} {:>4}  {}",
                p.local_rank, p.global_rank, p.dp_rank, p.pp_rank, p.tp_rank, rank.device
            ))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
