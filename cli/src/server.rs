//! `weightd server`: the serving process of a launcher. It never loads a device.

use crate::args::ServerArgs;
use crate::error::CliError;
use crate::signals::Signals;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, setsid};
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use tracing::{debug, info, warn};
use weightd_blocking::serve::{ServerProcess, serve};
use weightd_core::machine::{Limits, Origin, Server, ServerEvent};
use weightd_core::wire::message::DaemonId;

pub fn run(args: &ServerArgs) -> Result<ExitCode, CliError> {
    // Its own session: Ctrl-C and hang-up reach the launcher, which ends everything in order. It
    // fails only where this process leads a session already.
    let _ = setsid();
    raise_descriptor_limit();
    let signals = Signals::catch().map_err(CliError::failure)?;
    let control = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(CliError::failure)?;
    let process = ServerProcess {
        control,
        control_path: &args.control,
        version: env!("CARGO_PKG_VERSION"),
        limits: Limits::default(),
    };
    serve(process, &signals, log)
        .map_err(|error| CliError::failure(format!("the server cannot go on: {error}")))?;
    Ok(signals.exit_code())
}

/// Leases take a descriptor each; the soft limit is often 1024.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    ) {
        warn!("cannot raise the limit of open files: {error}");
    }
}

fn log(server: &Server<OwnedFd>, event: &ServerEvent) {
    // As the launcher calls it, and the operator.
    let name = |daemon: &DaemonId| match server.info(*daemon) {
        Some(info) => format!("rank {}", info.global_rank),
        None => format!("daemon {daemon}"),
    };
    match event {
        ServerEvent::Led { pid } => debug!("led by launcher {pid}"),
        ServerEvent::LeaderGone => warn!("the launcher is gone: serving on without it"),
        ServerEvent::Serving { daemon, generation } => {
            debug!("{}: holding generation {generation}", name(daemon))
        }
        ServerEvent::Sent {
            daemon,
            pid,
            generation,
            tensors,
            aliases,
        } => {
            info!(
                "{}: sent {tensors} tensors (+{aliases} aliases) of generation {generation} to pid {pid}",
                name(daemon)
            );
        }
        ServerEvent::Mismatched { daemon, pid, fields } => {
            warn!(
                "{}: mismatch with pid {pid} in {}",
                name(daemon),
                fields.join(", ")
            );
        }
        ServerEvent::Leased {
            daemon,
            pid,
            generation,
        } => {
            debug!("{}: pid {pid} leases generation {generation}", name(daemon));
        }
        ServerEvent::LeaseEnded {
            daemon,
            pid,
            generation,
        } => {
            debug!(
                "{}: pid {pid} ended its lease of generation {generation}",
                name(daemon)
            );
        }
        ServerEvent::Released { daemon, generation } => {
            info!("{}: released generation {generation}", name(daemon))
        }
        ServerEvent::ImportFailed { daemon, pid, why } => {
            warn!("{}: pid {pid} could not import: {why:?}", name(daemon));
        }
        // The launcher, which found that out, warns of it.
        ServerEvent::Lost { daemon, generation } => {
            debug!(
                "{}: daemon lost: generation {generation} is gone from its device",
                name(daemon)
            );
        }
        ServerEvent::Ended { origin, peer, why } => {
            let place = match origin {
                Origin::Daemon(daemon) => name(daemon),
                _ => "control socket".to_owned(),
            };
            warn!(
                "{place}: ended the connection of pid {} (uid {}): {why}",
                peer.pid, peer.uid
            );
        }
        ServerEvent::Stop { orphaned } => debug!("stopping (orphaned: {orphaned})"),
    }
}
