//! One connection, driven for a machine that speaks on only one.

use crate::clock::Clock;
use crate::poller::Poller;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;
use weightd_core::machine::{ConnectFailure, Exchange, IN_FLIGHT_PAUSE};
use weightd_core::peer::Peer;
use weightd_core::time::Now;
use weightd_socket::connect::{ConnectError, connect};
use weightd_socket::message::{ReceiveError, SendError, receive, send};
use weightd_socket::out_of_descriptors;

const READ_BYTES: usize = 64 * 1024;

#[derive(Debug)]
pub(crate) struct Line {
    poller: Poller,
    socket: Option<OwnedFd>,
    /// Nothing is sent before this moment.
    paused_until: Option<Now>,
    buffer: Vec<u8>,
}

impl Line {
    pub fn new() -> io::Result<Line> {
        Ok(Line {
            poller: Poller::new()?,
            socket: None,
            paused_until: None,
            buffer: vec![0; READ_BYTES],
        })
    }

    /// Takes over a non-blocking, connected socket, and closes the one before.
    pub fn open(&mut self, socket: OwnedFd) -> io::Result<()> {
        self.poller.add(&socket, 0, true)?;
        self.socket = Some(socket);
        self.paused_until = None;
        Ok(())
    }

    /// Connects to a daemon's socket, and closes the connection before.
    pub fn connect(&mut self, socket: &Path) -> Result<Peer, ConnectFailure> {
        drop(self.take());
        match connect(socket) {
            Ok((socket, peer)) => match self.open(socket) {
                Ok(()) => Ok(peer),
                Err(error) => Err(ConnectFailure::Other(advised(&error))),
            },
            Err(error) => Err(match error {
                ConnectError::Absent { .. } => ConnectFailure::Absent(error.to_string()),
                ConnectError::Busy { .. } => ConnectFailure::Busy,
                ConnectError::Refused { .. } => ConnectFailure::Refused(error.to_string()),
                other => ConnectFailure::Other(other.to_string()),
            }),
        }
    }

    /// Closes the connection, or gives it up.
    pub fn take(&mut self) -> Option<OwnedFd> {
        self.socket.take()
    }

    /// Sends and receives once, without waiting; true when something moved.
    pub fn turn(&mut self, now: Now, machine: &mut impl Exchange<OwnedFd>) -> bool {
        // Takes note of what made the line readable, before anything that makes it so again.
        let _ = self.poller.wait(Some(Duration::ZERO));
        let Some(socket) = &self.socket else { return false };
        let mut moved = false;
        let mut broken = None;
        self.paused_until.take_if(|until| *until <= now);
        while self.paused_until.is_none()
            && let Some(outgoing) = machine.outgoing()
        {
            let descriptors: Vec<_> = outgoing.descriptors.iter().map(AsFd::as_fd).collect();
            match send(socket, outgoing.bytes, &descriptors) {
                Ok(bytes) => {
                    machine.wrote(now, bytes);
                    moved = true;
                }
                Err(SendError::WouldBlock) => break,
                Err(SendError::TooManyInFlight) => {
                    self.paused_until = Some(now + IN_FLIGHT_PAUSE);
                    break;
                }
                // Why it was closed may still be there to be read.
                Err(error) => {
                    broken = Some(error.to_string());
                    break;
                }
            }
        }
        let mut descriptors = Vec::new();
        match receive(socket, &mut self.buffer, &mut descriptors) {
            Ok(received) if received.bytes > 0 || received.truncated => {
                machine.receive(
                    now,
                    &self.buffer[..received.bytes],
                    descriptors,
                    received.truncated,
                );
                return true;
            }
            Ok(_) => machine.hangup(now, "the other side closed the connection"),
            Err(ReceiveError::WouldBlock) => match broken {
                Some(why) => machine.hangup(now, &why),
                None => return moved,
            },
            Err(error) => machine.hangup(now, &error.to_string()),
        }
        true
    }

    /// When to turn, at the latest.
    pub fn until(&self, until: Now) -> Now {
        self.paused_until.map_or(until, |paused| until.min(paused))
    }

    /// Blocks until something may move, or until the moment.
    pub fn wait(&mut self, clock: &Clock, until: Now) -> io::Result<()> {
        self.poller.wait(clock.until(Some(self.until(until)))).map(drop)
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.poller.as_fd()
    }
}

/// Why a process cannot make or wait for a line, and what to do where it has no descriptor left.
pub(crate) fn advised(error: &io::Error) -> String {
    format!("{error}{}", out_of_descriptors(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{LoadError, PublishFailed};
    use crate::request::RequestError;
    use rustix::io::Errno;

    #[test]
    fn who_has_no_descriptor_left_to_wait_with_is_told_what_to_do() {
        let none_left = || io::Error::from(Errno::MFILE);
        for error in [
            RequestError::from(none_left()).to_string(),
            LoadError::from(none_left()).to_string(),
            PublishFailed::from(none_left()).to_string(),
        ] {
            assert!(
                error.ends_with("; raise the limit of open files (ulimit -n)"),
                "{error}"
            );
        }
    }
}
