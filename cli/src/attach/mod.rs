//! `weightd attach`: an engine's stand-in.

mod hold;
mod report;

use crate::args::AttachArgs;
use crate::devices::Finder;
use crate::error::CliError;
use crate::node::{self, LocalRank};
use crate::output::say;
use crate::signals::Signals;
use report::Report;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};
use weightd_blocking::client::{Attached, ClientError, Engine, attach};
use weightd_checkpoint::Checkpoint;
use weightd_core::content::CheckpointId;
use weightd_core::machine::{AttachOptions, Fault};
use weightd_core::time::Span;
use weightd_gpu::Weights;
use weightd_socket::credentials::our_uid;
use weightd_socket::dir::{DirError, SocketDir};

/// One rank that is mapped.
struct Mapped {
    rank: LocalRank,
    attached: Attached,
}

pub fn run(args: &AttachArgs) -> Result<ExitCode, CliError> {
    let ranks = chosen_ranks(args)?;
    let checkpoint = Checkpoint::open(&args.model.model).map_err(CliError::failure)?;
    let dir = wait_for_dir(args)?;
    let identity = checkpoint.identity();
    let mut stand_in = StandIn {
        checkpoint: &checkpoint,
        digest: None,
    };
    // An engine has its device open before it loads; so the time to map is that alone.
    let opened = ranks
        .iter()
        .map(|rank| rank.device.open())
        .collect::<Result<Vec<_>, _>>();
    let _opened = opened.map_err(CliError::failure)?;
    let mut mapped = Vec::with_capacity(ranks.len());
    for rank in ranks {
        let attached = attach_rank(args, &dir, &mut stand_in, &identity, &rank)?;
        mapped.push(Mapped { rank, attached });
    }
    let reports = mapped
        .iter()
        .map(|mapped| report(args, &checkpoint, mapped))
        .collect::<Result<Vec<_>, _>>()?;
    // From the first line on a signal ends what that line says; until then, just this process.
    let signals = args
        .hold
        .then(Signals::catch)
        .transpose()
        .map_err(CliError::failure)?;
    for report in reports {
        say(report.line(args.json))?;
    }
    match signals {
        Some(signals) => hold::until_signal(mapped, &signals, args.json),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn report(args: &AttachArgs, checkpoint: &Checkpoint, mapped: &Mapped) -> Result<Report, CliError> {
    let Mapped { rank, attached } = mapped;
    let mut report = Report::new(rank, attached);
    if args.verify {
        report.verified = Some(verify(args, checkpoint, rank, &attached.weights)?);
    }
    if let Some(dir) = &args.save {
        let path = weightd_checkpoint::save(&attached.weights, &rank.placement, dir);
        report.saved = Some(path.map_err(CliError::failure)?);
    }
    Ok(report)
}

/// The socket directory; with patience, also one that a launcher has yet to make.
fn wait_for_dir(args: &AttachArgs) -> Result<SocketDir, CliError> {
    let until = Instant::now() + Duration::from_secs(args.wait);
    loop {
        match node::open_dir(&args.place) {
            Err(DirError::Absent { .. }) if Instant::now() < until => sleep(Duration::from_millis(100)),
            result => return result.map_err(CliError::failure),
        }
    }
}

fn chosen_ranks(args: &AttachArgs) -> Result<Vec<LocalRank>, CliError> {
    let mut ranks = node::local_ranks(&args.model.parallel, args.place.device, Finder::Ourselves)?;
    if let Some(wanted) = args.ranks.rank {
        let here: Vec<_> = ranks
            .iter()
            .map(|rank| rank.placement.global_rank.to_string())
            .collect();
        ranks.retain(|rank| rank.placement.global_rank == wanted);
        if ranks.is_empty() {
            let here = here.join(", ");
            return Err(CliError::Usage(format!(
                "rank {wanted} is not on this node, which has ranks {here}"
            )));
        }
    }
    Ok(ranks)
}

fn attach_rank(
    args: &AttachArgs,
    dir: &SocketDir,
    stand_in: &mut StandIn<'_>,
    identity: &CheckpointId,
    rank: &LocalRank,
) -> Result<Attached, CliError> {
    let socket = node::socket_of(
        dir.path(),
        rank,
        args.model.parallel.ranks_per_device,
        &args.place,
    )?;
    let identity = CheckpointId {
        digest: stand_in.digest,
        ..identity.clone()
    };
    let key = node::key_of(&args.model, stand_in.checkpoint, &identity, &rank.placement)?;
    let options = AttachOptions {
        // Without patience, what would send an engine to its disk loader ends the command.
        fallback: args.wait == 0,
        state_timeout: Span::secs(args.wait),
        device: Some(rank.device.uuid()),
        ..AttachOptions::new(our_uid().map_err(CliError::failure)?)
    };
    attach(&socket, options, key, stand_in).map_err(|error| {
        let rank = rank.placement.global_rank;
        match error {
            ClientError::LoadFromDisk(why) => CliError::Failure(format!("rank {rank}: {why}")),
            other => CliError::Failure(format!("rank {rank}: {other}")),
        }
    })
}

fn verify(
    args: &AttachArgs,
    checkpoint: &Checkpoint,
    rank: &LocalRank,
    weights: &Weights,
) -> Result<weightd_checkpoint::Verified, CliError> {
    let parallel = node::parallel(&args.model.parallel);
    weightd_checkpoint::verify(checkpoint, &parallel, rank.placement.tp_rank, weights)
        .map_err(|error| CliError::Failure(format!("rank {}: {error}", rank.placement.global_rank)))
}

/// What an engine would bring: its checkpoint, for the digest.
struct StandIn<'a> {
    checkpoint: &'a Checkpoint,
    /// Computed once for all ranks.
    digest: Option<[u8; 32]>,
}

impl Engine for StandIn<'_> {
    fn digest(&mut self) -> Result<[u8; 32], String> {
        if let Some(digest) = self.digest {
            return Ok(digest);
        }
        tracing::info!(
            "whether these are the files that the daemon loaded cannot be told by their times: comparing digests"
        );
        let digest = self.checkpoint.digest(None).map_err(|error| error.to_string())?;
        self.digest = Some(digest);
        Ok(digest)
    }

    fn copy(&mut self, _weights: &Weights) -> Result<(), Fault> {
        Err(Fault::Other("weightd attach maps and never copies".to_owned()))
    }
}
