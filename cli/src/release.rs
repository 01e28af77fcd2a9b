//! `weightd release`: asks a daemon to let its weights go.

use crate::args::ReleaseArgs;
use crate::error::CliError;
use crate::output::say;
use crate::status::{Found, find};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};
use weightd_blocking::request::request;
use weightd_core::content::Generation;
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{DaemonStatus, Holds, Release};

/// The last close of a large region can take seconds.
const RELEASES_WITHIN: Span = Span::secs(60);
const SERVED_AGAIN_WITHIN: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(20);

pub fn run(args: &ReleaseArgs) -> Result<ExitCode, CliError> {
    let generation: Option<Generation> = args
        .generation
        .as_deref()
        .map(str::parse)
        .transpose()
        .map_err(|error| CliError::Usage(format!("--generation: {error}")))?;
    let (dir, mut chosen, silent) = answered(args)?;
    chosen.retain(|found| is_chosen(args, found));
    if let Some(generation) = generation.filter(|_| chosen.len() > 1) {
        // Of target and draft, the one that is meant.
        chosen.retain(|found| {
            let status = found.status.as_ref();
            status.is_ok_and(|status| matches!(status.holds, Holds::Content(held) if held == generation))
        });
    }
    if chosen.is_empty() && silent.is_empty() {
        return Err(CliError::Failure(format!(
            "no such daemon in {}: `weightd status` lists those that there are",
            dir.display()
        )));
    }
    let roles: BTreeSet<_> = chosen.iter().filter_map(Found::role).collect();
    if args.ranks.rank.is_some() && chosen.len() > roles.len() {
        return Err(CliError::usage(
            "several daemons have that rank: choose one with --instance",
        ));
    }
    for found in chosen {
        let release = Release {
            daemon: 0,
            generation,
        };
        match request(&found.socket, release, RELEASES_WITHIN).map_err(CliError::failure)? {
            Message::Released(_) => say(format_args!("released {}", found.socket.display()))?,
            other => {
                let (socket, name) = (found.socket.display(), other.name());
                return Err(CliError::Failure(format!(
                    "{socket}: answered with a {name} message"
                )));
            }
        }
    }
    // What it is, and so whether it was meant, only it could have said.
    match silent.first() {
        Some(Found { socket, status, .. }) => Err(CliError::Failure(format!(
            "{} did not say what it is, and may hold its weights still: {}; ask again",
            socket.display(),
            status.as_ref().err().map_or("", String::as_str)
        ))),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// The directory, every daemon in it that says what it is, and those that do not. A server that was just killed is
/// waited for.
fn answered(args: &ReleaseArgs) -> Result<(PathBuf, Vec<Found>, Vec<Found>), CliError> {
    let until = Instant::now() + SERVED_AGAIN_WITHIN;
    loop {
        let (dir, found) = find(&args.place)?;
        let (answered, silent): (Vec<_>, Vec<_>) = found.into_iter().partition(|found| found.status.is_ok());
        if silent.is_empty() || Instant::now() >= until {
            return Ok((dir, answered, silent));
        }
        sleep(PAUSE);
    }
}

fn is_chosen(args: &ReleaseArgs, found: &Found) -> bool {
    let status = found.status.as_ref().ok();
    let is_rank = |status: &DaemonStatus| {
        args.ranks
            .rank
            .is_none_or(|wanted| status.info.global_rank == wanted)
    };
    status.is_some_and(is_rank)
}
