//! The node that does what the model says: all machines in one world, and those who use them.

use super::asking::DIGEST;
use super::clients::Client;
use super::reference::{DAEMONS, KEPT, LOADED, Memory, Model, SERVED};
use super::transition::{Ask, Process, Transition, Which};
use crate::host::Host;
use crate::ledger::File;
use crate::socket::Dice;
use crate::world::*;
use std::collections::BTreeMap;
use weightd_core::machine::{Held, Vault};
use weightd_core::time::Span;
use weightd_core::wire::message::{Digest, GetMemory};

pub struct Node {
    pub(super) world: World,
    pub(super) model: Model,
    pub(super) clients: Vec<Client>,
    /// The files of manifest and region.
    pub(super) files: BTreeMap<Memory, [File; 2]>,
    pub(super) launchers: u64,
}

impl Node {
    /// A launcher, its server and its loader, and nothing loaded. With `dice`, whatever moves is late and in pieces.
    pub fn new(dice: Option<u64>) -> Node {
        let mut world = World::new();
        world.dice = dice.map(Dice);
        let mut node = Node {
            world,
            model: Model::new(0),
            clients: Vec::new(),
            files: BTreeMap::new(),
            launchers: 0,
        };
        node.start();
        node
    }

    /// A launcher starts with nothing.
    pub(super) fn start(&mut self) {
        let world = &mut self.world;
        world.listeners.clear();
        self.model = Model::new(self.launchers);
        self.launchers += 1;
        let held = (0..DAEMONS).map(|daemon| {
            let (lock, listener) = (world.ledger.lock().strict(), world.ledger.listener().strict());
            world.listeners.push(listener.file);
            let info = match daemon {
                SERVED => publishable(daemon),
                daemon => info(daemon, daemon == KEPT),
            };
            Held { info, lock, listener }
        });
        let vault = Vault::new(VAULT_PID, self.model.epoch(), held.collect::<Vec<_>>());
        world.vault = Some(Host::new(vault.with_control(world.ends())));
        world.start_server();
        world.start_loader();
        world.run();
    }

    pub fn go(&mut self, transition: &Transition) {
        match *transition {
            Transition::Asks(ref asks) => {
                let asked = self.ask_all(asks, false);
                self.answered(asked, None);
            }
            Transition::Death {
                of,
                ref amid,
                turns,
                nothing_closes,
                ref meanwhile,
            } => {
                let releases = |ask: &Ask| matches!(ask, Ask::Release { .. });
                if of != Process::Server || amid.iter().chain(meanwhile).any(releases) {
                    self.catch_up();
                }
                let asked = self.ask_all(amid, true);
                self.world.hold_reaper = nothing_closes;
                self.world.some_turns(turns);
                self.world.hold_reaper = false;
                self.death(of, asked, meanwhile);
            }
            Transition::Attach(daemon) => self.attach(daemon),
            Transition::SlowRead(daemon) => self.slow_read(daemon),
            Transition::CatchUp(which) => {
                let slow = |client: &&Client| matches!(client, Client::Slow { .. });
                let count = self.clients.iter().filter(slow).count();
                if count > 0 {
                    self.catch_up_nth(which % count);
                }
            }
            Transition::Mute { daemon, after } => {
                let raw = self.world.raw(daemon);
                let request = frame(&GetMemory {}.into(), 1, 0);
                if after > 0 {
                    self.world.send(raw, &request[..after], vec![]);
                }
                let since = self.world.now;
                self.clients.push(Client::Mute { raw, since });
            }
            Transition::Dies(which) if !self.clients.is_empty() => {
                let which = which % self.clients.len();
                // Whoever waits is answered before anybody looks whether it is still there.
                if !matches!(self.clients[which], Client::Releaser { .. }) {
                    let client = self.clients.remove(which);
                    self.end(client);
                }
            }
            Transition::Dies(_) => {}
            Transition::ImportFails { daemon, which, lost } => self.import_fails(daemon, which, lost),
            Transition::Digest(daemon) => {
                let loader = self.world.loader.as_mut().expect("a loader");
                loader.digest(Digest {
                    daemon,
                    digest: DIGEST,
                });
                self.model.daemons[daemon as usize].digest_known = true;
            }
            Transition::Pass(millis) => self.pass(Span::millis(millis)),
        }
        self.world.run();
        self.hear_releasers();
        self.check();
    }

    /// Both checkpoints are loaded.
    pub fn load_all(&mut self) {
        for daemon in [LOADED, KEPT] {
            let expects = Which::Current;
            self.go(&Transition::Asks(vec![Ask::Load { daemon, expects }]));
        }
    }

    /// Everybody ends, and nothing is left.
    pub fn finish(mut self) {
        self.clients.clear();
        self.world.finish();
    }
}
