//! Keeping mappings and leases until a signal, and saying what becomes of the leases.

use super::Mapped;
use crate::error::CliError;
use crate::output::say;
use crate::signals::Signals;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::process::ExitCode;
use weightd_blocking::LeaseEvent;

pub fn until_signal(mapped: &[Mapped], signals: &Signals, json: bool) -> Result<ExitCode, CliError> {
    for mapped in mapped {
        let rank = mapped.rank.placement.global_rank;
        if let Some(lease) = mapped.attached.lease() {
            // A closed stdout is no reason to let go.
            lease.on_event(move |event| drop(say(line(rank, event, json))));
        }
    }
    loop {
        match poll(&mut [PollFd::new(signals, PollFlags::IN)], None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(CliError::failure(format!("cannot wait: {error}"))),
        }
        if signals.take() > 0 {
            return Ok(signals.exit_code());
        }
    }
}

fn line(rank: u32, event: &LeaseEvent, json: bool) -> String {
    if json {
        let (name, generation) = match event {
            LeaseEvent::LeasedAgain { generation } => ("leased_again", generation),
            LeaseEvent::Lost { generation, .. } => ("daemon_lost", generation),
            _ => return event.to_string(),
        };
        let event = serde_json::json!({
            "event": name,
            "global_rank": rank,
            "generation": generation.to_string(),
        });
        return event.to_string();
    }
    match event {
        // Why is in the log.
        LeaseEvent::Lost { generation, .. } => format!(
            "rank {rank}: daemon lost: generation {generation} stays mapped until this ends, and is leased again where a \
             daemon serves it; what was loaded anew is another, attach again for that"
        ),
        event => format!("rank {rank}: {event}"),
    }
}
