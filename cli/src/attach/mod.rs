//! `weightd attach`: an engine's stand-in.

mod hold;
mod report;
mod target;

use crate::args::{AttachArgs, VerifyArg};
use crate::devices::Finder;
use crate::error::CliError;
use crate::models::{Model, located, models};
use crate::node::{self, LocalRank};
use crate::output::say;
use crate::signals::Signals;
use report::Report;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::thread::sleep;
use std::time::{Duration, Instant};
use weightd_blocking::{Binding, Endpoint, LoadError, Loaded, Loader, digest};
use weightd_checkpoint::{Checkpoint, LoadOptions, Progress, Rank, scrub, verify};
use weightd_core::content::{Key, Role};
use weightd_core::machine::{AttachError, AttachOptions};
use weightd_core::time::Span;
use weightd_gpu::Weights;
use weightd_socket::credentials::our_uid;
use weightd_socket::dir::{DirError, SocketDir};

/// One rank that is mapped.
struct Mapped {
    rank: LocalRank,
    attached: Loaded<Weights>,
}

pub fn run(args: &AttachArgs) -> Result<ExitCode, CliError> {
    if let Some(dir) = &args.save {
        target::check(dir)?;
    }
    let model = chosen_model(args)?;
    let ranks: Vec<_> = model.members.iter().map(|(_, rank)| *rank).collect();
    let checkpoint = Arc::new(model.open()?);
    let dir = wait_for_dir(args)?;
    let mut identity = checkpoint.identity();
    if args.checkpoint_digest.is_some() {
        // Whatever the files are: they match by nothing else.
        identity.digest = args.checkpoint_digest;
        identity.files = None;
    }
    let digest = Arc::new(Digest {
        checkpoint: Arc::clone(&checkpoint),
        known: OnceLock::new(),
    });
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
        let key = model.key(&checkpoint, &identity, &rank)?;
        let attached = attach(args, &socket, &rank, key, &digest)?;
        mapped.push(Mapped { rank, attached });
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
        Some(signals) => hold::until_signal(&mapped, &signals, args.json),
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
    let global_rank = rank.placement.global_rank;
    let failed = |error: &dyn std::fmt::Display| CliError::Failure(format!("rank {global_rank}: {error}"));
    report.verified = match args.verify {
        None => None,
        Some(VerifyArg::Checkpoint) => {
            let (sharding, coordinates) = (&model.keys.sharding, Rank::of(&rank.placement));
            let verified = verify(checkpoint, sharding, coordinates, attached.model());
            Some(verified.map_err(|error| failed(&error))?.bytes)
        }
        Some(VerifyArg::Checksums) => Some(scrub(attached.model()).map_err(|error| failed(&error))?.bytes),
    };
    if let Some(dir) = &args.save {
        let path = weightd_checkpoint::save(attached.model(), &rank.placement, dir);
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
    let models = models(&located(&args.model)?, &ranks)?;
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

fn attach(
    args: &AttachArgs,
    socket: &Path,
    rank: &LocalRank,
    key: Key,
    digest: &Arc<Digest>,
) -> Result<Loaded<Weights>, CliError> {
    let options = AttachOptions {
        role: key.role,
        // Without patience, what would send an engine to its disk loader ends the command.
        fallback: args.wait == 0,
        state_timeout: Span::secs(args.wait),
        device: Some(rank.device.uuid()),
        ..AttachOptions::new(our_uid().map_err(CliError::failure)?)
    };
    let endpoint = Endpoint::socket(socket).map_err(CliError::usage)?;
    let digest = Arc::clone(digest);
    let loader = Loader::from(Binding::with(endpoint, options, key, move || digest.get()));
    let global_rank = rank.placement.global_rank;
    loader.attach().map_err(|error| {
        let patience = match &error {
            LoadError::Attach(AttachError::Unavailable { .. }) if args.wait == 0 => " (--wait SECONDS)",
            _ => "",
        };
        CliError::Failure(format!("rank {global_rank}: {error}{patience}"))
    })
}

/// What an engine would bring: its checkpoint's digest, computed once for all ranks.
struct Digest {
    checkpoint: Arc<Checkpoint>,
    known: OnceLock<[u8; 32]>,
}

impl Digest {
    fn get(&self) -> Result<[u8; 32], String> {
        if let Some(digest) = self.known.get() {
            return Ok(*digest);
        }
        tracing::info!(
            "whether these are the files that the daemon loaded cannot be told by their times: comparing digests \
             (--checkpoint-digest states one)"
        );
        let (how, progress) = (LoadOptions::default(), Progress::default());
        let digested = digest::digest(&self.checkpoint, &how, &progress);
        let digest = digested.map_err(|error| error.to_string())?.digest;
        Ok(*self.known.get_or_init(|| digest))
    }
}
