//! Keeping mappings and leases until a signal, and saying when a daemon goes.

use super::Mapped;
use crate::error::CliError;
use crate::output::say;
use crate::signals::Signals;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::process::ExitCode;

pub fn until_signal(mut mapped: Vec<Mapped>, signals: &Signals, json: bool) -> Result<ExitCode, CliError> {
    loop {
        let (signalled, lost) = wait(&mapped, signals)?;
        for index in lost {
            mapped[index].attached.lease = None;
            // A closed stdout is no reason to let go.
            let _ = say(lost_line(&mapped[index], json));
        }
        if signalled && signals.take() > 0 {
            return Ok(signals.exit_code());
        }
    }
}

/// Whether a signal came, and which leases ended.
fn wait(mapped: &[Mapped], signals: &Signals) -> Result<(bool, Vec<usize>), CliError> {
    let leases = mapped.iter().enumerate();
    let (indices, mut waiting): (Vec<usize>, Vec<PollFd<'_>>) = leases
        .filter_map(|(index, mapped)| Some((index, mapped.attached.lease.as_ref()?)))
        .map(|(index, lease)| (index, PollFd::new(lease, PollFlags::IN)))
        .unzip();
    waiting.push(PollFd::new(signals, PollFlags::IN));
    match poll(&mut waiting, None) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(CliError::failure(format!("cannot wait: {error}"))),
    }
    let mut ready = waiting.iter().map(|fd| !fd.revents().is_empty());
    let lost = indices
        .into_iter()
        .zip(ready.by_ref())
        .filter(|(_, ready)| *ready);
    let lost = lost.map(|(index, _)| index).collect();
    Ok((ready.next() == Some(true), lost))
}

fn lost_line(mapped: &Mapped, json: bool) -> String {
    let rank = mapped.rank.placement.global_rank;
    let generation = mapped.attached.generation();
    if json {
        let event = serde_json::json!({
            "event": "daemon_lost",
            "global_rank": rank,
            "generation": generation.to_string(),
        });
        return event.to_string();
    }
    format!("rank {rank}: daemon lost; generation {generation} stays mapped, and nobody counts it any more")
}
