//! `weightd preload`: the launcher. It holds the vault, and keeps a server in front of it.

mod adoption;
mod children;
mod daemons;
mod digests;
mod launcher;
mod manager;
mod names;
mod probing;
mod recovery;
mod store;
mod telling;

use crate::args::{DeviceArg, PreloadArgs};
use crate::devices::Finder;
use crate::error::CliError;
use crate::health;
use crate::models::{models, speculative};
use crate::node;
use crate::signals::Signals;
use crate::speculative::Speculative;
use adoption::Past;
use digests::{Digests, Halt};
use manager::Manager;
use std::io;
use std::process::ExitCode;
use store::Store;
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
    let kept = manager::kept();
    let mut store = Manager::from_env().map(|manager| Store::new(manager, &kept));
    let signals = Signals::catch().map_err(cannot("catch signals"))?;
    // Everything that can be refused is refused before anything is started.
    let ranks = node::local_ranks(&args.model.sharding.parallel, args.place.device, Finder::Child)?;
    let mut args = args.clone();
    // The loader takes what was found, whatever it would find itself.
    args.place.device = match ranks.first().map(|rank| rank.device.kind()) {
        Some(DeviceKind::Cuda) => DeviceArg::Cuda,
        _ => DeviceArg::Cpu,
    };
    let args = &args;
    if let Some(Speculative::NotCached(method)) = speculative(&args.model)? {
        info!(
            "the draft of speculative method {method} is not cached: only those of mtp, eagle and eagle3 are"
        );
    }
    let models = models(&args.model, &ranks)?;
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
    let health = health::start(args)?;
    let dir = node::create_dir(&args.place).map_err(CliError::failure)?;
    let mut members = Vec::new();
    for (model, checkpoint) in models.iter().zip(&opened) {
        let identity = checkpoint.identity();
        for (_, rank) in &model.members {
            members.push((*rank, model.key(checkpoint, &identity, rank)?));
        }
    }
    let wanted = daemons::wanted(dir.path(), args, members)?;
    let mut digests = Digests::new(&models, opened, &signals);
    let (daemons, past) = match adoption::begin(dir.path(), wanted, &mut digests, store.as_mut(), kept) {
        Ok(begun) => begun,
        Err(Halt::Signal) => return Ok(signals.exit_code()),
        Err(Halt::Error(error)) => return Err(error),
    };
    if matches!(past, Past::None) {
        // A loader may have to digest all files before it finds that out.
        weightd_gpu::check_room(regions).map_err(CliError::failure)?;
    }
    let launcher = launcher::Launcher::start(args, log, dir.path(), daemons, past, store, signals)?;
    if let Some(health) = health {
        health.answer(launcher.board());
    }
    launcher.run()
}
