//! How far loading is, for whoever looks: a bar or a line now and then, and what `/metrics` says later.

use crate::health::Board;
use crate::logs::{DaemonName, about, show_progress};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tracing::info;
use weightd_core::wire::message::{DaemonId, Loaded};

/// How often progress is logged, for each daemon.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Telling {
    pub board: Board,
    /// When progress was logged last.
    logged: BTreeMap<DaemonId, Instant>,
}

impl Telling {
    pub fn new(board: Board) -> Telling {
        Telling {
            board,
            logged: BTreeMap::new(),
        }
    }

    pub fn loading(&mut self, name: DaemonName, daemon: DaemonId, done: u64, total: u64) {
        if show_progress(&name, done, total) {
            return;
        }
        let now = Instant::now();
        let last = self.logged.get(&daemon);
        if done < total && last.is_none_or(|last| now.duration_since(*last) >= PROGRESS_EVERY) {
            self.logged.insert(daemon, now);
            let percent = 100.0 * done as f64 / total.max(1) as f64;
            let (done, total) = (done as f64 / 1e9, total as f64 / 1e9);
            about!(info, name, "loading, {done:.2} of {total:.2} GB ({percent:.0} %)");
        }
    }

    pub fn loaded(&mut self, name: DaemonName, loaded: Loaded) {
        show_progress(&name, loaded.bytes, loaded.bytes);
        let seconds = (loaded.micros as f64 / 1e6).max(1e-9);
        let bytes_read = loaded.buffered.saturating_add(loaded.direct);
        let read = bytes_read as f64 / 1e9;
        info!(
            rank = name.rank,
            role = name.role,
            model = loaded.checkpoint,
            path = loaded.path,
            bytes = loaded.bytes,
            bytes_read,
            seconds,
            "loaded {} {name} ({} tensors, {} bytes) by {}: {read:.2} GB read for {} ranks in {seconds:.2} s, {:.2} GB/s",
            loaded.checkpoint,
            loaded.tensors,
            loaded.bytes,
            loaded.path,
            loaded.daemons,
            read / seconds
        );
        self.board.loaded(loaded);
    }
}
