//! Trying an import in a child, since a launcher loads no device.

use super::recovery::{Suspect, Verdict};
use crate::probe::{hear, say};
use std::io;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use weightd_blocking::driver::{Driver, Watch};
use weightd_core::machine::Vault;
use weightd_core::wire::Decoder;
use weightd_core::wire::message::{Message, State};
use weightd_socket::connect::pair;

/// How long a probe may take: with many devices, CUDA needs seconds to start.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
/// How often one that was ended is looked after: a process that is stuck in a driver ends late.
const REAPED_EVERY: Duration = Duration::from_millis(100);
/// How long the end of a probe may hold up that of its launcher.
const ENDS_WITHIN: Duration = Duration::from_secs(3);

/// Runs one probe at a time, and waits for none.
#[derive(Debug, Default)]
pub struct Prober {
    running: Option<Running>,
    /// Killed, and not gone yet.
    ending: Vec<Child>,
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
        // One that cannot be waited for is not ours to wait for.
        self.ending
            .retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        let running = self.running.as_mut()?;
        let verdict = match hear(&running.channel, &mut running.decoder) {
            Ok(Some((Message::Reported(_), _))) => Verdict::Works,
            Ok(Some((Message::Report(report), _))) => Verdict::Lost(report.import_failed),
            Ok(Some((Message::Failure(failure), _))) => Verdict::Unclear(failure.message),
            Ok(Some((other, _))) => Verdict::Unclear(format!("it sent a {} message", other.name())),
            Ok(None) if now < running.until => return None,
            Ok(None) => Verdict::Unclear(format!("no answer within {} s", ANSWERS_WITHIN.as_secs())),
            Err(why) => Verdict::Unclear(why),
        };
        let mut over = self.running.take()?;
        // Closing it ends the watch too.
        let _ = driver.unwatch(over.watch, over.channel);
        // It has nothing more to say. It may have ended by itself.
        let _ = over.child.kill();
        self.ending.push(over.child);
        Some((over.suspect, verdict))
    }

    /// When to turn again, whatever happens.
    pub fn wake_at(&self, now: Instant) -> Option<Instant> {
        let reap = (!self.ending.is_empty()).then(|| now + REAPED_EVERY);
        let give_up = self.running.as_ref().map(|running| running.until);
        reap.into_iter().chain(give_up).min()
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        self.ending
            .extend(self.running.take().map(|running| running.child));
        let until = Instant::now() + ENDS_WITHIN;
        for child in &mut self.ending {
            let _ = child.kill();
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < until {
                sleep(Duration::from_millis(5));
            }
        }
    }
}

#[cfg(test)]
mod tests;
