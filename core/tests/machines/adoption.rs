//! A launcher goes on where another one was killed: with its server, or with copies of what it held.

use crate::socket::Dice;
use crate::world::*;
use proptest::prelude::*;
use weightd_core::content::{Comparison, Generation, HandleKind};
use weightd_core::machine::{AskError, AttachOptions, Origin, Outcome, ServerEvent, VaultEvent};
use weightd_core::peer::Peer;
use weightd_core::time::Span;
use weightd_core::wire::message::{
    self, Adopted, Control, DaemonInfo, Define, ErrorCode, Expects, Holds, Lead, Message, Publish,
    RegionInfo, Release,
};

const NEXT_PID: u32 = 11;
const NEXT_EPOCH: u64 = 0xF;

fn generation(number: u64) -> Generation {
    Generation { epoch: EPOCH, number }
}

/// Two daemons with content, whose launcher is killed.
fn orphaned() -> World {
    let mut world = World::controlled();
    kill_launcher(&mut world);
    world
}

fn kill_launcher(world: &mut World) {
    world.kill_vault();
    world.kill_loader();
    world.published.clear();
    world.run();
}

/// The next launcher adopts what it finds.
#[track_caller]
fn adopt(world: &mut World) {
    let adopter = world.adopt(NEXT_PID);
    world.run();
    let inheritance = world.adopted(adopter).unwrap();
    world.follow(adopter, NEXT_PID, NEXT_EPOCH, inheritance);
    world.run();
}

fn vault_events(world: &World) -> &[VaultEvent] {
    &world.vault.as_ref().unwrap().events
}

/// Nobody leads, and the server serves on.
#[track_caller]
fn assert_adoptable(world: &mut World) {
    let stops = |event: &ServerEvent| matches!(event, ServerEvent::Stop { .. });
    assert!(!world.server.as_ref().unwrap().events.iter().any(stops));
    adopt(world);
}

#[track_caller]
fn maps(world: &mut World, daemon: u32, generation: Generation) -> usize {
    let engine = world.attach(daemon, AttachOptions::new(UID), key(daemon));
    world.run();
    let mapped = Outcome::Mapped {
        generation,
        leased: true,
    };
    assert_eq!(world.engines[engine].end, Some(End::Done(mapped)));
    engine
}

fn wanted() -> Vec<DaemonInfo> {
    vec![info(0, false), info(1, false)]
}

#[test]
fn an_adopted_server_keeps_generations_and_leases_and_is_served_by_the_new_vault() {
    let mut world = World::controlled();
    let engine = maps(&mut world, 0, generation(1));
    kill_launcher(&mut world);
    adopt(&mut world);
    assert_eq!(vault_events(&world), [VaultEvent::Armed { complete: true }]);
    let vault = &world.vault.as_ref().unwrap().machine;
    assert_eq!(vault.holds(0), Some(Holds::Content(generation(1))));
    assert_eq!(vault.holds(1), Some(Holds::Content(generation(2))));
    assert!(vault.is_armed() && vault.is_loaded());
    assert!(!world.engines[engine].lease_ended, "it has noticed nothing");
    let led = world
        .server
        .as_ref()
        .unwrap()
        .events
        .iter()
        .filter_map(|event| match event {
            ServerEvent::Led { pid } => Some(*pid),
            _ => None,
        });
    assert_eq!(led.collect::<Vec<_>>(), [VAULT_PID, NEXT_PID]);

    // What is published from now on has the new vault's epoch.
    world.start_loader();
    world.publish(0, 77, Expects::Generation(generation(1)));
    world.run();
    let new = Generation {
        epoch: NEXT_EPOCH,
        number: 1,
    };
    maps(&mut world, 0, new);
    // And a dead server is armed with all of it.
    world.kill_server();
    world.start_server();
    world.run();
    assert_eq!(
        vault_events(&world).last(),
        Some(&VaultEvent::Armed { complete: true })
    );
    maps(&mut world, 0, new);
    maps(&mut world, 1, generation(2));
    world.finish();
}

#[test]
fn a_server_hands_on_what_armed_it_message_for_message() {
    let mut world = orphaned();
    let raw = world.raw_as(
        Origin::Control,
        Peer {
            pid: NEXT_PID,
            uid: UID,
        },
    );
    let request = world.say(raw, message::Adopt { pid: NEXT_PID }, vec![]);
    world.run();
    let frames = &world.raws[&raw].heard;
    assert!(frames.iter().all(|frame| frame.request == request));
    assert_eq!(
        frames
            .iter()
            .map(|frame| frame.descriptors.len())
            .collect::<Vec<_>>(),
        [2, 2, 2, 2, 2, 0]
    );
    let heard = world.heard(raw);
    let adopted = Adopted { pid: SERVER_PID };
    assert_eq!(
        (&heard[0], heard.last()),
        (&Control { names_stay: false }.into(), Some(&adopted.into()))
    );
    for daemon in 0..2 {
        let holds = Holds::Content(generation(u64::from(daemon) + 1));
        let info = info(daemon, false);
        assert_eq!(heard[1 + daemon as usize], Define { daemon, info, holds }.into());
        let publish = Publish {
            generation: Some(generation(u64::from(daemon) + 1)),
            ..publication(
                daemon,
                Expects::Empty,
                content(64, &[1000 * (u64::from(daemon) + 1)]),
            )
        };
        assert_eq!(heard[3 + daemon as usize], publish.into());
    }
    world.hang_up(raw);
    world.run();
    assert_adoptable(&mut world);
    world.finish();
}

#[test]
fn a_server_can_be_adopted_again_and_again() {
    let mut world = orphaned();
    for round in 0..3 {
        adopt(&mut world);
        if round == 1 {
            // Also the server that the adopting launcher started.
            world.kill_server();
            world.start_server();
            world.run();
        }
        maps(&mut world, 1, generation(2));
        kill_launcher(&mut world);
    }
    adopt(&mut world);
    world.finish();
}

#[test]
fn of_two_launchers_one_adopts_and_the_other_is_told_whose_it_is() {
    let mut world = orphaned();
    let (first, second) = (world.adopt(11), world.adopt(12));
    world.run();
    let inheritance = world.adopted(first).unwrap();
    match world.adopted(second) {
        Err(AskError::Failed {
            code: ErrorCode::NotAllowed,
            why,
        }) => assert!(why.contains("launcher 11"), "{why}"),
        other => panic!("{other:?}"),
    }
    world.follow(first, 11, NEXT_EPOCH, inheritance);
    world.run();
    assert!(world.vault.as_ref().unwrap().machine.is_armed());
    // Neither may a late one lead.
    let late = world.raw_as(Origin::Control, Peer { pid: 13, uid: UID });
    world.say(late, Lead { pid: 13 }, vec![]);
    world.run();
    assert!(matches!(&world.heard(late)[..], [Message::Failure(failure)]
        if failure.code == ErrorCode::NotAllowed.number()));
    world.finish();
}

#[test]
fn a_server_that_is_led_was_never_led_or_has_another_user_is_not_adopted() {
    let mut world = World::new();
    world.start_server();
    let adopter = world.adopt(NEXT_PID);
    world.run();
    let busy = world.adopted(adopter).unwrap_err();
    assert!(
        matches!(
            busy,
            AskError::Failed {
                code: ErrorCode::Busy,
                ..
            }
        ),
        "{busy:?}"
    );
    world.start_vault(false);
    world.lead_server();
    world.load();
    world.run();
    let adopter = world.adopt(NEXT_PID);
    world.run();
    let led = world.adopted(adopter).unwrap_err();
    assert!(
        matches!(
            led,
            AskError::Failed {
                code: ErrorCode::NotAllowed,
                ..
            }
        ),
        "{led:?}"
    );
    world.server_uid = UID + 1;
    let adopter = world.adopt(NEXT_PID);
    world.run();
    let ours = UID;
    assert_eq!(
        world.adopted(adopter).unwrap_err(),
        AskError::RefusedPeer {
            theirs: UID + 1,
            ours
        }
    );
    world.finish();
}

#[test]
fn a_release_that_comes_during_an_adoption_is_told_to_the_new_vault() {
    let mut world = orphaned();
    let adopter = world.adopt(NEXT_PID);
    world.run();
    let inheritance = world.adopted(adopter).unwrap();
    // The server has handed all over; the vault does not exist yet.
    let raw = world.raw(0);
    let release = Release {
        daemon: 0,
        generation: None,
    };
    world.say(raw, release, vec![]);
    world.run();
    assert!(world.heard(raw).is_empty(), "it waits for the launcher");
    world.follow(adopter, NEXT_PID, NEXT_EPOCH, inheritance);
    world.run();
    assert!(matches!(world.heard(raw)[..], [Message::Released(_)]));
    let vault = &world.vault.as_ref().unwrap().machine;
    assert_eq!(vault.holds(0), Some(Holds::Released(generation(1))));
    world.finish();
}

#[test]
fn what_was_released_stays_so_and_what_is_lost_or_never_came_is_told() {
    let mut world = orphaned();
    let raw = world.release(0);
    assert!(matches!(world.heard(raw)[..], [Message::Released(_)]));
    adopt(&mut world);
    assert_eq!(
        vault_events(&world),
        [VaultEvent::Armed { complete: true }],
        "nothing is to be loaded"
    );
    assert_eq!(
        world.vault.as_ref().unwrap().machine.holds(0),
        Some(Holds::Released(generation(1)))
    );
    let vault = world.vault.as_mut().unwrap();
    vault.input(|vault| vault.lost(1, generation(2)));
    world.run();
    kill_launcher(&mut world);
    // It holds nothing any more, so it ends, and is not handed over.
    let adopter = world.adopt(NEXT_PID);
    world.run();
    assert!(matches!(
        world.adopted(adopter),
        Err(AskError::Failed {
            code: ErrorCode::Busy,
            ..
        })
    ));
    world.finish();

    let mut world = orphaned();
    adopt(&mut world);
    let vault = world.vault.as_mut().unwrap();
    vault.input(|vault| vault.lost(1, generation(2)));
    world.run();
    kill_launcher(&mut world);
    adopt(&mut world);
    assert_eq!(vault_events(&world), [VaultEvent::Armed { complete: false }]);
    assert_eq!(
        world.vault.as_ref().unwrap().machine.holds(1),
        Some(Holds::Lost(generation(2)))
    );
    // And loaded afresh, under another name.
    world.start_loader();
    world.publish(1, 5, Expects::Empty);
    world.run();
    assert_eq!(
        vault_events(&world).last(),
        Some(&VaultEvent::Armed { complete: true })
    );
    maps(
        &mut world,
        1,
        Generation {
            epoch: NEXT_EPOCH,
            number: 1,
        },
    );
    world.finish();
}

#[test]
fn a_server_that_was_armed_in_part_is_adopted_and_survives_who_adopts_it() {
    let mut world = World::new();
    world.start_server();
    let leader = world.raw_as(Origin::Control, Peer { pid: 10, uid: UID });
    world.say(leader, Lead { pid: 10 }, vec![]);
    for (daemon, number) in [(0, 1), (1, 2)] {
        let (lock, listener) = (world.ledger.lock(), world.ledger.listener());
        world.listeners.push(listener.file);
        let (info, holds) = (info(daemon, false), Holds::Content(generation(number)));
        world.say(leader, Define { daemon, info, holds }, vec![lock, listener]);
    }
    let publish = Publish {
        generation: Some(generation(1)),
        ..publication(0, Expects::Empty, content(64, &[1000]))
    };
    let descriptors = vec![world.ledger.memory(64), world.ledger.memory(1000)];
    world.say(leader, publish, descriptors);
    world.run();
    world.hang_up(leader);
    world.run();
    for _ in 0..2 {
        adopt(&mut world);
        assert_eq!(vault_events(&world), [VaultEvent::Armed { complete: false }]);
        let vault = &world.vault.as_ref().unwrap().machine;
        assert_eq!(
            (vault.holds(0), vault.holds(1)),
            (Some(Holds::Content(generation(1))), Some(Holds::Empty))
        );
        maps(&mut world, 0, generation(1));
        kill_launcher(&mut world);
    }
    world.finish();
}

#[test]
fn memory_of_a_publisher_that_is_gone_is_lost_to_whoever_adopts() {
    let mut world = World::new();
    world.controlled = true;
    world.start_vault(false);
    world.start_server();
    world.load();
    let content = message::ContentInfo {
        regions: vec![RegionInfo {
            handle: HandleKind::CudaIpc,
            bytes: 9,
        }],
        ..content(64, &[])
    };
    let legacy = publication(1, Expects::Generation(generation(2)), content);
    world.run();
    let manifest = world.ledger.memory(64);
    world.loader.as_mut().unwrap().publish(legacy, vec![manifest]);
    world.run();
    kill_launcher(&mut world);
    adopt(&mut world);
    assert_eq!(
        world.vault.as_ref().unwrap().machine.holds(1),
        Some(Holds::Lost(generation(3)))
    );
    let raw = world.raw(1);
    world.say(raw, get_state_of(1), vec![]);
    world.run();
    assert!(matches!(&world.heard(raw)[..], [Message::Failure(failure)]
        if failure.code == ErrorCode::Lost.number()));
    world.finish();
}

#[test]
fn what_is_wanted_is_compared_with_what_is_there_field_by_field() {
    let mut world = orphaned();
    let adopter = world.adopt(NEXT_PID);
    world.run();
    let inheritance = world.adopted(adopter).unwrap();
    let compare = |change: &dyn Fn(&mut Vec<DaemonInfo>)| {
        let mut wanted = wanted();
        change(&mut wanted);
        inheritance.compare(&wanted)
    };
    let different =
        |fields: &[&str]| Comparison::Different(fields.iter().map(|field| field.to_string()).collect());
    assert_eq!(compare(&|_| {}), Comparison::Same);
    assert_eq!(compare(&|wanted| wanted.truncate(1)), different(&["daemons"]));
    assert_eq!(
        compare(&|wanted| wanted.swap(0, 1)),
        different(&["socket", "global_rank", "device_uuid", "tp_rank"])
    );
    assert_eq!(
        compare(&|wanted| wanted[1].no_release = true),
        different(&["no_release"])
    );
    let changed = |wanted: &mut Vec<DaemonInfo>| {
        for info in wanted {
            info.key.tp_size = 4;
            info.key.dtype = "float16".into();
        }
    };
    assert_eq!(compare(&changed), different(&["tp_size", "dtype"]));
    assert_eq!(
        compare(&|wanted| wanted[1].key.checkpoint.files = None),
        Comparison::Unknown
    );
    assert_eq!(
        compare(&|wanted| {
            wanted[0].key.checkpoint.files = None;
            wanted[1].key.revision = "x".into();
        }),
        different(&["revision"])
    );
    drop(inheritance);
    world.kill_adopter(adopter);
    world.run();
    assert_adoptable(&mut world);
    world.finish();
}

#[test]
fn names_stay_for_another_launcher_where_the_last_one_said_so() {
    let mut world = World::controlled();
    let stay = |world: &World| world.server.as_ref().unwrap().machine.names_stay();
    assert!(!stay(&world));
    let vault = world.vault.as_mut().unwrap();
    vault.input(|vault| vault.names_stay(true));
    world.run();
    assert!(stay(&world));
    // Also in the next server, and not where another launcher does not say so.
    world.kill_server();
    world.start_server();
    world.run();
    assert!(stay(&world));
    kill_launcher(&mut world);
    assert!(stay(&world));
    adopt(&mut world);
    assert!(!stay(&world));
    world.finish();
}

proptest! {
    /// Whatever the kernel does to the stream, and whenever launchers die, the server is handed on whole.
    #[test]
    fn launchers_that_die_at_any_step_of_an_adoption_leave_the_server_to_the_next(
        seed in any::<u64>(), capacity in 30..2000_usize, steps in proptest::collection::vec(0..60_usize, 1..6),
    ) {
        let mut world = World::controlled();
        let engine = maps(&mut world, 1, generation(2));
        kill_launcher(&mut world);
        world.dice = Some(Dice(seed));
        world.capacity = capacity;
        for (round, steps) in (0..).zip(steps) {
            let adopter = world.adopt(30 + round);
            world.some_turns(steps);
            let over = world.adopters.get_mut(&adopter).unwrap().is_over(world.now);
            if over && steps % 2 == 0 {
                let inheritance = world.adopted(adopter).unwrap();
                prop_assert_eq!(inheritance.compare(&wanted()), Comparison::Same);
                world.follow(adopter, 30 + round, 100 + u64::from(round), inheritance);
                world.some_turns(steps);
                world.kill_vault();
            } else {
                world.kill_adopter(adopter);
            }
            world.run();
        }
        adopt(&mut world);
        prop_assert!(world.vault.as_ref().unwrap().machine.is_armed());
        prop_assert!(!world.engines[engine].lease_ended);
        maps(&mut world, 0, generation(1));
        maps(&mut world, 1, generation(2));
        world.finish();
    }
}

#[test]
fn an_orphan_looks_whether_it_is_found_and_ends_when_it_was_not_twice_in_a_row() {
    let looks_seen = |world: &World| {
        let events = &world.server.as_ref().unwrap().events;
        events.iter().filter(|event| **event == ServerEvent::Look).count()
    };
    for (looks, ends) in [
        (&[true, true, true][..], false),
        (&[false], false),
        (&[false, true, false], false),
        (&[true, false, false], true),
    ] {
        let mut world = orphaned();
        for (before, &found) in looks.iter().enumerate() {
            assert_eq!(looks_seen(&world), before);
            world.pass(Span::secs(5));
            assert_eq!(looks_seen(&world), before + 1);
            let now = world.now;
            let server = world.server.as_mut().unwrap();
            server.input(|server| server.looked(now, found));
            world.run();
        }
        let events = &world.server.as_ref().unwrap().events;
        let stop = ServerEvent::Stop { orphaned: true };
        assert_eq!(events.ends_with(&[ServerEvent::CutOff, stop]), ends, "{events:?}");
        if !ends {
            // Who is led again has no need to.
            adopt(&mut world);
            let before = looks_seen(&world);
            world.pass(Span::secs(60));
            assert_eq!(looks_seen(&world), before);
            // What was missed before counts no more.
            kill_launcher(&mut world);
            world.pass(Span::secs(5));
            let now = world.now;
            let server = world.server.as_mut().unwrap();
            server.input(|server| server.looked(now, false));
            assert!(!server.events.contains(&ServerEvent::CutOff));
        }
    }
}
