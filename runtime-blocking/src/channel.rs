//! A loader's side of its channel to the launcher.

use crate::clock::Clock;
use crate::line::Line;
use std::io;
use std::os::fd::OwnedFd;
use weightd_core::machine::{Handover, HandoverEvent};

/// The channel. It ends when the launcher does, and the loader with it.
#[derive(Debug)]
pub struct Channel {
    clock: Clock,
    line: Line,
    machine: Handover<OwnedFd>,
}

impl Channel {
    /// Takes over the non-blocking socket that the launcher gave its loader.
    pub fn new(socket: OwnedFd) -> io::Result<Channel> {
        let mut line = Line::new()?;
        line.open(socket)?;
        Ok(Channel {
            clock: Clock::start(),
            line,
            machine: Handover::default(),
        })
    }

    /// The machine, to say something; the next [`turn`](Channel::turn) sends it.
    pub fn machine_mut(&mut self) -> &mut Handover<OwnedFd> {
        &mut self.machine
    }

    /// Sends and receives what can be, without waiting; returns what has become known.
    pub fn turn(&mut self) -> Vec<HandoverEvent> {
        let now = self.clock.now();
        while !self.machine.is_gone() && self.line.turn(now, &mut self.machine) {}
        std::iter::from_fn(|| self.machine.poll()).collect()
    }

    /// Waits until everything is sent and answered; returns what has become known.
    pub fn settle(&mut self) -> io::Result<Vec<HandoverEvent>> {
        let mut events = self.turn();
        while let Some(due) = self.machine.due(self.clock.now()) {
            self.line.wait(&self.clock, due)?;
            events.extend(self.turn());
        }
        events.extend(std::iter::from_fn(|| self.machine.poll()));
        Ok(events)
    }
}
