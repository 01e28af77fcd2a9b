//! Keeping mappings and leases until a signal, and saying when a daemon goes.

use super::Mapped;
use crate::error::CliError;
use crate::signals::Signals;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::process::ExitCode;

pub fn until_signal(mut mapped: Vec<Mapped>, signals: &Signals, json: bool) -> Result<ExitCode, CliError> {
    loop {
        let leases = mapped.iter().filter_map(|mapped| mapped.attached.lease.as_ref());
        let mut waiting: Vec<_> = leases.map(|lease| PollFd::new(lease, PollFlags::IN)).collect();
        waiting.push(PollFd::new(signals, PollFlags::IN));
        match poll(&mut waiting, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(CliError::failure(format!("cannot wait: {error}"))),
        }
        let mut gone = waiting
            .iter()
            .map(|fd| !fd.revents().is_empty())
            .collect::<Vec<_>>()
            .into_iter();
        for mapped in &mut mapped {
            if mapped.attached.lease.is_some() && gone.next() == Some(true) {
                mapped.attached.lease = None;
                say_lost(mapped, json);
            }
        }
        if gone.next() == Some(true) && signals.take() > 0 {
            return Ok(ExitCode::from(128 + signals.last()));
        }
    }
}

fn say_lost(mapped: &Mapped, json: bool) {
    let rank = mapped.rank.placement.global_rank;
    let generation = mapped.attached.generation();
    if json {
        let event = serde_json::json!({
            "event": "daemon_lost",
            "global_rank": rank,
            "generation": generation.to_string(),
        });
        println!("{event}");
    } else {
        println!(
            "rank {rank}: daemon lost; generation {generation} stays mapped, and nobody counts it any more"
        );
    }
}
