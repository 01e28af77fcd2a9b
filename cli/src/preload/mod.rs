//! `weightd preload`: the launcher. It holds the vault, and keeps a server in front of it.

mod children;
mod daemons;
mod launcher;

use crate::args::PreloadArgs;
use crate::error::CliError;
use crate::node;
use crate::signals::Signals;
use std::process::ExitCode;
use weightd_checkpoint::{Checkpoint, NodePlan};
use weightd_core::content::HandleKind;
use weightd_socket::dir::SocketDir;

pub fn run(args: &PreloadArgs) -> Result<ExitCode, CliError> {
    let signals = Signals::catch().map_err(CliError::failure)?;
    let ranks = node::local_ranks(&args.model.parallel, args.place.device)?;
    // Everything that can be refused is refused before anything is started.
    let checkpoint = Checkpoint::open(&args.model.model).map_err(CliError::failure)?;
    let placed: Vec<_> = ranks
        .iter()
        .map(|rank| (rank.placement, rank.device.uuid()))
        .collect();
    NodePlan::new(
        &checkpoint,
        &node::parallel(&args.model.parallel),
        &placed,
        HandleKind::Memfd,
    )
    .map_err(CliError::failure)?;
    let dir = SocketDir::create(
        args.place.socket_dir.as_deref(),
        node::socket_dir_variable().as_deref(),
    )
    .map_err(CliError::failure)?;
    let identity = checkpoint.identity();
    let keys = ranks
        .iter()
        .map(|rank| node::key_of(&args.model, &checkpoint, &identity, &rank.placement))
        .collect::<Result<Vec<_>, _>>()?;
    drop(checkpoint);

    let daemons = daemons::claim(dir.path(), args, &ranks, keys)?;
    let launcher = launcher::Launcher::start(args, dir.path(), daemons, signals)?;
    launcher.run()
}
