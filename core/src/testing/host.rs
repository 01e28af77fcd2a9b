//! A process around a machine: it drains outputs as the contract says.

use crate::machine::{ConnId, DiscardId, Ends, Machine, Output};
use crate::testing::ledger::Fd;
use crate::time::Now;
use crate::wire::message::DaemonId;
use std::collections::{BTreeMap, BTreeSet};

/// More than follow from any input, also where it ends thousands of connections.
const MOST_OUTPUTS: usize = 100_000;

pub struct Host<M: Machine<Fd>> {
    pub machine: M,
    pub interest: BTreeMap<ConnId, (bool, bool)>,
    pub events: Vec<M::Event>,
    /// Handed out and not closed yet.
    pub discards: Vec<(DiscardId, Fd)>,
    pub listening: BTreeMap<DaemonId, Ends<Fd>>,
    pub closed: BTreeSet<ConnId>,
    /// Closed, and the world does not know yet.
    pub closing: Vec<ConnId>,
    pub wake_at: Option<Now>,
    pub accepting: bool,
}

impl<M: Machine<Fd>> Host<M> {
    pub fn new(machine: M) -> Host<M> {
        let mut host = Host {
            machine,
            interest: BTreeMap::new(),
            events: Vec::new(),
            discards: Vec::new(),
            listening: BTreeMap::new(),
            closed: BTreeSet::new(),
            closing: Vec::new(),
            wake_at: None,
            accepting: true,
        };
        host.drain();
        host
    }

    /// One input, and everything that follows from it.
    pub fn input<T>(&mut self, input: impl FnOnce(&mut M) -> T) -> T {
        let result = input(&mut self.machine);
        self.drain();
        result
    }

    /// Lets time pass, where it has.
    pub fn tick(&mut self, now: Now) -> bool {
        let due = self.wake_at.is_some_and(|at| at <= now);
        if due {
            self.input(|machine| machine.tick(now));
            assert!(
                self.wake_at.is_none_or(|at| at > now),
                "a tick deals with every deadline that passed"
            );
        }
        due
    }

    fn drain(&mut self) {
        for _ in 0..MOST_OUTPUTS {
            match self.machine.poll() {
                Output::Interest { conn, read, write } => {
                    assert!(!self.closed.contains(&conn), "{conn:?} is closed");
                    self.interest.insert(conn, (read, write));
                }
                Output::Close { conn } => {
                    self.interest.remove(&conn);
                    assert!(self.closed.insert(conn), "{conn:?} is closed once");
                    self.closing.push(conn);
                }
                Output::Listen { daemon, ends } => {
                    assert!(self.listening.insert(daemon, ends).is_none());
                }
                Output::Discard { id, descriptor } => self.discards.push((id, descriptor)),
                Output::Event(event) => self.events.push(event),
                Output::Idle { wake_at, accepting } => {
                    self.wake_at = wake_at;
                    self.accepting = accepting;
                    return;
                }
            }
        }
        panic!("an input has outputs without end");
    }
}
