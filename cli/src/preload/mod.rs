//! `weightd preload`: a launcher. It holds the vault, and keeps a server in front of it. `weightd serve` is one
//! that loads nothing.

mod adoption;
mod children;
mod daemons;
mod digests;
mod ending;
mod launcher;
mod launching;
mod manager;
mod names;
mod probing;
mod recovery;
pub mod serve;
mod setup;
mod store;
mod telling;

use crate::args::{DeviceArg, PreloadArgs};
use crate::devices::Finder;
use crate::error::CliError;
use crate::health;
use crate::models::{located, models, speculative};
use crate::node;
use crate::speculative::Speculative;
use launching::Ground;
use setup::{Setup, Source};
use std::io;
use std::process::ExitCode;
use tracing::info;
use weightd_core::content::Role;
use weightd_gpu::DeviceKind;
use weightd_socket::out_of_descriptors;

/// For `map_err`: the failure of a call that takes a descriptor says what was tried, and what to do where there
/// is none left.
fn cannot(doing: &'static str) -> impl Fn(io::Error) -> CliError {
    move |error| {
        let advice = out_of_descriptors(&error);
        CliError::Failure(format!("cannot {doing}: {error}{advice}"))
    }
}

pub fn run(args: &PreloadArgs, log: &str) -> Result<ExitCode, CliError> {
    let ground = Ground::take()?;
    // Everything that can be refused is refused before anything is started.
    let asked = located(&args.model)?;
    let parallel = &asked.sharding.parallel;
    let ranks = node::local_ranks(
        parallel,
        args.launcher.place.device,
        Finder::Child(&ground.signals),
    )?;
    let mut told = args.launcher.clone();
    // The loader takes what was found, whatever it would find itself.
    told.place.device = match ranks.first().map(|rank| rank.device.kind()) {
        Some(DeviceKind::Cuda) => DeviceArg::Cuda,
        _ => DeviceArg::Cpu,
    };
    if let Some(Speculative::NotCached(method)) = speculative(&asked)? {
        info!(
            "the draft of speculative method {method} is not cached: only those of mtp, eagle and eagle3 are"
        );
    }
    let models = models(&asked, &ranks)?;
    let mut opened = Vec::with_capacity(models.len());
    let mut regions = Vec::new();
    for model in &models {
        let checkpoint = model.open()?;
        let sharding = model.sharding(&checkpoint)?;
        let plan = model.plan(&sharding)?;
        let devices = model.members.iter().map(|(_, rank)| rank.device);
        regions.extend(devices.zip(plan.ranks().iter().map(|rank| rank.region_bytes)));
        if sharding.left_out() > 0 && model.role == Role::Target {
            let count = sharding.left_out();
            info!(
                "{count} tensors are of layers beyond num_hidden_layers, which only a draft of method mtp has"
            );
        }
        opened.push(checkpoint);
    }
    let health = health::start(&told)?;
    let dir = node::create_dir(&told.place).map_err(CliError::failure)?;
    let mut members = Vec::new();
    for (model, checkpoint) in models.iter().zip(&opened) {
        let identity = checkpoint.identity();
        for (_, rank) in &model.members {
            members.push((*rank, model.key(checkpoint, &identity, rank)?));
        }
    }
    let setup = Setup {
        source: Source::Checkpoint {
            model: Box::new(asked),
            checksums: args.checksums,
        },
        told,
        dir: dir.path().to_owned(),
        log: log.to_owned(),
    };
    let wanted = daemons::wanted(&setup, members)?;
    // Said before anything is started.
    let has_room = || weightd_gpu::check_room(regions).map_err(CliError::failure);
    launching::launch(ground, setup, wanted, (&models, opened), has_room, health)
}
