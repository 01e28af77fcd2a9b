//! Keeping mappings and leases until a signal, and saying when a daemon goes for good.

use super::Mapped;
use crate::error::CliError;
use crate::output::say;
use crate::signals::Signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::process::ExitCode;
use std::time::Duration;
use weightd_blocking::renewal::{RenewalDriver, Renewing};

/// How often a renewal is looked after.
const RENEWING_EVERY: Duration = Duration::from_millis(20);

pub fn until_signal(mapped: Vec<Mapped>, signals: &Signals, json: bool) -> Result<ExitCode, CliError> {
    let mut held: Vec<Held> = mapped.into_iter().map(Held::new).collect();
    loop {
        let (signalled, ended) = wait(&held, signals)?;
        for index in ended {
            held[index].renew()?;
        }
        for held in &mut held {
            if let Some(line) = held.turn(json) {
                // A closed stdout is no reason to let go.
                let _ = say(line);
            }
        }
        if signalled && signals.take() > 0 {
            return Ok(signals.exit_code());
        }
    }
}

/// A rank that is mapped, and its lease, or what is done to get it again.
struct Held {
    mapped: Mapped,
    renewal: Option<RenewalDriver>,
}

impl Held {
    fn new(mapped: Mapped) -> Held {
        let renewal = None;
        Held { mapped, renewal }
    }

    /// Begins to lease what is mapped again.
    fn renew(&mut self) -> Result<(), CliError> {
        self.mapped.attached.lease = None;
        let (socket, generation) = (self.mapped.socket.clone(), self.mapped.attached.generation());
        self.renewal = Some(RenewalDriver::new(socket, generation).map_err(CliError::failure)?);
        Ok(())
    }

    /// Goes on with it; what there is to be said when it is over.
    fn turn(&mut self, json: bool) -> Option<String> {
        match self.renewal.as_mut()?.turn() {
            Renewing::Wait(_) => None,
            Renewing::Leased(lease) => {
                self.mapped.attached.lease = Some(lease);
                self.renewal = None;
                Some(self.line(
                    json,
                    "leased_again",
                    "leased again from the daemon that serves it now",
                ))
            }
            Renewing::Lost { why } => {
                self.renewal = None;
                let what =
                    format!("stays mapped, but its daemon is lost, and nobody counts it any more: {why}");
                Some(self.line(json, "daemon_lost", &what))
            }
        }
    }

    fn line(&self, json: bool, event: &str, what: &str) -> String {
        let rank = self.mapped.rank.placement.global_rank;
        let generation = self.mapped.attached.generation();
        if json {
            let event = serde_json::json!({
                "event": event,
                "global_rank": rank,
                "generation": generation.to_string(),
            });
            return event.to_string();
        }
        format!("rank {rank}: generation {generation} {what}")
    }
}

/// Whether a signal came, and which leases ended.
fn wait(held: &[Held], signals: &Signals) -> Result<(bool, Vec<usize>), CliError> {
    let leases = held.iter().enumerate();
    let (indices, mut waiting): (Vec<usize>, Vec<PollFd<'_>>) = leases
        .filter_map(|(index, held)| Some((index, held.mapped.attached.lease.as_ref()?)))
        .map(|(index, lease)| (index, PollFd::new(lease, PollFlags::IN)))
        .unzip();
    waiting.push(PollFd::new(signals, PollFlags::IN));
    let renewing = held.iter().any(|held| held.renewal.is_some());
    let timeout = renewing.then(|| Timespec::try_from(RENEWING_EVERY).expect("it is short"));
    match poll(&mut waiting, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(CliError::failure(format!("cannot wait: {error}"))),
    }
    let mut ready = waiting.iter().map(|fd| !fd.revents().is_empty());
    let ended = indices
        .into_iter()
        .zip(ready.by_ref())
        .filter(|(_, ready)| *ready);
    let ended = ended.map(|(index, _)| index).collect();
    Ok((ready.next() == Some(true), ended))
}
