//! Engines that map and stay, in the test's own process.

use super::world::Daemon;
use crate::engine::*;
use crate::harness::*;
use std::path::{Path, PathBuf};
use weightd_blocking::Loaded;
use weightd_core::machine::AttachOptions;
use weightd_gpu::Weights;
use weightd_socket::credentials::our_uid;

/// One rank that was mapped, with its lease.
pub struct Engine {
    mapped: Loaded<Weights>,
    model: PathBuf,
    tp: u32,
    rank: u32,
    /// The server that was known to have its lease.
    server: u32,
}

impl Engine {
    /// Maps what a daemon serves of a model with this digest, or of the very files that it was loaded from.
    pub fn map(daemon: &Daemon, model: &Path, tp: u32, digest: Option<[u8; 32]>) -> Engine {
        let mut key = key_of_rank(model, tp, daemon.rank);
        key.checkpoint.digest = digest;
        let options = AttachOptions::new(our_uid().unwrap());
        let mapped = loader(Path::new(&daemon.socket), options, key).attach().unwrap();
        assert_eq!(mapped.generation().unwrap().to_string(), daemon.generation);
        Engine {
            mapped,
            model: model.to_owned(),
            tp,
            rank: daemon.rank,
            server: daemon.server,
        }
    }

    pub fn generation(&self) -> String {
        self.mapped.generation().unwrap().to_string()
    }

    /// Every byte is what it was.
    #[track_caller]
    pub fn is_intact(&self) {
        assert_intact_rank(&self.mapped, &self.model, self.tp, self.rank);
    }

    /// It leases what it has mapped where that is served, and knows where nobody can know of it any more.
    /// `leased` are the generations with a lease.
    #[track_caller]
    pub fn knows(&mut self, daemons: impl Fn() -> Vec<Daemon>) {
        let lease = self.mapped.lease().unwrap();
        let generation = self.generation();
        let mut server = self.server;
        wait_until("an engine knows what became of its lease", || {
            let daemons = daemons();
            let serves = daemons.iter().find(|daemon| daemon.serves(&generation));
            let has_lease = daemons.iter().find(|daemon| daemon.leased.contains(&generation));
            match (serves, has_lease) {
                // Who was not there again before others were served has lost it, whoever else was.
                (None, _) if lease.is_lost() => !is_alive(&server),
                (_, Some(daemon)) if !lease.is_lost() => {
                    server = daemon.server;
                    true
                }
                _ => false,
            }
        });
        self.server = server;
    }
}
