//! What may happen to a node.

use super::reference::{DAEMONS, KEPT, LOADED, Memory, Model, SERVED, Said, Wanted};
use proptest::collection::vec;
use proptest::prelude::*;
use std::ops::RangeInclusive;
use weightd_core::wire::message::{DaemonId, Expects};

/// Which generation is named.
#[derive(Clone, Copy, Debug)]
pub enum Which {
    Current,
    Stale,
    Nothing,
}

#[derive(Clone, Debug)]
pub enum Ask {
    Load { daemon: DaemonId, expects: Which },
    Publish { daemon: DaemonId, expects: Which },
    Read { daemon: DaemonId, wanted: Wanted },
    Watch { daemon: DaemonId, which: Which },
    Release { daemon: DaemonId, which: Which },
    Lose { daemon: DaemonId, which: Which },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Process {
    Server,
    /// Its successor adopts; and one more, where the first dies after so many turns.
    Launcher {
        successor_dies_after: Option<usize>,
    },
    ServerAndLauncher,
    Loader,
    /// All those who asked.
    Clients,
}

#[derive(Clone, Debug)]
pub enum Transition {
    /// Asked at the same time.
    Asks(Vec<Ask>),
    /// After so many turns a process dies. What is asked `meanwhile` is asked while there is none.
    Death {
        of: Process,
        amid: Vec<Ask>,
        turns: usize,
        nothing_closes: bool,
        meanwhile: Vec<Ask>,
    },
    /// An engine attaches, and keeps mapping and lease.
    Attach(DaemonId),
    /// A client that reads nothing of its answer.
    SlowRead(DaemonId),
    /// It reads.
    CatchUp(usize),
    /// A client that stops in the middle of a request.
    Mute { daemon: DaemonId, after: usize },
    /// One who holds something dies.
    Dies(usize),
    /// An engine cannot import what it was given; and the launcher finds whether it is lost.
    ImportFails {
        daemon: DaemonId,
        which: Which,
        lost: bool,
    },
    /// The loader knows the digest of the checkpoint.
    Digest(DaemonId),
    /// Milliseconds.
    Pass(u64),
}

impl Ask {
    /// The same of this daemon.
    fn at(self, daemon: DaemonId) -> Ask {
        match self {
            Ask::Load { expects, .. } => Ask::Load { daemon, expects },
            Ask::Publish { expects, .. } => Ask::Publish { daemon, expects },
            Ask::Read { wanted, .. } => Ask::Read { daemon, wanted },
            Ask::Watch { which, .. } => Ask::Watch { daemon, which },
            Ask::Release { which, .. } => Ask::Release { daemon, which },
            Ask::Lose { which, .. } => Ask::Lose { daemon, which },
        }
    }

    /// What is said where the node is as in this model.
    pub fn of(&self, model: &Model, memory: impl FnOnce() -> Memory) -> Said {
        let named = |daemon, which| {
            let daemon = model.daemon(daemon);
            match which {
                Which::Current => Some(daemon.current()),
                Which::Stale => Some(daemon.stale()),
                Which::Nothing => None,
            }
        };
        let expects = |daemon, which| match which {
            Which::Current => model.daemon(daemon).expects(),
            Which::Stale => Expects::Generation(model.daemon(daemon).stale()),
            Which::Nothing => Expects::Empty,
        };
        match *self {
            Ask::Load {
                daemon,
                expects: which,
            }
            | Ask::Publish {
                daemon,
                expects: which,
            } => Said::Publish {
                daemon,
                by_loader: matches!(self, Ask::Load { .. }),
                expects: expects(daemon, which),
                memory: memory(),
            },
            Ask::Read { daemon, wanted } => Said::Read { daemon, wanted },
            Ask::Watch { daemon, which } => Said::Watch {
                daemon,
                generation: named(daemon, which),
            },
            Ask::Release { daemon, which } => Said::Release {
                daemon,
                generation: named(daemon, which),
            },
            Ask::Lose { daemon, which } => Said::Lose {
                daemon,
                generation: named(daemon, which).unwrap_or(model.daemon(daemon).current()),
            },
        }
    }
}

fn daemon() -> impl Strategy<Value = DaemonId> {
    0..DAEMONS
}

fn which() -> impl Strategy<Value = Which> {
    prop_oneof![4 => Just(Which::Current), 1 => Just(Which::Stale), 1 => Just(Which::Nothing)]
}

fn wanted() -> impl Strategy<Value = Wanted> {
    prop_oneof![
        6 => Just(Wanted::Same),
        1 => Just(Wanted::AnotherModel),
        1 => Just(Wanted::OtherFiles),
        1 => any::<bool>().prop_map(|right| Wanted::OtherFilesOfDigest { right }),
    ]
}

fn ask() -> impl Strategy<Value = Ask> {
    prop_oneof![
        3 => (LOADED..=KEPT, which()).prop_map(|(daemon, expects)| Ask::Load { daemon, expects }),
        3 => (prop_oneof![1 => daemon(), 4 => Just(SERVED)], which())
            .prop_map(|(daemon, expects)| Ask::Publish { daemon, expects }),
        4 => (daemon(), wanted()).prop_map(|(daemon, wanted)| Ask::Read { daemon, wanted }),
        2 => (daemon(), which()).prop_map(|(daemon, which)| Ask::Watch { daemon, which }),
        2 => (daemon(), which()).prop_map(|(daemon, which)| Ask::Release { daemon, which }),
        1 => (daemon(), which()).prop_map(|(daemon, which)| Ask::Lose { daemon, which }),
    ]
}

/// Asked at once: mostly of one daemon, where they may meet.
fn asks(count: RangeInclusive<usize>) -> impl Strategy<Value = Vec<Ask>> {
    let one_daemon = prop_oneof![1 => Just(None), 3 => daemon().prop_map(Some)];
    (one_daemon, vec(ask(), count)).prop_map(|(one_daemon, asks)| match one_daemon {
        None => asks,
        Some(daemon) => asks.into_iter().map(|ask| ask.at(daemon)).collect(),
    })
}

fn process() -> impl Strategy<Value = Process> {
    prop_oneof![
        4 => Just(Process::Server),
        2 => Just(Process::Launcher { successor_dies_after: None }),
        2 => (0..60_usize).prop_map(|turns| Process::Launcher { successor_dies_after: Some(turns) }),
        1 => Just(Process::ServerAndLauncher),
        1 => Just(Process::Loader),
        1 => Just(Process::Clients),
    ]
}

pub fn transition() -> impl Strategy<Value = Transition> {
    use Transition::*;
    prop_oneof![
        8 => asks(1..=2).prop_map(Asks),
        5 => (process(), asks(0..=2), 0..60_usize, any::<bool>(), asks(0..=1)).prop_map(
            |(of, amid, turns, nothing_closes, meanwhile)| Death { of, amid, turns, nothing_closes, meanwhile }
        ),
        2 => daemon().prop_map(Attach),
        2 => daemon().prop_map(SlowRead),
        1 => any::<usize>().prop_map(CatchUp),
        1 => (daemon(), 0..20_usize).prop_map(|(daemon, after)| Mute { daemon, after }),
        2 => any::<usize>().prop_map(Dies),
        1 => (daemon(), which(), any::<bool>())
            .prop_map(|(daemon, which, lost)| ImportFails { daemon, which, lost }),
        1 => (LOADED..=KEPT).prop_map(Digest),
        2 => (0..12_000_u64).prop_map(Pass),
    ]
}
