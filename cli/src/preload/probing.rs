//! Trying an import in a child, since a launcher loads no device.

use super::ending::Ending;
use super::recovery::{Suspect, Verdict};
use crate::probe::{hear, say};
use std::io;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use weightd_blocking::driver::{Driver, Watch};
use weightd_core::machine::Vault;
use weightd_core::wire::Decoder;
use weightd_core::wire::message::{Message, State};
use weightd_socket::connect::pair;

/// How long a probe may take: with many devices, CUDA needs seconds to start.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);

/// Runs one probe at a time, and waits for none.
#[derive(Debug, Default)]
pub struct Prober {
    running: Option<Running>,
    ending: Ending,
}

#[derive(Debug)]
struct Running {
    child: Child,
    channel: OwnedFd,
    watch: Watch,
    decoder: Decoder<OwnedFd>,
    suspect: Suspect,
    until: Instant,
}

impl Prober {
    pub fn is_idle(&self) -> bool {
        self.running.is_none()
    }

    /// Lets `command` try the content that is suspected. False where the vault holds another by now.
    pub fn start(
        &mut self,
        driver: &mut Driver<Vault<OwnedFd>>,
        now: Instant,
        suspect: Suspect,
        mut command: Command,
    ) -> io::Result<bool> {
        let vault = driver.machine();
        let (Some(info), Some((generation, content, descriptors))) =
            (vault.info(suspect.daemon), vault.content(suspect.daemon))
        else {
            return Ok(false);
        };
        if generation != suspect.generation {
            return Ok(false);
        }
        let state = State {
            generation,
            device_uuid: info.device_uuid,
            content: content.clone(),
        };
        let (channel, theirs) = pair()?;
        say(&channel, &state.into(), descriptors).map_err(io::Error::other)?;
        let watch = driver.watch(&channel)?;
        let spawned = command.stdin(Stdio::from(theirs)).spawn();
        let child = match spawned {
            Ok(child) => child,
            Err(error) => {
                driver.unwatch(watch, channel)?;
                return Err(error);
            }
        };
        self.running = Some(Running {
            child,
            channel,
            watch,
            decoder: Decoder::default(),
            suspect,
            until: now + ANSWERS_WITHIN,
        });
        Ok(true)
    }

    /// What the probe found, once it is over.
    pub fn turn(&mut self, driver: &mut Driver<Vault<OwnedFd>>, now: Instant) -> Option<(Suspect, Verdict)> {
        self.ending.reap();
        let running = self.running.as_mut()?;
        let verdict = match hear(&running.channel, &mut running.decoder) {
            Ok(Some((Message::Reported(_), _))) => Verdict::Works,
            Ok(Some((Message::Report(report), _))) => Verdict::Lost(report.import_failed),
            Ok(Some((Message::Failure(failure), _))) => Verdict::Unclear(failure.why()),
            Ok(Some((other, _))) => Verdict::Unclear(format!("it sent a {} message", other.name())),
            Ok(None) if now < running.until => return None,
            Ok(None) => Verdict::Unclear(format!("no answer within {} s", ANSWERS_WITHIN.as_secs())),
            Err(why) => Verdict::Unclear(why),
        };
        let over = self.running.take()?;
        // Closing it ends the watch too.
        let _ = driver.unwatch(over.watch, over.channel);
        self.ending.leave(over.child);
        Some((over.suspect, verdict))
    }

    /// When to turn again, whatever happens.
    pub fn wake_at(&self) -> Option<Instant> {
        self.running.as_ref().map(|running| running.until)
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            self.ending.leave(running.child);
        }
    }
}

#[cfg(test)]
mod tests;
