//! `weightd preload`: the launcher. It holds the vault, and keeps a server in front of it.

mod children;
mod daemons;
mod launcher;
mod probing;
mod recovery;

use crate::args::{DeviceArg, PreloadArgs};
use crate::devices::Finder;
use crate::error::CliError;
use crate::node;
use crate::signals::Signals;
use std::process::ExitCode;
use weightd_gpu::DeviceKind;

pub fn run(args: &PreloadArgs, log: &str) -> Result<ExitCode, CliError> {
    let signals = Signals::catch().map_err(CliError::failure)?;
    // Everything that can be refused is refused before anything is started.
    let ranks = node::local_ranks(&args.model.parallel, args.place.device, Finder::Child)?;
    let mut args = args.clone();
    // The loader takes what was found, whatever it would find itself.
    args.place.device = match ranks.first().map(|rank| rank.device.kind()) {
        Some(DeviceKind::Cuda) => DeviceArg::Cuda,
        _ => DeviceArg::Cpu,
    };
    let args = &args;
    let (checkpoint, _) = node::open_and_plan(&args.model, &ranks)?;
    let dir = node::create_dir(&args.place).map_err(CliError::failure)?;
    let identity = checkpoint.identity();
    let keys = ranks
        .iter()
        .map(|rank| node::key_of(&args.model, &checkpoint, &identity, &rank.placement))
        .collect::<Result<Vec<_>, _>>()?;
    drop(checkpoint);

    let daemons = daemons::claim(dir.path(), args, &ranks, keys)?;
    launcher::Launcher::start(args, log, dir.path(), daemons, signals)?.run()
}
