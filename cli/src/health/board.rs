//! What the launcher lets others know.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weightd_core::wire::message::{DaemonId, DaemonInfo, Loaded};

/// Written by the launcher at its events, read by whoever is asked.
#[derive(Clone, Debug)]
pub struct Board(Arc<Mutex<Notes>>);

#[derive(Clone, Debug)]
pub struct Notes {
    /// By their numbers.
    pub daemons: Vec<Member>,
    /// Whether every daemon has served once: before that, no socket has its name.
    pub ready: bool,
    /// How many times a new server was armed with what the vault holds.
    pub rearms: u64,
    /// How many servers were started after the first.
    pub server_restarts: u64,
    /// The last load of each daemon.
    pub loads: BTreeMap<DaemonId, Loaded>,
}

#[derive(Clone, Debug)]
pub struct Member {
    pub rank: u32,
    pub role: &'static str,
    pub socket: PathBuf,
}

impl Board {
    pub fn new<'a>(daemons: impl IntoIterator<Item = &'a DaemonInfo>) -> Board {
        let member = |info: &DaemonInfo| Member {
            rank: info.global_rank,
            role: info.key.role.name(),
            socket: PathBuf::from(&info.socket),
        };
        Board(Arc::new(Mutex::new(Notes {
            daemons: daemons.into_iter().map(member).collect(),
            ready: false,
            rearms: 0,
            server_restarts: 0,
            loads: BTreeMap::new(),
        })))
    }

    pub fn notes(&self) -> Notes {
        self.lock().clone()
    }

    pub fn ready(&self) {
        self.lock().ready = true;
    }

    pub fn rearmed(&self) {
        self.lock().rearms += 1;
    }

    pub fn server_restarted(&self) {
        self.lock().server_restarts += 1;
    }

    pub fn loaded(&self, loaded: Loaded) {
        self.lock().loads.insert(loaded.daemon, loaded);
    }

    fn lock(&self) -> MutexGuard<'_, Notes> {
        // Numbers are whole whatever panicked.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
