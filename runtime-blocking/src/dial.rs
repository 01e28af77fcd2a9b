//! The driver of a machine that makes its own connection.

use crate::clock::Clock;
use crate::endpoint::Endpoint;
use crate::line::Line;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use weightd_core::machine::{Client, Step};
use weightd_core::time::Now;

/// Connects, moves bytes and waits for a [`Client`].
#[derive(Debug)]
pub(crate) struct Dial<M> {
    pub machine: M,
    clock: Clock,
    endpoint: Endpoint,
    line: Line,
    connected: Instant,
}

/// How far it is.
#[derive(Debug)]
pub(crate) enum Dialled<T> {
    Wait(Option<Duration>),
    Next(T),
}

impl<M: Client<OwnedFd>> Dial<M> {
    /// Drives `machine`, which is made with the present moment.
    pub fn new(endpoint: &Endpoint, machine: impl FnOnce(Now) -> M) -> io::Result<Dial<M>> {
        Dial::on(Line::new()?, endpoint, machine)
    }

    /// The same on a line that there is.
    pub fn on(line: Line, endpoint: &Endpoint, machine: impl FnOnce(Now) -> M) -> io::Result<Dial<M>> {
        let clock = Clock::start();
        Ok(Dial {
            machine: machine(clock.now()),
            clock,
            endpoint: endpoint.clone(),
            line,
            connected: Instant::now(),
        })
    }

    /// Goes on until it must wait, or the machine wants something of its own.
    pub fn turn(&mut self) -> Dialled<M::Next> {
        loop {
            let now = self.clock.now();
            let until = match self.machine.step(now) {
                Step::Connect => {
                    self.connected = Instant::now();
                    let result = self.endpoint.connect(&mut self.line);
                    self.machine.connected(now, result);
                    continue;
                }
                Step::Io { until } => match self.line.turn(now, self.machine.exchange()) {
                    true => continue,
                    false => self.line.until(until),
                },
                Step::Sleep { until } => {
                    // Of no use any more, and what it has to tell would end every wait at once.
                    drop(self.line.take());
                    until
                }
                Step::Next(next) => return Dialled::Next(next),
            };
            return Dialled::Wait(self.clock.until(Some(until)));
        }
    }

    /// The present moment, as the machine counts it.
    pub fn now(&self) -> Now {
        self.clock.now()
    }

    /// When the connection was begun that there is.
    pub fn connected_at(&self) -> Instant {
        self.connected
    }

    /// The connection, which is not the machine's any more.
    pub fn hang_on(&mut self) -> Option<OwnedFd> {
        self.line.take()
    }
}

impl<M> AsFd for Dial<M> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.line.as_fd()
    }
}
