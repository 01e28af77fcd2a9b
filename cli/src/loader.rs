//! `weightd loader`: reads the checkpoint for all ranks of a node, hands the regions over, and ends.

use crate::args::LoaderArgs;
use crate::devices::Finder;
use crate::error::CliError;
use crate::models::{Model, models};
use crate::node::{self, LocalRank};
use rustix::process::{setpriority_process, setsid};
use std::io;
use std::num::NonZero;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use tracing::debug;
use weightd_blocking::channel::Channel;
use weightd_blocking::digest;
use weightd_checkpoint::{
    Checkpoint, DigestAlong, LoadOptions, Loaded, LoadedRank, NodePlan, Progress, load,
};
use weightd_core::content::Key;
use weightd_core::machine::HandoverEvent;
use weightd_core::wire::message::{self, ContentInfo, DaemonId, Digest, Expects, Publish};
use weightd_gpu::{Device, LaneMemory, Opened};

/// How often the launcher is told how far the loading is, and asked whether it is still there.
const REPORT_EVERY: Duration = Duration::from_millis(200);
/// The priority of what may wait for everything else.
const NICEST: i32 = 19;

pub fn run(args: &LoaderArgs) -> Result<ExitCode, CliError> {
    // Its own session: Ctrl-C and hang-up reach the launcher, which ends everything in order. It
    // fails only where this process leads a session already.
    let _ = setsid();
    let channel = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(CliError::failure)?;
    let mut channel = Channel::new(channel).map_err(CliError::failure)?;
    match load_and_publish(args, &mut channel) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        // The launcher says it, on the one line that the operator reads.
        Err(error) => {
            channel.machine_mut().failed(error.to_string());
            let _ = channel.settle();
            Ok(error.exit_code())
        }
    }
}

fn load_and_publish(args: &LoaderArgs, channel: &mut Channel) -> Result<(), CliError> {
    if let Some(files) = &args.digest_only {
        return digest_alone(args, files, channel);
    }
    let mut without_digest = Vec::new();
    for model in chosen(args)? {
        let checkpoint = model.open()?;
        if !load_model(&model, &checkpoint, args.checksums, channel)? {
            without_digest.push((model, checkpoint));
        }
    }
    // Engines whose files are other ones than these are compared by digest; serving does not wait.
    for (model, checkpoint) in without_digest {
        let digest = digest_beside(&checkpoint, channel)?;
        for (daemon, _) in model.members {
            channel.machine_mut().digest(Digest { daemon, digest });
        }
    }
    check(channel.settle().map_err(CliError::failure)?)
}

/// Loads a model for its members and hands it over; false where its digest is yet to be computed.
fn load_model(
    model: &Model,
    checkpoint: &Checkpoint,
    checksums: bool,
    channel: &mut Channel,
) -> Result<bool, CliError> {
    let plan = model.plan(&model.sharding(checkpoint)?)?;
    let mut identity = checkpoint.identity();
    identity.digest = digest::known(&identity);
    let digest = match (identity.files, identity.digest) {
        // Where a file may change and its times not say so, the bytes that are loaded must.
        (None, _) => DigestAlong::Always,
        (Some(_), None) => DigestAlong::WhereFree,
        (Some(_), Some(_)) => DigestAlong::Never,
    };
    let options = LoadOptions {
        digest,
        checksums,
        ..LoadOptions::of(model.members[0].1.device.kind())
    };
    let loaded = load_reporting(checkpoint, &plan, &model.members, &options, channel)?;
    if let Some(digest) = loaded.digest {
        digest::remember(&identity, &digest);
        identity.digest = Some(digest);
    }
    // The launcher says it, with whatever else it says.
    for told in told(model, &loaded) {
        channel.machine_mut().loaded(told);
    }
    for ((daemon, rank), loaded) in model.members.iter().zip(loaded.ranks) {
        publish(channel, *daemon, model.key(checkpoint, &identity, rank)?, loaded)?;
    }
    Ok(identity.digest.is_some())
}

/// The digest, computed beside whatever else this machine does: engines run by now.
fn digest_beside(checkpoint: &Checkpoint, channel: &mut Channel) -> Result<[u8; 32], CliError> {
    // Threads that are started from here on are as nice.
    if let Err(error) = setpriority_process(None, NICEST) {
        debug!("cannot lower the priority of the digest: {error}");
    }
    let all = LoadOptions::default();
    let half = NonZero::new(all.workers.get() / 2).unwrap_or(NonZero::<usize>::MIN);
    let options = LoadOptions {
        workers: half,
        cold_workers: half,
        ..all
    };
    let work = || digest::digest(checkpoint, &options, &Progress::default());
    let digested = while_led(channel, |_| {}, work)?.map_err(CliError::failure)?;
    Ok(digested.digest)
}

/// Makes up for a digest that an earlier loader did not come to hand over.
fn digest_alone(args: &LoaderArgs, files: &[u8; 32], channel: &mut Channel) -> Result<(), CliError> {
    // All daemons that are named hold the same files.
    let models = chosen(args)?;
    let model = models
        .first()
        .ok_or_else(|| CliError::usage("no daemon to hand a digest over for"))?;
    let checkpoint = model.open()?;
    let found = checkpoint.identity().files;
    // The digest of other files would pass the weights that are held off as those of another
    // checkpoint.
    if found.as_ref() != Some(files) {
        return Err(CliError::Failure(format!(
            "{} changed since it was loaded: preload again to serve what is there now",
            model.path.display()
        )));
    }
    let digest = digest_beside(&checkpoint, channel)?;
    for &daemon in &args.daemons {
        channel.machine_mut().digest(Digest { daemon, digest });
    }
    check(channel.settle().map_err(CliError::failure)?)
}

/// The models to load, each with the daemons to load it for.
fn chosen(args: &LoaderArgs) -> Result<Vec<Model>, CliError> {
    let ranks = node::local_ranks(&args.model.sharding.parallel, args.device, Finder::Ourselves)?;
    let models = models(&args.model, &ranks)?;
    let count = models.iter().map(|model| model.members.len()).sum::<usize>();
    if let Some(daemon) = args.daemons.iter().find(|daemon| **daemon as usize >= count) {
        return Err(CliError::Usage(format!(
            "there is no daemon {daemon} on this node, which has {count}"
        )));
    }
    let wanted = |daemon: DaemonId| args.daemons.is_empty() || args.daemons.contains(&daemon);
    let models = models.into_iter().map(|model| model.with_only(wanted));
    Ok(models.filter(|model| !model.members.is_empty()).collect())
}

/// Loads, and meanwhile tells the launcher how far it is.
fn load_reporting(
    checkpoint: &Checkpoint,
    plan: &NodePlan,
    members: &[(DaemonId, LocalRank)],
    options: &LoadOptions,
    channel: &mut Channel,
) -> Result<Loaded, CliError> {
    let devices: Vec<_> = members.iter().map(|(_, rank)| rank.device).collect();
    let progress = Progress::new(plan);
    let tell = |channel: &mut Channel| {
        for (&(daemon, _), (done, total)) in members.iter().zip(progress.ranks()) {
            let progress = message::Progress { daemon, done, total };
            channel.machine_mut().progress(progress);
        }
    };
    let work = || {
        let (_opened, memory) = ready(&devices, options)?;
        load(checkpoint, plan, &devices, options, Some(memory), &progress).map_err(CliError::failure)
    };
    while_led(channel, tell, work)?
}

/// Starts the devices, each in a thread of its own: it takes a tenth of a second. Meanwhile the memory
/// to read into is made.
fn ready(devices: &[Device], options: &LoadOptions) -> Result<(Vec<Opened>, LaneMemory), CliError> {
    thread::scope(|scope| {
        let open = |device: &Device| {
            let device = *device;
            thread::Builder::new().spawn_scoped(scope, move || device.open())
        };
        let opening = devices
            .iter()
            .map(open)
            .collect::<io::Result<Vec<_>>>()
            .map_err(CliError::failure)?;
        let memory = options.prepare(devices[0].kind()).map_err(CliError::failure)?;
        let opened = opening.into_iter().map(|opening| {
            let panicked = |_| CliError::failure("opening a device panicked; this is a bug in weightd");
            opening.join().map_err(panicked)?.map_err(CliError::failure)
        });
        Ok((opened.collect::<Result<_, _>>()?, memory))
    })
}

/// Works for as long as the launcher is there, and tells it something every now and then. The
/// loader ends when its launcher does; nothing of it stays, since nobody else knows what it has.
fn while_led<T: Send>(
    channel: &mut Channel,
    mut tell: impl FnMut(&mut Channel),
    work: impl FnOnce() -> T + Send,
) -> Result<T, CliError> {
    let done = AtomicBool::new(false);
    let main = thread::current();
    thread::scope(|scope| {
        let working = scope.spawn(|| {
            let result = work();
            done.store(true, Ordering::Release);
            main.unpark();
            result
        });
        while !done.load(Ordering::Acquire) && !working.is_finished() {
            tell(channel);
            if let Err(error) = check(channel.turn()) {
                debug!("{error}");
                std::process::exit(1);
            }
            thread::park_timeout(REPORT_EVERY);
        }
        working
            .join()
            .map_err(|_| CliError::failure("the loading thread panicked; this is a bug in weightd"))
    })
}

/// How the weights of each member were read.
fn told(model: &Model, loaded: &Loaded) -> impl Iterator<Item = message::Loaded> {
    let stats = &loaded.stats;
    let ranks = loaded.ranks.iter();
    model
        .members
        .iter()
        .zip(ranks)
        .map(|((daemon, _), rank)| message::Loaded {
            daemon: *daemon,
            checkpoint: model.path.display().to_string(),
            tensors: rank.manifest.tensors().len() as u32,
            bytes: rank.region.bytes,
            buffered: stats.path.buffered,
            direct: stats.path.direct,
            daemons: loaded.ranks.len() as u32,
            micros: u64::try_from(stats.duration.as_micros()).unwrap_or(u64::MAX),
            path: stats.path.to_string(),
        })
}

fn publish(channel: &mut Channel, daemon: DaemonId, key: Key, rank: LoadedRank) -> Result<(), CliError> {
    let encoded = rank.manifest.encode();
    let manifest = weightd_gpu::sealed(&encoded).map_err(CliError::failure)?;
    let content = ContentInfo::of(&rank.manifest, encoded.len());
    let publication = Publish {
        daemon,
        generation: None,
        expects: Expects::Empty,
        key,
        content,
    };
    channel
        .machine_mut()
        .publish(publication, vec![manifest, rank.region.fd]);
    check(channel.settle().map_err(CliError::failure)?)
}

fn check(events: Vec<HandoverEvent>) -> Result<(), CliError> {
    for event in events {
        match event {
            HandoverEvent::Published { daemon, generation } => {
                debug!("daemon {daemon}: published generation {generation}");
            }
            HandoverEvent::Refused { daemon, why } => {
                return Err(CliError::Failure(format!(
                    "daemon {daemon}: the launcher refused the weights: {why}"
                )));
            }
            HandoverEvent::Gone { why } => {
                return Err(CliError::Failure(format!("the launcher is gone: {why}")));
            }
        }
    }
    Ok(())
}
