//! Leasing a generation once more, after the daemon that it was leased from is gone.

use crate::client::Lease;
use crate::clock::Clock;
use crate::line::Line;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;
use weightd_core::content::Generation;
use weightd_core::machine::{Renewal, RenewalStep};
use weightd_socket::credentials::our_uid;

/// Drives one renewal. [`turn`](RenewalDriver::turn) never blocks; wait on the descriptor meanwhile.
#[derive(Debug)]
pub struct RenewalDriver {
    clock: Clock,
    socket: PathBuf,
    line: Line,
    machine: Renewal<OwnedFd>,
}

/// How far a renewal is.
#[derive(Debug)]
pub enum Renewing {
    /// Turn again when the driver's descriptor is readable, or after this time.
    Wait(Duration),
    /// The same generation is leased again.
    Leased(Lease),
    /// The daemon is lost. What is mapped stays mapped, and nobody counts it any more.
    Lost {
        /// Why.
        why: String,
    },
}

impl RenewalDriver {
    /// Of the lease on `generation` from the daemon at `socket`, which starts with the first turn.
    pub fn new(socket: PathBuf, generation: Generation) -> io::Result<RenewalDriver> {
        let clock = Clock::start();
        let uid = our_uid().map_err(io::Error::other)?;
        let machine = Renewal::new(clock.now(), generation, uid);
        Ok(RenewalDriver {
            clock,
            socket,
            line: Line::new()?,
            machine,
        })
    }

    /// Connects, sends and receives until it would block.
    pub fn turn(&mut self) -> Renewing {
        loop {
            let now = self.clock.now();
            let until = match self.machine.step(now) {
                RenewalStep::Connect => {
                    let result = self.line.connect(&self.socket);
                    self.machine.connected(now, result);
                    continue;
                }
                RenewalStep::Io { .. } if self.line.turn(now, &mut self.machine) => continue,
                RenewalStep::Io { until } | RenewalStep::Sleep { until } => until,
                RenewalStep::Leased => {
                    return match self.line.take() {
                        Some(connection) => Renewing::Leased(Lease(connection)),
                        None => Renewing::Lost {
                            why: "its connection broke".to_owned(),
                        },
                    };
                }
                RenewalStep::Lost { why } => return Renewing::Lost { why },
            };
            return Renewing::Wait(self.clock.until(Some(until)).unwrap_or_default());
        }
    }
}

impl AsRawFd for RenewalDriver {
    /// Readable when there is something to do; wait on it, never read from it.
    fn as_raw_fd(&self) -> RawFd {
        self.line.as_raw_fd()
    }
}
