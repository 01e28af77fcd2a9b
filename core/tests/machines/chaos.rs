//! Seeds and sequences of operations: whatever happens, descriptors are kept, generations mean
//! what they say, and whoever asks is answered.

use crate::ledger::File;
use crate::wire::Dice;
use crate::world::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use weightd_core::content::Generation;
use weightd_core::machine::{AttachOptions, HandoverEvent, Mode, Outcome};
use weightd_core::time::Span;
use weightd_core::wire::message::{Expects, GetMemory, GetState, Release};

#[derive(Clone, Debug)]
enum Operation {
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
    Pass(u64),
    Narrow(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    use Operation::*;
    prop_oneof![
        4 => (0..2_u32, any::<bool>(), any::<bool>(), 0..15_000_u64)
            .prop_map(|(daemon, copy, fallback, works)| Attach { daemon, copy, fallback, works }),
        2 => any::<usize>().prop_map(EndEngine),
        3 => (0..2_u32, 1..5000_u64, any::<bool>())
            .prop_map(|(daemon, bytes, stale)| Publish { daemon, bytes, stale }),
        1 => (0..2_u32, any::<bool>()).prop_map(|(daemon, any)| Release { daemon, any }),
        2 => (0..20_000_u64).prop_map(|after| RestartServer { after }),
        2 => (0..60_usize).prop_map(|dies_after| Adopt { dies_after }),
        3 => (0..2_u32, 0..400_usize, any::<bool>()).prop_map(|(daemon, cut, deaf)| Raw { daemon, cut, deaf }),
        2 => any::<usize>().prop_map(HangUp),
        1 => any::<bool>().prop_map(HoldReaper),
        3 => (0..8_000_u64).prop_map(Pass),
        1 => prop_oneof![Just(5), Just(36), Just(200_000)].prop_map(Narrow),
    ]
}

/// What the world must be like, as a few numbers: per daemon what the vault holds.
#[derive(Default)]
struct Model {
    current: [Option<Generation>; 2],
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
        for event in std::mem::take(&mut vault.events) {
            if let weightd_core::machine::VaultEvent::Released { daemon, generation } = event {
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
    for engine in &world.engines {
        let end = engine.end.as_ref().expect("every attach ends within its time");
        if let End::Done(Outcome::Mapped { generation, .. }) = end
            && let Some(mapped) = &engine.mapped
        {
            assert_eq!(mapped.state.generation, *generation);
            assert_eq!(
                mapped.regions[0].file, model.files[generation],
                "a generation is one content"
            );
            assert_eq!(mapped.state.content.bytes(), model.sizes[generation]);
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
        assert_eq!(
            world.ledger.open_of(*file),
            held + mapped,
            "{generation} of {:?}",
            model.current
        );
    }
}

fn live_through(seed: u64, operations: Vec<Operation>) {
    let mut world = World::new();
    world.dice = Some(Dice(seed));
    world.controlled = true;
    world.start_vault(false);
    world.start_server();
    world.start_loader();
    let mut model = Model::default();
    for operation in operations {
        apply(&mut world, &mut model, operation);
        world.run();
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

proptest! {
    #[test]
    fn whatever_happens_descriptors_are_kept_and_everyone_is_answered(
        seed in any::<u64>(),
        operations in proptest::collection::vec(operation(), 1..25),
    ) {
        live_through(seed, operations);
    }

    #[test]
    fn an_attach_comes_through_any_splitting_and_merging(seed in any::<u64>(), capacity in 1..500_usize) {
        let mut world = World::new();
        world.dice = Some(Dice(seed));
        world.capacity = capacity;
        world.start_vault(false);
        world.start_server();
        world.load();
        let engines: Vec<usize> =
            (0..4).map(|number| world.attach(number % 2, AttachOptions::new(UID), key(number % 2))).collect();
        let patient = AttachOptions { fallback: false, ..AttachOptions::new(UID) };
        let late = world.attach(0, patient, key(0));
        world.pass(Span::secs(10));
        let served = matches!(world.engines[late].end, Some(End::Done(Outcome::Mapped { leased: true, .. })));
        prop_assert!(served);
        let ended = engines.iter().all(|engine| world.engines[*engine].end.is_some());
        prop_assert!(ended);
        world.finish();
    }
}
