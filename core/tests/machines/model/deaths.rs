//! Who dies, and who comes after.

use super::asking::Asked;
use super::clients::Client;
use super::node::Node;
use super::transition::{Ask, Process};
use weightd_core::machine::ServerEvent;

impl Node {
    pub(super) fn death(&mut self, of: Process, mut asked: Vec<Asked>, meanwhile: &[Ask]) {
        match of {
            Process::Server => {
                self.world.kill_server();
                asked.extend(self.ask_all(meanwhile, false));
                self.world.run();
                self.server_died();
                self.world.start_server();
                self.answered(asked, Some(of));
                self.model.adopted = false;
            }
            Process::Launcher { successor_dies_after } => {
                self.world.kill_vault();
                self.world.kill_loader();
                self.answered(asked, Some(of));
                self.model.led = false;
                self.serve_alone(meanwhile, successor_dies_after);
            }
            Process::ServerAndLauncher => {
                self.world.kill_server();
                self.world.kill_vault();
                self.world.kill_loader();
                self.world.run();
                self.forget(asked);
                self.world.published.clear();
                self.server_died();
                self.start();
            }
            Process::Loader => {
                self.world.kill_loader();
                self.answered(asked, Some(of));
                self.world.start_loader();
            }
            Process::Clients => {
                let raws: Vec<usize> = asked.iter().filter_map(|asked| asked.raw).collect();
                raws.into_iter().for_each(|raw| self.hang_up(raw));
                self.answered(asked, Some(of));
            }
        }
    }

    fn forget(&mut self, asked: Vec<Asked>) {
        for raw in asked.into_iter().filter_map(|asked| asked.raw) {
            self.hang_up(raw);
        }
    }

    /// A server without a launcher, until another adopts it; where it would end, everything starts anew.
    fn serve_alone(&mut self, meanwhile: &[Ask], successor_dies_after: Option<usize>) {
        if self.model.outlives_its_launcher() {
            assert!(!self.stops(), "it has something to serve");
            let without_launcher = |ask: &&Ask| !matches!(ask, Ask::Load { .. } | Ask::Lose { .. });
            let meanwhile: Vec<Ask> = meanwhile.iter().filter(without_launcher).cloned().collect();
            let asked = self.ask_all(&meanwhile, false);
            self.answered(asked, None);
        }
        let goes_on = self.model.outlives_its_launcher();
        assert_eq!(self.stops(), !goes_on, "in {:#?}", self.model);
        if !goes_on {
            self.world.kill_server();
            self.world.run();
            self.server_died();
            return self.start();
        }
        if let Some(turns) = successor_dies_after {
            let adopter = self.world.adopt(100);
            self.world.some_turns(turns);
            self.world.kill_adopter(adopter);
            self.world.run();
        }
        let adopter = self.world.adopt(101);
        self.world.run();
        let inheritance = self.world.adopted(adopter).expect("a server without a launcher");
        self.model.adopt(self.launchers);
        self.launchers += 1;
        self.world.follow(adopter, 101, self.model.epoch(), inheritance);
        self.world.start_loader();
        self.world.published.clear();
    }

    pub(super) fn stops(&self) -> bool {
        let server = self.world.server.as_ref().expect("a server");
        server
            .events
            .iter()
            .any(|event| matches!(event, ServerEvent::Stop { .. }))
    }

    /// Whoever was connected to it notices. What is mapped stays mapped.
    fn server_died(&mut self) {
        for client in std::mem::take(&mut self.clients) {
            match client {
                Client::Reader { .. } => self.clients.push(client),
                Client::Engine {
                    number,
                    daemon,
                    generation,
                    memory,
                    ..
                } => {
                    let engine = &self.world.engines[number];
                    assert!(engine.lease_ended, "its lease is gone with the server");
                    let leases = false;
                    self.clients.push(Client::Engine {
                        number,
                        daemon,
                        generation,
                        memory,
                        leases,
                    });
                }
                Client::Slow { raw, .. } => self.hang_up(raw),
                Client::Watcher { raw, .. } | Client::Mute { raw, .. } | Client::Releaser { raw, .. } => {
                    assert!(
                        self.world.raws[&raw].ended,
                        "its connection is gone with the server"
                    );
                    self.hang_up(raw);
                }
            }
        }
    }
}
