//! `weightd server`: the serving process of a launcher. It never loads a device.

use crate::args::ServerArgs;
use crate::error::CliError;
use crate::signals::Signals;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, setsid};
use std::os::fd::AsFd;
use std::process::ExitCode;
use tracing::{debug, info, warn};
use weightd_blocking::serve::{ServerProcess, serve};
use weightd_core::machine::{Limits, ServerEvent};

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

fn log(event: &ServerEvent) {
    match event {
        ServerEvent::Led { pid } => debug!("led by launcher {pid}"),
        ServerEvent::LeaderGone => warn!("the launcher is gone: serving on without it"),
        ServerEvent::Serving { daemon, generation } => {
            debug!("daemon {daemon}: holding generation {generation}")
        }
        ServerEvent::Sent {
            daemon,
            pid,
            generation,
            tensors,
            aliases,
        } => {
            info!(
                "daemon {daemon}: sent {tensors} tensors (+{aliases} aliases) of generation {generation} to pid {pid}"
            );
        }
        ServerEvent::Mismatched { daemon, pid, fields } => {
            warn!(
                "daemon {daemon}: mismatch with pid {pid} in {}",
                fields.join(", ")
            );
        }
        ServerEvent::Leased {
            daemon,
            pid,
            generation,
        } => {
            debug!("daemon {daemon}: pid {pid} leases generation {generation}");
        }
        ServerEvent::LeaseEnded {
            daemon,
            pid,
            generation,
        } => {
            debug!("daemon {daemon}: pid {pid} ended its lease of generation {generation}");
        }
        ServerEvent::Released { daemon, generation } => {
            info!("daemon {daemon}: released generation {generation}")
        }
        ServerEvent::ImportFailed { daemon, pid, why } => {
            warn!("daemon {daemon}: pid {pid} could not import: {why}");
        }
        ServerEvent::Ended { origin, peer, why } => {
            warn!(
                "{origin:?}: ended the connection of pid {} (uid {}): {why}",
                peer.pid, peer.uid
            );
        }
        ServerEvent::Stop { orphaned } => debug!("stopping (orphaned: {orphaned})"),
    }
}
