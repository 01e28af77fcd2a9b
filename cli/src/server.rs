//! `weightd server`: the serving process of a launcher. It never loads a device.

use crate::args::{RuntimeArg, ServerArgs};
use crate::confine::{Confined, confine};
use crate::error::CliError;
use crate::logs::pace::Pace;
use crate::logs::{DaemonName, about};
use crate::signals::Signals;
use rustix::process::{Resource, getrlimit, setsid};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;
use tracing::{debug, error, info, warn};
use weightd_blocking::serve::{ServerProcess, serve};
use weightd_core::content::Difference;
use weightd_core::machine::{Limits, Origin, Server, ServerEvent};
use weightd_core::wire::message::DaemonId;
use weightd_smol::Smol;
use weightd_socket::out_of_descriptors;
use weightd_tokio::Tokio;

/// What a server takes before its process has a second thread: those that are started before it is confined would not
/// be.
#[derive(Debug)]
pub struct Ground {
    signals: Signals,
    confined: Confined,
}

impl Ground {
    /// Takes it, and confines the process.
    pub fn take(args: &ServerArgs) -> Result<Ground, CliError> {
        // Its own session: Ctrl-C and hang-up reach the launcher, which ends everything in order. It
        // fails only where this process leads a session already.
        let _ = setsid();
        let signals = Signals::catch().map_err(CliError::failure)?;
        // Its sockets are beside the control socket.
        let dir = args.control.parent().unwrap_or(Path::new("/"));
        Ok(Ground {
            signals,
            confined: confine(dir),
        })
    }
}

pub fn run(args: &ServerArgs, ground: Ground) -> Result<ExitCode, CliError> {
    let Ground { signals, confined } = ground;
    let Confined {
        confinement,
        failures,
    } = confined;
    match failures.as_slice() {
        [] => info!("the server gave up what it does not need: {confinement}"),
        failures => warn!(
            "the server gave up what it does not need, as far as it can here: {confinement} ({})",
            failures.join("; ")
        ),
    }
    let control = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(CliError::failure)?;
    let process = ServerProcess {
        control,
        control_path: &args.control,
        version: env!("CARGO_PKG_VERSION"),
        limits: limits(),
        confinement,
    };
    let mut pace = Pace::new();
    let log =
        move |server: &Server<OwnedFd>, event: &ServerEvent| match pace.admit(Instant::now(), kind(event)) {
            None => {}
            Some(0) => log(server, event),
            Some(left_out) => {
                warn!("{left_out} lines like the next were left out: they came too fast");
                log(server, event);
            }
        };
    let served = match args.runtime {
        RuntimeArg::Blocking => serve(process, &signals, log),
        RuntimeArg::Tokio => {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            let runtime = builder.enable_io().enable_time().build();
            let runtime = runtime.map_err(CliError::failure)?;
            runtime.block_on(weightd_tokio::serve::<Tokio>(process, &signals, log))
        }
        RuntimeArg::Smol => smol::block_on(weightd_smol::serve::<Smol>(process, &signals, log)),
    };
    served.map_err(|error| {
        let advice = out_of_descriptors(&error);
        CliError::failure(format!("the server cannot go on: {error}{advice}"))
    })?;
    Ok(signals.exit_code())
}

/// A lease is a descriptor that is never taken back to make room, so there are no more of them than leave some.
fn limits() -> Limits {
    let Some(descriptors) = getrlimit(Resource::Nofile).current else {
        return Limits::default();
    };
    let limits = Limits::default().within(descriptors);
    if limits.leases < Limits::default().leases {
        let leases = limits.leases;
        warn!(
            "no more than {leases} leases: raise the limit of open files, which is {descriptors} (ulimit -n)"
        );
    }
    limits
}

/// Which lines have their pace in common. Clients cause one for each request or connection, if they like.
fn kind(event: &ServerEvent) -> (&'static str, Option<DaemonId>) {
    use ServerEvent as Event;
    let of = |origin: &Origin| match origin {
        Origin::Daemon(daemon) => Some(*daemon),
        _ => None,
    };
    match event {
        Event::Led { .. } | Event::LeaderGone | Event::Look | Event::CutOff | Event::Stop { .. } => {
            ("launcher", None)
        }
        Event::Sent { daemon, .. } => ("sent", Some(*daemon)),
        Event::Mismatched { daemon, .. } => ("mismatched", Some(*daemon)),
        Event::ImportFailed { daemon, .. } => ("import failed", Some(*daemon)),
        Event::Leased { daemon, .. } | Event::LeaseEnded { daemon, .. } => ("leases", Some(*daemon)),
        Event::Serving { daemon, .. }
        | Event::Published { daemon, .. }
        | Event::Released { daemon, .. }
        | Event::Lost { daemon, .. } => ("content", Some(*daemon)),
        Event::Ended { origin, .. } => ("ended", of(origin)),
        Event::Panicked { origin, .. } => ("panicked", of(origin)),
    }
}

fn log(server: &Server<OwnedFd>, event: &ServerEvent) {
    // As the launcher calls it, and the operator.
    let name = |daemon: &DaemonId| DaemonName::new(*daemon, server.info(*daemon));
    match event {
        ServerEvent::Led { pid } => debug!("led by launcher {pid}"),
        ServerEvent::LeaderGone => warn!("the launcher is gone: serving on without it"),
        ServerEvent::Look => debug!("looking whether anybody finds this server"),
        ServerEvent::CutOff => warn!(
            "ending: the launcher is gone, and somebody removed all sockets, so that nobody can find what is held here"
        ),
        ServerEvent::Serving { daemon, generation } => {
            about!(debug, name(daemon), "holding generation {generation}")
        }
        ServerEvent::Published {
            daemon,
            pid,
            generation,
            tensors,
            bytes,
        } => about!(
            info,
            name(daemon),
            "published by pid {pid}: serving generation {generation}, {tensors} tensors, {bytes} bytes"
        ),
        ServerEvent::Sent {
            daemon,
            pid,
            generation,
            tensors,
            aliases,
        } => about!(
            info,
            name(daemon),
            "sent {tensors} tensors (+{aliases} aliases) of generation {generation} to pid {pid}"
        ),
        ServerEvent::Mismatched { daemon, pid, fields } => {
            about!(
                warn,
                name(daemon),
                "mismatch with pid {pid} in {}",
                Difference::list(fields)
            );
        }
        ServerEvent::Leased {
            daemon,
            pid,
            generation,
        } => about!(debug, name(daemon), "pid {pid} leases generation {generation}"),
        ServerEvent::LeaseEnded {
            daemon,
            pid,
            generation,
        } => about!(
            debug,
            name(daemon),
            "pid {pid} ended its lease of generation {generation}"
        ),
        ServerEvent::Released { daemon, generation } => {
            about!(info, name(daemon), "released generation {generation}")
        }
        ServerEvent::ImportFailed { daemon, pid, why } => {
            about!(warn, name(daemon), "pid {pid} could not import: {why}");
        }
        // The launcher, which found that out, warns of it.
        ServerEvent::Lost { daemon, generation } => {
            about!(
                debug,
                name(daemon),
                "daemon lost: generation {generation} is gone from its device"
            );
        }
        ServerEvent::Ended { origin, peer, why } => {
            let (pid, uid) = (peer.pid, peer.uid);
            match origin {
                Origin::Daemon(daemon) => {
                    about!(
                        warn,
                        name(daemon),
                        "ended the connection of pid {pid} (uid {uid}): {why}"
                    );
                }
                _ => warn!("control socket: ended the connection of pid {pid} (uid {uid}): {why}"),
            }
        }
        ServerEvent::Panicked { origin, peer, why } => {
            let of = match origin {
                Origin::Daemon(daemon) => name(daemon).to_string(),
                _ => "control socket".to_owned(),
            };
            let (pid, uid) = (peer.pid, peer.uid);
            error!(
                "{of}: this is a bug in weightd, please report it: what pid {pid} (uid {uid}) said made its handling \
                 panic: {why}; its connection was ended, all else goes on"
            );
        }
        ServerEvent::Stop { orphaned } => debug!("stopping (orphaned: {orphaned})"),
    }
}
