//! Publishers, readers and operators at once, while servers and launchers die: whatever happens, vault and
//! server agree, everyone is answered or sent away, and no descriptor is left over.

use super::*;
use crate::socket::Dice;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
enum Operation {
    Publish {
        daemon: DaemonId,
        bytes: u64,
        stale: bool,
    },
    Read(DaemonId),
    Release(DaemonId),
    HangUp(usize),
    RestartServer {
        after: u64,
    },
    /// The launcher dies, and another one adopts.
    Adopt,
    HoldReaper(bool),
    Turns(usize),
    Pass(u64),
}

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    prop_oneof![
        6 => (0..2_u32, 1..5000_u64, any::<bool>())
            .prop_map(|(daemon, bytes, stale)| Publish { daemon, bytes, stale }),
        4 => (0..2_u32).prop_map(Read),
        1 => (0..2_u32).prop_map(Release),
        2 => any::<usize>().prop_map(HangUp),
        2 => (0..20_000_u64).prop_map(|after| RestartServer { after }),
        2 => Just(Adopt),
        1 => any::<bool>().prop_map(HoldReaper),
        4 => (0..12_usize).prop_map(Turns),
        1 => (0..8_000_u64).prop_map(Pass),
    ]
}

struct Node {
    world: World,
    /// The memory of each publication, by its connection.
    said: BTreeMap<usize, File>,
    /// What each generation is, as far as it was seen.
    known: BTreeMap<Generation, File>,
    adoptions: u64,
}

impl Node {
    fn current(&self, daemon: DaemonId) -> Option<(Generation, File)> {
        let vault = &self.world.vault.as_ref()?.machine;
        let (generation, _, descriptors) = vault.content(daemon)?;
        Some((generation, descriptors[1].file))
    }

    fn learn(&mut self, generation: Generation, file: File) {
        let known = *self.known.entry(generation).or_insert(file);
        assert_eq!(known, file, "a generation is one content");
    }

    fn look(&mut self) {
        for daemon in 0..2 {
            if let Some((generation, file)) = self.current(daemon) {
                self.learn(generation, file);
            }
        }
        let mut seen = Vec::new();
        for (raw, client) in &mut self.world.raws {
            for frame in std::mem::take(&mut client.heard) {
                match Message::decode(frame.kind, &frame.body).expect("a message") {
                    Message::Published(published) => seen.push((published.generation, self.said[raw])),
                    Message::State(state) => seen.push((state.generation, frame.descriptors[1].1.file)),
                    _ => {}
                }
            }
        }
        for (generation, file) in seen {
            self.learn(generation, file);
        }
    }

    fn apply(&mut self, operation: Operation) {
        match operation {
            Operation::Publish { daemon, bytes, stale } => {
                let expects = match self.current(daemon) {
                    Some((generation, _)) if !stale => Expects::Generation(generation),
                    _ => Expects::Empty,
                };
                let raw = self.world.raw(daemon);
                let file = say(&mut self.world, raw, daemon, bytes, expects);
                self.said.insert(raw, file);
            }
            Operation::Read(daemon) => {
                let raw = self.world.raw(daemon);
                let (key, is_reload) = (key(daemon), false);
                self.world.say(raw, GetState { key, is_reload }, vec![]);
            }
            Operation::Release(daemon) => {
                let raw = self.world.raw(daemon);
                let generation = None;
                let release = weightd_core::wire::message::Release { daemon, generation };
                self.world.say(raw, release, vec![]);
            }
            Operation::HangUp(which) if !self.world.raws.is_empty() => {
                let raws = &self.world.raws;
                let raw = *raws.keys().nth(which % raws.len()).expect("one of them");
                self.world.hang_up(raw);
                self.world.raws.remove(&raw);
            }
            Operation::RestartServer { after } => {
                self.world.kill_server();
                self.world.pass(Span::millis(after));
                self.world.start_server();
            }
            // A server that holds nothing ends with its launcher.
            Operation::Adopt if self.serves() => {
                self.world.kill_vault();
                self.world.run();
                let adopter = self.world.adopt(NEXT_PID);
                self.world.run();
                let inheritance = self.world.adopted(adopter).expect("a server without a launcher");
                self.adoptions += 1;
                let epoch = EPOCH + self.adoptions;
                self.world.follow(adopter, NEXT_PID, epoch, inheritance);
            }
            Operation::HoldReaper(hold) => self.world.hold_reaper = hold,
            Operation::Turns(turns) => self.world.some_turns(turns),
            Operation::Pass(millis) => self.world.pass(Span::millis(millis)),
            Operation::HangUp(_) | Operation::Adopt => {}
        }
    }

    /// Whether the server itself holds content, once all that is under way is done.
    fn serves(&mut self) -> bool {
        self.world.run();
        let armed = self
            .world
            .vault
            .as_ref()
            .is_some_and(|vault| vault.machine.is_armed());
        armed && (0..2).any(|daemon| self.current(daemon).is_some())
    }

    fn comes_to_rest(&mut self) {
        self.world.hold_reaper = false;
        self.world.pass(Span::secs(200));
        self.look();
        for (raw, client) in &self.world.raws {
            assert!(client.ended, "client {raw} was answered, and idle for long");
        }
        // Half of what a server was sending when it died.
        self.world.raws.clear();
        assert_eq!(
            self.world.ledger.lost(),
            [],
            "descriptors are discarded, never dropped"
        );
        let current = [0, 1].map(|daemon| self.current(daemon));
        for (generation, file) in &self.known {
            let kept = if current.contains(&Some((*generation, *file))) {
                2
            } else {
                0
            };
            assert_eq!(self.world.ledger.open_of(*file), kept, "{generation}");
        }
        for file in self.said.values() {
            let holds = |held: &Option<(Generation, File)>| held.is_some_and(|(_, held)| held == *file);
            assert!(self.world.ledger.open_of(*file) == 0 || current.iter().any(holds));
        }
        for daemon in 0..2 {
            let vault = &self.world.vault.as_ref().expect("a vault").machine;
            let (holds, key) = (
                vault.holds(daemon).unwrap(),
                vault.info(daemon).unwrap().key.clone(),
            );
            let status = status(&mut self.world, daemon);
            assert_eq!((status.holds, status.info.key), (holds, key));
            let expects = match holds {
                Holds::Content(generation) => Expects::Generation(generation),
                _ => Expects::Empty,
            };
            let (_, answer) = publish(&mut self.world, daemon, 5, expects);
            assert!(answer.is_ok(), "the node is as good as new");
        }
    }
}

proptest! {
    #[test]
    fn whatever_happens_vault_and_server_agree_and_nothing_is_left_over(
        seed in any::<u64>(),
        operations in proptest::collection::vec(operation(), 1..25),
    ) {
        let mut world = waiting();
        world.dice = Some(Dice(seed));
        let mut node = Node { world, said: BTreeMap::new(), known: BTreeMap::new(), adoptions: 0 };
        for operation in operations {
            node.apply(operation);
            node.look();
        }
        node.comes_to_rest();
        node.world.finish();
    }
}
