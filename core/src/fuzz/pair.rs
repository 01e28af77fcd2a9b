//! Engines and publishers, the server and its launchers, with chaos between them: splits, merges, delays, and peers
//! that vanish.

use super::Input;
use crate::content::Generation;
use crate::machine::{AttachOptions, Fault, HandoverEvent, Mode, Outcome, Publish, VaultEvent};
use crate::testing::ledger::File;
use crate::testing::socket::Dice;
use crate::testing::world::*;
use crate::time::Span;
use crate::wire::message::{Expects, GetMemory, GetState, Release};
use std::collections::{BTreeMap, BTreeSet};

/// The most operations of an input: enough for anything, and quick.
const OPERATIONS: usize = 40;

/// The daemon that engines publish to; the others are loaded.
const PUBLISHED: u32 = 2;

/// Lives through the operations of an input. Checks that
///
/// * nothing panics, the world comes to rest, and whoever asks is answered, within its time;
/// * no descriptor is lost, and none is open that nobody has a use for;
/// * a generation is one content, whoever maps it, and is never given twice;
/// * the node is as good as new afterwards.
pub fn pair(input: &[u8]) {
    let mut input = Input::new(input);
    let seed = input.short();
    let mut operations = Vec::new();
    while !input.is_empty() && operations.len() < OPERATIONS {
        operations.push(operation(&mut input));
    }
    live_through(seed, operations);
}

fn operation(input: &mut Input<'_>) -> Operation {
    use Operation::*;
    let which = input.below(16);
    let daemon = input.below(2) as u32;
    match which {
        0 | 1 => Attach {
            daemon: input.below(3) as u32,
            copy: input.flag(),
            fallback: input.flag(),
            works: input.short() % 15_000,
        },
        2 => EndEngine(input.below(256)),
        3 | 4 => Publish {
            daemon,
            bytes: 1 + input.short() % 5000,
            stale: input.flag(),
        },
        5 | 6 => SendPublisher {
            bytes: 1 + input.short() % 5000,
            fails: input.below(4) == 3,
        },
        7 => Release {
            daemon: input.below(3) as u32,
            any: input.flag(),
        },
        8 => RestartServer {
            after: input.short() % 20_000,
        },
        9 => Adopt {
            dies_after: input.below(60),
        },
        10 => Raw {
            daemon,
            cut: input.short() as usize % 400,
            deaf: input.flag(),
        },
        11 => HangUp(input.below(256)),
        12 => HoldReaper(input.flag()),
        13 => Turns(input.below(12)),
        14 => Pass(input.short() % 8000),
        _ => Narrow(input.one_of(&[5, 36, 200_000])),
    }
}

#[derive(Clone, Debug)]
pub enum Operation {
    Attach {
        daemon: u32,
        copy: bool,
        fallback: bool,
        works: u64,
    },
    EndEngine(usize),
    Publish {
        daemon: u32,
        bytes: u64,
        stale: bool,
    },
    /// An engine that publishes what it made itself.
    SendPublisher {
        bytes: u64,
        fails: bool,
    },
    Release {
        daemon: u32,
        any: bool,
    },
    RestartServer {
        after: u64,
    },
    /// The launcher dies, the next one too, in the middle of adopting, and another adopts.
    Adopt {
        dies_after: usize,
    },
    Raw {
        daemon: u32,
        cut: usize,
        deaf: bool,
    },
    HangUp(usize),
    HoldReaper(bool),
    /// What was begun goes on for a few rounds only, and the next operation comes in the middle of it.
    Turns(usize),
    Pass(u64),
    Narrow(usize),
}

/// What the world must be like, as a few numbers: per daemon what the vault holds.
#[derive(Default)]
struct Model {
    current: [Option<Generation>; 3],
    files: BTreeMap<Generation, File>,
    sizes: BTreeMap<Generation, u64>,
    /// Published, not answered yet.
    pending: Vec<(u32, File, u64)>,
    adoptions: u32,
}

impl Model {
    fn learn(&mut self, world: &mut World) {
        for event in std::mem::take(&mut world.published) {
            let (_, file, bytes) = self.pending.remove(0);
            if let HandoverEvent::Published { daemon, generation } = event {
                assert!(
                    self.files.insert(generation, file).is_none(),
                    "a generation is never reused"
                );
                self.sizes.insert(generation, bytes);
                self.current[daemon as usize] = Some(generation);
            }
        }
        let vault = world.vault.as_mut().expect("a vault");
        // Of this daemon nobody but its publishers could tell, and they may be gone.
        let content = vault.machine.content(PUBLISHED);
        self.current[PUBLISHED as usize] = content.map(|(generation, ..)| generation);
        if let Some((generation, info, descriptors)) = content {
            let known = *self.files.entry(generation).or_insert(descriptors[1].file);
            assert_eq!(known, descriptors[1].file, "a generation is one content");
            self.sizes.insert(generation, info.bytes());
        }
        for event in std::mem::take(&mut vault.events) {
            if let VaultEvent::Released { daemon, generation } = event {
                let current = &mut self.current[daemon as usize];
                current.take_if(|current| *current == generation);
            }
        }
    }
}

fn apply(world: &mut World, model: &mut Model, operation: Operation) {
    let loaded = world
        .vault
        .as_ref()
        .is_some_and(|vault| vault.machine.is_loaded());
    match operation {
        Operation::Attach {
            daemon,
            copy,
            fallback,
            works,
        } => {
            let mode = if copy { Mode::Copy } else { Mode::ZeroCopy };
            let state_timeout = Span::secs(20);
            let options = AttachOptions {
                mode,
                fallback,
                state_timeout,
                ..AttachOptions::new(UID)
            };
            let engine = world.attach(daemon, options, key(daemon));
            world.engines[engine].works = Span::millis(works);
        }
        Operation::EndEngine(which) if !world.engines.is_empty() => {
            world.end_engine(which % world.engines.len());
        }
        Operation::Publish { daemon, bytes, stale } => {
            let expects = match model.current[daemon as usize] {
                Some(generation) if !stale => Expects::Generation(generation),
                _ => Expects::Empty,
            };
            let file = world.publish(daemon, bytes, expects);
            model.pending.push((daemon, file, bytes));
        }
        Operation::SendPublisher { bytes, fails } => {
            let mut key = key(PUBLISHED);
            if bytes % 2 == 1 {
                key.revision = "another".to_owned();
            }
            let publish = Publish::new(&AttachOptions::new(UID), key);
            let engine = world.send_out(PUBLISHED, Errand::Publish(publish));
            let fault = || Fault::Other("the test says so".to_owned());
            world.engines[engine].fill = (!fails).then_some(bytes).ok_or_else(fault);
        }
        Operation::Release { daemon, any } => {
            let raw = world.raw(daemon);
            let generation = model.current[daemon as usize].filter(|_| !any);
            world.say(
                raw,
                Release {
                    daemon: 7,
                    generation,
                },
                vec![],
            );
        }
        Operation::RestartServer { after } => {
            world.kill_server();
            world.pass(Span::millis(after));
            world.start_server();
        }
        // A server that holds nothing, or not everything yet, ends with its launcher.
        Operation::Adopt { dies_after } if loaded && model.current.iter().any(Option::is_some) => {
            world.kill_vault();
            world.kill_loader();
            let adopter = world.adopt(100);
            world.some_turns(dies_after);
            world.kill_adopter(adopter);
            world.run();
            let adopter = world.adopt(101);
            world.run();
            let inheritance = world.adopted(adopter).expect("a server without a launcher");
            model.adoptions += 1;
            world.follow(adopter, 101, EPOCH + u64::from(model.adoptions), inheritance);
            world.start_loader();
        }
        Operation::Raw { daemon, cut, deaf } => {
            let raw = world.raw(daemon);
            let mut bytes = frame(&GetMemory {}.into(), 1, 0);
            bytes.extend(frame(
                &GetState {
                    key: key(daemon),
                    is_reload: true,
                }
                .into(),
                2,
                0,
            ));
            bytes.truncate(cut.max(1));
            world.send(raw, &bytes, vec![]);
            world.raws.get_mut(&raw).unwrap().deaf = deaf;
        }
        Operation::HangUp(which) if !world.raws.is_empty() => {
            let raw = *world.raws.keys().nth(which % world.raws.len()).unwrap();
            world.hang_up(raw);
        }
        Operation::HoldReaper(hold) => world.hold_reaper = hold,
        Operation::Turns(turns) => world.some_turns(turns),
        Operation::Pass(millis) => world.pass(Span::millis(millis)),
        Operation::Narrow(capacity) => world.capacity = capacity,
        Operation::EndEngine(_) | Operation::HangUp(_) | Operation::Adopt { .. } => {}
    }
}

/// Everybody gets time, and nobody is stuck.
fn comes_to_rest(world: &mut World, model: &mut Model) {
    world.hold_reaper = false;
    for raw in world.raws.values_mut() {
        raw.deaf = false;
        raw.heard.clear();
    }
    world.pass(Span::secs(200));
    for raw in world.raws.values_mut() {
        raw.heard.clear();
    }
    model.learn(world);
    assert_eq!(model.pending.len(), 0, "every publication is answered");
    let published = world.engines.iter().filter_map(|engine| match &engine.end {
        Some(End::Published(published)) => Some(published.generation),
        _ => None,
    });
    let published: Vec<Generation> = published.collect();
    let unique: BTreeSet<&Generation> = published.iter().collect();
    assert_eq!(unique.len(), published.len(), "a generation is never reused");
    for engine in &world.engines {
        let end = engine.end.as_ref().expect("every attach ends within its time");
        if let End::Done(Outcome::Mapped { generation, .. }) = end
            && let Some(mapped) = &engine.mapped
        {
            assert_eq!(mapped.state.generation, *generation);
            let file = mapped.regions[0].file;
            let known = *model.files.entry(*generation).or_insert(file);
            assert_eq!(file, known, "a generation is one content");
            let bytes = mapped.state.content.bytes();
            assert_eq!(bytes, *model.sizes.entry(*generation).or_insert(bytes));
        }
    }
    assert_eq!(
        world.ledger.lost(),
        [],
        "descriptors are discarded, never dropped"
    );
    // Vault and server hold what is current, once each, and nothing else; the rest are mappings.
    for (generation, file) in &model.files {
        let held = if model.current.contains(&Some(*generation)) {
            2
        } else {
            0
        };
        let mapped = world.engines.iter().filter_map(|engine| engine.mapped.as_ref());
        let mapped = mapped
            .filter(|mapped| mapped.state.generation == *generation)
            .count();
        let filled = world.engines.iter().filter_map(|engine| engine.filled.as_ref());
        let filled = filled.filter(|filled| filled[1].file == *file).count();
        assert_eq!(
            world.ledger.open_of(*file),
            held + mapped + filled,
            "{generation} of {:?}",
            model.current
        );
    }
}

/// See [`pair`]; the seed is the chaos.
pub fn live_through(seed: u64, operations: Vec<Operation>) {
    let mut world = World::new();
    world.dice = Some(Dice(seed));
    world.controlled = true;
    world.start_vault_of([info(0, false), info(1, false), publishable(PUBLISHED)]);
    world.start_server();
    world.start_loader();
    let mut model = Model::default();
    let mut operations = operations.into_iter().peekable();
    while let Some(operation) = operations.next() {
        apply(&mut world, &mut model, operation);
        if !matches!(operations.peek(), Some(Operation::Turns(_))) {
            world.run();
        }
        model.learn(&mut world);
    }
    comes_to_rest(&mut world, &mut model);
    // The node is as good as new.
    for daemon in 0..2 {
        if let Some(generation) = model.current[daemon as usize] {
            let engine = world.attach(daemon, AttachOptions::new(UID), key(daemon));
            world.pass(Span::secs(1));
            let mapped = Outcome::Mapped {
                generation,
                leased: true,
            };
            assert_eq!(world.engines[engine].end, Some(End::Done(mapped)));
        }
    }
    world.finish();
}
