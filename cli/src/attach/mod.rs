//! `weightd attach`: an engine's stand-in.

mod hold;
mod report;

use crate::args::AttachArgs;
use crate::devices::Finder;
use crate::error::CliError;
use crate::models::{Model, models};
use crate::node::{self, LocalRank};
use crate::output::say;
use crate::signals::Signals;
use report::Report;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};
use weightd_blocking::client::{Attached, ClientError, Engine, attach};
use weightd_checkpoint::{Checkpoint, Rank};
use weightd_core::content::{CheckpointId, Role};
use weightd_core::machine::{AttachOptions, Fault};
use weightd_core::time::Span;
use weightd_gpu::Weights;
use weightd_socket::credentials::our_uid;
use weightd_socket::dir::{DirError, SocketDir};

/// One rank that is mapped.
struct Mapped {
    rank: LocalRank,
    /// Whose daemon is there.
    socket: PathBuf,
    attached: Attached,
}

pub fn run(args: &AttachArgs) -> Result<ExitCode, CliError> {
    let model = chosen_model(args)?;
    let ranks: Vec<_> = model.members.iter().map(|(_, rank)| *rank).collect();
    let checkpoint = model.open()?;
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
        let ranks_per_device = args.model.sharding.parallel.ranks_per_device;
        let socket = node::socket_of(dir.path(), &rank, model.role, ranks_per_device, &args.place)?;
        let attached = attach_rank(args, &model, &socket, &mut stand_in, &identity, &rank)?;
        mapped.push(Mapped {
            rank,
            socket,
            attached,
        });
    }
    let reports = mapped
        .iter()
        .map(|mapped| report(args, &model, &checkpoint, mapped))
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

fn report(
    args: &AttachArgs,
    model: &Model,
    checkpoint: &Checkpoint,
    mapped: &Mapped,
) -> Result<Report, CliError> {
    let Mapped { rank, attached, .. } = mapped;
    let mut report = Report::new(rank, attached);
    if args.verify {
        let (sharding, coordinates) = (&model.keys.sharding, Rank::of(&rank.placement));
        let verified = weightd_checkpoint::verify(checkpoint, sharding, coordinates, &attached.weights);
        let global_rank = rank.placement.global_rank;
        report.verified =
            Some(verified.map_err(|error| CliError::Failure(format!("rank {global_rank}: {error}")))?);
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

/// The model to map, with those of this node's ranks that are wanted.
fn chosen_model(args: &AttachArgs) -> Result<Model, CliError> {
    let ranks = node::local_ranks(
        &args.model.sharding.parallel,
        args.place.device,
        Finder::Ourselves,
    )?;
    let role = if args.draft { Role::Draft } else { Role::Target };
    let models = models(&args.model, &ranks)?;
    let model = models.into_iter().find(|model| model.role == role);
    let mut model = model.ok_or_else(|| {
        CliError::usage(
            "there is no draft to map: the method of --speculative-config has none that is cached",
        )
    })?;
    if model.members.is_empty() {
        return Err(CliError::Usage(format!(
            "no rank of this node has the {}: a draft is on the last pipeline stage, which is on another node",
            role.name()
        )));
    }
    if let Some(wanted) = args.ranks.rank {
        let global_rank = |rank: &LocalRank| rank.placement.global_rank;
        let here: Vec<_> = model
            .members
            .iter()
            .map(|(_, rank)| global_rank(rank).to_string())
            .collect();
        model.members.retain(|(_, rank)| global_rank(rank) == wanted);
        if model.members.is_empty() {
            let (here, role) = (here.join(", "), role.name());
            return Err(CliError::Usage(format!(
                "rank {wanted} of the {role} is not on this node, which has ranks {here}"
            )));
        }
    }
    Ok(model)
}

fn attach_rank(
    args: &AttachArgs,
    model: &Model,
    socket: &Path,
    stand_in: &mut StandIn<'_>,
    identity: &CheckpointId,
    rank: &LocalRank,
) -> Result<Attached, CliError> {
    let identity = CheckpointId {
        digest: stand_in.digest,
        ..identity.clone()
    };
    let key = model.key(stand_in.checkpoint, &identity, rank)?;
    let options = AttachOptions {
        role: model.role,
        // Without patience, what would send an engine to its disk loader ends the command.
        fallback: args.wait == 0,
        state_timeout: Span::secs(args.wait),
        device: Some(rank.device.uuid()),
        ..AttachOptions::new(our_uid().map_err(CliError::failure)?)
    };
    attach(socket, options, key, stand_in).map_err(|error| {
        let rank = rank.placement.global_rank;
        match error {
            ClientError::LoadFromDisk(why) => CliError::Failure(format!("rank {rank}: {why}")),
            other => CliError::Failure(format!("rank {rank}: {other}")),
        }
    })
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
