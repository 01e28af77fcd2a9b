//! `weightd preload`: the launcher. It holds the vault, and keeps a server in front of it.

mod children;
mod daemons;
mod launcher;
mod probing;
mod recovery;

use crate::args::{DeviceArg, PreloadArgs};
use crate::devices::Finder;
use crate::error::CliError;
use crate::models::{models, speculative};
use crate::node;
use crate::signals::Signals;
use crate::speculative::Speculative;
use std::process::ExitCode;
use tracing::info;
use weightd_gpu::DeviceKind;

pub fn run(args: &PreloadArgs, log: &str) -> Result<ExitCode, CliError> {
    let signals = Signals::catch().map_err(CliError::failure)?;
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
    for model in &models {
        let checkpoint = model.open()?;
        model.plan(&checkpoint)?;
        opened.push((model, checkpoint));
    }
    let dir = node::create_dir(&args.place).map_err(CliError::failure)?;
    let mut members = Vec::new();
    for (model, checkpoint) in opened {
        let identity = checkpoint.identity();
        for (_, rank) in &model.members {
            members.push((*rank, model.key(&checkpoint, &identity, rank)?));
        }
    }
    let daemons = daemons::claim(dir.path(), args, members)?;
    launcher::Launcher::start(args, log, dir.path(), daemons, signals)?.run()
}
