//! `weightd serve`: a launcher without a checkpoint. Its daemons serve what engines publish, each for its place.

use super::launching::Ground;
use super::setup::{Setup, Source};
use super::{daemons, launching};
use crate::args::{ReplaceArg, ServeArgs};
use crate::devices::Finder;
use crate::error::CliError;
use crate::health;
use crate::node::{self, LocalRank};
use std::process::ExitCode;
use weightd_core::content::{CheckpointId, Key, Role};
use weightd_core::plan::placement::Parallel;
use weightd_core::wire::message::Replace;

pub fn run(args: &ServeArgs, log: &str) -> Result<ExitCode, CliError> {
    let ground = Ground::take()?;
    let replace = match args.replace {
        ReplaceArg::Keep => Replace::Keep,
        ReplaceArg::DropFirst if args.launcher.no_release => {
            return Err(CliError::usage(
                "with --replace drop-first a publisher has the old weights released, which --no-release refuses: \
                 leave one of them out",
            ));
        }
        ReplaceArg::DropFirst => Replace::DropFirst,
    };
    let ranks = node::local_ranks(
        &args.parallel,
        args.launcher.place.device,
        Finder::Child(&ground.signals),
    )?;
    let health = health::start(&args.launcher)?;
    let dir = node::create_dir(&args.launcher.place).map_err(CliError::failure)?;
    let setup = Setup {
        source: Source::Publishers {
            parallel: Box::new(args.parallel.clone()),
            replace,
        },
        told: args.launcher.clone(),
        dir: dir.path().to_owned(),
        log: log.to_owned(),
    };
    let wanted = daemons::wanted(
        &setup,
        members(&node::parallel(&args.parallel), &ranks, args.draft),
    )?;
    launching::launch(ground, setup, wanted, (&[], Vec::new()), || Ok(()), health)
}

/// The ranks of the target, then those of the draft, each with the key of its place.
fn members(parallel: &Parallel, ranks: &[LocalRank], draft: bool) -> Vec<(LocalRank, Key)> {
    let target = ranks
        .iter()
        .map(|rank| (*rank, place(parallel, rank, Role::Target)));
    // Engines draft where they have the target's output, and keep the draft whole there.
    let last = parallel.pipeline.saturating_sub(1);
    let drafting = ranks
        .iter()
        .filter(|rank| draft && rank.placement.pp_rank == last);
    let whole = Parallel {
        pipeline: 1,
        ..*parallel
    };
    let draft = drafting.map(|rank| (*rank, place(&whole, rank, Role::Draft)));
    target.chain(draft).collect()
}

/// What of a key is known before anybody publishes.
fn place(parallel: &Parallel, rank: &LocalRank, role: Role) -> Key {
    let placement = &rank.placement;
    Key {
        checkpoint: CheckpointId {
            bytes: 0,
            files: None,
            digest: None,
        },
        model_arch: String::new(),
        tp_size: parallel.tensor,
        tp_rank: placement.tp_rank,
        dtype: String::new(),
        quantization: String::new(),
        quant_config_hash: None,
        revision: String::new(),
        engine_version: String::new(),
        pp_size: parallel.pipeline,
        pp_rank: if parallel.pipeline == 1 {
            0
        } else {
            placement.pp_rank
        },
        role,
        dp_size: parallel.data,
        dp_rank: placement.dp_rank,
        enable_expert_parallel: false,
        expert_placement_strategy: String::new(),
        layout: String::new(),
        processing: String::new(),
        extra: Default::default(),
    }
}
