//! What must be so whenever nothing moves.

use super::asking::wanted_key;
use super::clients::Client;
use super::node::Node;
use super::reference::{Answer, DAEMONS, Memory, Model, Wanted};
use crate::ledger::Fd;
use std::collections::BTreeMap;
use weightd_core::content::Generation;
use weightd_core::wire::Frame;
use weightd_core::wire::message::{DaemonId, GetActivity, GetState, GetStatus, Holds, Leased, Message};

/// Who asks each daemon whenever all is quiet.
const READERS: [Wanted; 2] = [Wanted::Same, Wanted::OtherFilesOfDigest { right: true }];

/// What a daemon says of itself.
#[derive(Debug, PartialEq)]
pub(super) struct Seen {
    pub(super) holds: Holds,
    pub(super) leases: u32,
    pub(super) leased: Vec<Leased>,
    /// What it answers those [`READERS`].
    pub(super) answers: [Answer; 2],
}

pub(super) fn answers_of(model: &Model, daemon: DaemonId) -> [Answer; 2] {
    READERS.map(|wanted| model.shows(daemon, wanted))
}

impl Node {
    /// What the daemons say of themselves.
    pub(super) fn seen(&mut self) -> Vec<Seen> {
        let ask = |daemon| {
            let raw = self.world.raw(daemon);
            self.world.say(raw, GetStatus {}, vec![]);
            self.world.say(raw, GetActivity {}, vec![]);
            for wanted in READERS {
                let (key, is_reload) = (wanted_key(daemon, wanted), false);
                self.world.say(raw, GetState { key, is_reload }, vec![]);
            }
            raw
        };
        let raws: Vec<usize> = (0..DAEMONS).map(ask).collect();
        self.world.run();
        let mut seen = Vec::new();
        for raw in raws {
            let frames = self.world.frames(raw);
            self.hang_up(raw);
            let decode = |frame: &Frame<Fd>| Message::decode(frame.kind, &frame.body).expect("a message");
            let (status, activity) = match (decode(&frames[0]), decode(&frames[1])) {
                (Message::DaemonStatus(status), Message::Activity(activity)) => (status, activity),
                other => panic!("{other:?}"),
            };
            let mut leased = activity.generations;
            leased.sort_by_key(|leased| leased.generation);
            seen.push(Seen {
                holds: status.holds,
                leases: status.leases,
                leased,
                answers: [self.read(&frames[2]), self.read(&frames[3])],
            });
        }
        self.world.run();
        seen
    }

    /// Who leases what, of this daemon.
    pub(super) fn leased(&self, of: DaemonId) -> Vec<Leased> {
        let mut leased: BTreeMap<Generation, (u64, u32)> = BTreeMap::new();
        for client in &self.clients {
            let lease = match *client {
                Client::Engine {
                    daemon,
                    generation,
                    memory,
                    leases: true,
                    ..
                } if daemon == of => Some((generation, memory)),
                Client::Watcher { daemon, lease, .. } if daemon == of => lease,
                _ => None,
            };
            if let Some((generation, memory)) = lease {
                leased.entry(generation).or_insert((memory.0, 0)).1 += 1;
            }
        }
        let leased = leased.into_iter();
        leased
            .map(|(generation, (bytes, leases))| Leased {
                generation,
                bytes,
                leases,
            })
            .collect()
    }

    pub(super) fn check(&mut self) {
        assert_eq!(
            self.world.ledger.lost(),
            [],
            "descriptors are discarded, never dropped"
        );
        let vault = &self.world.vault.as_ref().expect("a vault").machine;
        assert!(vault.is_armed());
        for daemon in 0..DAEMONS {
            let has = self.model.daemon(daemon).has;
            assert_eq!(
                vault.holds(daemon),
                Some(has.holds()),
                "the vault's daemon {daemon}"
            );
        }
        for (daemon, seen) in (0..DAEMONS).zip(self.seen()) {
            let leased = self.leased(daemon);
            let said = Seen {
                holds: self.model.daemon(daemon).has.holds(),
                leases: leased.iter().map(|leased| leased.leases).sum(),
                leased,
                answers: answers_of(&self.model, daemon),
            };
            assert_eq!(seen, said, "the server's daemon {daemon}");
        }
        for (memory, files) in &self.files {
            let held = self.holders(*memory);
            for file in files {
                assert_eq!(
                    self.world.ledger.open_of(*file),
                    held,
                    "descriptors of {memory:?}"
                );
            }
        }
        let connected = |client: &&Client| match client {
            Client::Reader { .. } => false,
            Client::Engine { leases, .. } => *leases,
            _ => true,
        };
        let connected = self.clients.iter().filter(connected).count();
        let server = self.world.server.as_ref().expect("a server");
        assert_eq!(server.interest.len(), 1 + connected, "connections of the server");
    }

    /// How many have it.
    fn holders(&self, of: Memory) -> usize {
        let content = |daemon: DaemonId| self.model.daemon(daemon).has.content();
        let is_current = (0..DAEMONS).filter_map(content).any(|(_, memory)| memory == of);
        let has = |client: &&Client| match client {
            Client::Reader { memory, .. } | Client::Engine { memory, .. } => *memory == of,
            _ => false,
        };
        let mappings = self.clients.iter().filter(has).count();
        let is_sent = self.clients.iter().any(
            |client| matches!(client, Client::Slow { answer: Answer::State(_, memory), .. } if *memory == of),
        );
        let server = usize::from(is_current || is_sent);
        usize::from(is_current) + server + mappings
    }
}
