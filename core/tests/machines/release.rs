//! Letting content go.

use crate::ledger::File;
use crate::world::*;
use weightd_core::content::Generation;
use weightd_core::machine::{AttachError, AttachOptions, ServerEvent, VaultEvent};
use weightd_core::time::Span;
use weightd_core::wire::message::{ErrorCode, Expects, GetMemory, Message, Release};

fn generation(number: u64) -> Generation {
    Generation { epoch: EPOCH, number }
}

/// A node whose daemon 0 holds generation 1, and the file of its memory.
fn loaded() -> (World, File) {
    let mut world = World::new();
    world.start_vault(false);
    world.start_server();
    world.start_loader();
    let file = world.publish(0, 1000, Expects::Empty);
    world.publish(1, 2000, Expects::Empty);
    world.run();
    assert_eq!(world.ledger.open_of(file), 2);
    (world, file)
}

fn released(heard: &[Message]) -> bool {
    matches!(heard, [Message::Released(_)])
}

fn code(heard: &[Message]) -> ErrorCode {
    match heard {
        [Message::Failure(failure)] => ErrorCode::from_number(failure.code),
        other => panic!("{other:?} is no single failure"),
    }
}

fn release(world: &mut World, raw: usize, generation: Option<Generation>) {
    world.say(
        raw,
        Release {
            daemon: 0,
            generation,
        },
        vec![],
    );
    world.run();
}

#[test]
fn a_release_is_answered_when_vault_and_server_have_closed() {
    let (mut world, file) = loaded();
    world.hold_reaper = true;
    let raw = world.raw(0);
    release(&mut world, raw, Some(generation(1)));
    assert!(world.heard(raw).is_empty(), "neither has closed");
    let now = world.now;
    let server = world.server.as_mut().unwrap();
    for (id, fd) in std::mem::take(&mut server.discards) {
        fd.close();
        server.input(|server| weightd_core::machine::Machine::discarded(server, now, id));
    }
    world.run();
    assert!(world.heard(raw).is_empty(), "the vault has not closed");
    assert_eq!(world.ledger.open_of(file), 1);
    world.hold_reaper = false;
    world.run();
    assert!(released(&world.heard(raw)));
    assert_eq!(world.ledger.open_of(file), 0);
    let let_go = ServerEvent::Released {
        daemon: 0,
        generation: generation(1),
    };
    assert!(world.server.as_ref().unwrap().events.contains(&let_go));
    let let_go = VaultEvent::Released {
        daemon: 0,
        generation: generation(1),
    };
    assert!(world.vault.as_ref().unwrap().events.contains(&let_go));
    world.finish();
}

#[test]
fn closing_takes_its_time_and_holds_up_nobody_but_who_asked_for_the_release() {
    let (mut world, file) = loaded();
    world.hold_reaper = true;
    let raw = world.raw(0);
    release(&mut world, raw, None);
    let engine = world.attach(1, AttachOptions::new(UID), key(1));
    let released = world.attach(0, AttachOptions::new(UID), key(0));
    world.run();
    assert!(matches!(world.engines[engine].end, Some(End::Done(_))));
    assert!(matches!(
        world.engines[released].end,
        Some(End::Disk(AttachError::Released { .. }))
    ));
    assert!(world.heard(raw).is_empty());
    assert_eq!(world.ledger.open_of(file), 2, "nothing is closed yet");
    world.hold_reaper = false;
    world.run();
    assert_eq!(world.ledger.open_of(file), 0);
    world.finish();
}

#[test]
fn a_release_is_idempotent_and_everyone_who_asks_meanwhile_is_answered() {
    let (mut world, _) = loaded();
    world.hold_reaper = true;
    let (first, second, gone) = (world.raw(0), world.raw(0), world.raw(0));
    release(&mut world, first, None);
    release(&mut world, second, Some(generation(1)));
    release(&mut world, gone, None);
    world.hang_up(gone);
    world.hold_reaper = false;
    world.run();
    assert!(released(&world.heard(first)) && released(&world.heard(second)));
    release(&mut world, first, None);
    release(&mut world, second, Some(generation(1)));
    assert!(released(&world.heard(first)) && released(&world.heard(second)));
    world.finish();
}

#[test]
fn a_stale_generation_releases_nothing() {
    let (mut world, file) = loaded();
    let raw = world.raw(0);
    release(&mut world, raw, Some(generation(2)));
    assert_eq!(code(&world.heard(raw)), ErrorCode::StaleGeneration);
    assert_eq!(world.ledger.open_of(file), 2);
    world.finish();
}

#[test]
fn no_release_refuses_it() {
    let mut world = World::new();
    world.start_vault(true);
    world.start_server();
    world.load();
    world.run();
    let raw = world.raw(0);
    release(&mut world, raw, None);
    assert_eq!(code(&world.heard(raw)), ErrorCode::NotAllowed);
    world.say(raw, get_state_of(0), vec![]);
    world.run();
    assert!(matches!(world.heard(raw)[..], [Message::State(_)]));
    world.finish();
}

#[test]
fn what_was_released_is_not_armed_again() {
    let (mut world, file) = loaded();
    let raw = world.raw(0);
    release(&mut world, raw, None);
    world.kill_server();
    world.start_server();
    world.run();
    assert_eq!(world.ledger.open_of(file), 0);
    let options = AttachOptions {
        fallback: true,
        ..AttachOptions::new(UID)
    };
    let engine = world.attach(0, options, key(0));
    world.run();
    assert!(matches!(
        world.engines[engine].end,
        Some(End::Disk(AttachError::Released { .. }))
    ));
    let raw = world.raw(0);
    release(&mut world, raw, Some(generation(1)));
    assert!(released(&world.heard(raw)), "still idempotent");
    let vault = world.vault.as_ref().unwrap();
    assert_eq!(vault.events.last(), Some(&VaultEvent::Armed { complete: true }));
    world.finish();
}

#[test]
fn a_release_waits_for_a_reply_that_still_carries_the_content_until_its_reader_is_ended() {
    for reads_after_all in [true, false] {
        let (mut world, file) = loaded();
        // One answer fills this reader's socket, so that no byte of the state leaves.
        world.capacity = 36;
        let reader = world.raw(0);
        world.capacity = 200_000;
        world.raws.get_mut(&reader).unwrap().deaf = true;
        world.say(reader, GetMemory {}, vec![]);
        world.say(reader, get_state_of(0), vec![]);
        world.run();
        let raw = world.raw(0);
        release(&mut world, raw, None);
        assert!(world.heard(raw).is_empty(), "the queued reply needs the content");
        assert_eq!(world.ledger.open_of(file), 1, "in the server alone");
        if reads_after_all {
            world.raws.get_mut(&reader).unwrap().deaf = false;
            world.run();
            let last = world.raws.get_mut(&reader).unwrap().heard.pop().expect("a state");
            assert_eq!(last.descriptors.len(), 2);
        } else {
            world.pass(Span::secs(6));
        }
        assert!(released(&world.heard(raw)));
        assert_eq!(world.ledger.open_of(file), 0);
        world.finish();
    }
}

#[test]
fn a_state_that_was_queued_before_a_release_is_whole() {
    let (mut world, file) = loaded();
    let reader = world.raw(0);
    world.say(reader, get_state_of(0), vec![]);
    let raw = world.release(0);
    let frames = std::mem::take(&mut world.raws.get_mut(&reader).unwrap().heard);
    assert_eq!(frames[0].descriptors.len(), 2);
    assert!(released(&world.heard(raw)));
    assert_eq!(world.ledger.open_of(file), 1, "the reader's own");
    drop(frames);
    world.finish();
}

#[test]
fn a_vault_that_dies_in_a_release_leaves_nobody_waiting() {
    let (mut world, file) = loaded();
    world.hold_reaper = true;
    let raw = world.raw(0);
    release(&mut world, raw, None);
    world.kill_vault();
    world.run();
    assert!(world.heard(raw).is_empty(), "the server itself has not closed");
    world.hold_reaper = false;
    world.run();
    assert!(released(&world.heard(raw)));
    assert_eq!(world.ledger.open_of(file), 0);
    world.finish();
}

#[test]
fn a_server_that_dies_in_a_release_ends_the_connection_and_the_release_stands_or_not() {
    let (mut world, file) = loaded();
    let raw = world.raw(0);
    world.hold_reaper = true;
    release(&mut world, raw, None);
    world.kill_server();
    world.hold_reaper = false;
    world.run();
    assert!(world.raws[&raw].ended && world.heard(raw).is_empty());
    world.start_server();
    world.run();
    assert_eq!(world.ledger.open_of(file), 0, "the vault had heard of it");
    world.finish();
}

#[test]
fn new_content_during_a_release_does_not_lose_who_waits_for_it() {
    let (mut world, _) = loaded();
    world.hold_reaper = true;
    let (first, second) = (world.raw(0), world.raw(0));
    release(&mut world, first, None);
    world.publish(0, 500, Expects::Empty);
    world.run();
    release(&mut world, second, Some(generation(3)));
    assert!(world.heard(first).is_empty() && world.heard(second).is_empty());
    world.hold_reaper = false;
    world.run();
    assert!(released(&world.heard(first)), "generation 1 is closed");
    assert!(released(&world.heard(second)), "generation 3 is closed");
    world.finish();
}

#[test]
fn who_waits_for_a_release_is_not_read_and_has_a_deadline() {
    let (mut world, _) = loaded();
    world.hold_reaper = true;
    let raw = world.raw(0);
    release(&mut world, raw, None);
    let flood = vec![7; 100_000];
    world.send(raw, &flood, vec![]);
    world.run();
    let waiting = world
        .server
        .as_ref()
        .unwrap()
        .interest
        .values()
        .filter(|interest| !interest.0)
        .count();
    assert_eq!(waiting, 1, "only what one read returned is kept");
    world.pass(Span::secs(119));
    assert!(!world.raws[&raw].ended);
    world.pass(Span::secs(2));
    assert_eq!(code(&world.heard(raw)), ErrorCode::Timeout);
    assert!(world.raws[&raw].ended);
    world.finish();
}

#[test]
fn who_was_told_that_a_release_takes_long_is_not_answered_once_more() {
    let (mut world, file) = loaded();
    world.hold_reaper = true;
    // Too small for any answer, so that the first stays queued.
    world.capacity = 4;
    let slow = world.raw(0);
    world.capacity = 200_000;
    release(&mut world, slow, None);
    world.raws.get_mut(&slow).unwrap().deaf = true;
    world.pass(Span::secs(119));
    let patient = world.raw(0);
    release(&mut world, patient, None);
    world.pass(Span::secs(2));
    world.hold_reaper = false;
    world.run();
    assert!(released(&world.heard(patient)));
    assert_eq!(world.ledger.open_of(file), 0);
    assert!(!world.raws[&slow].ended, "its answer has not left");
    world.raws.get_mut(&slow).unwrap().deaf = false;
    world.run();
    assert_eq!(code(&world.heard(slow)), ErrorCode::Timeout);
    assert!(world.raws[&slow].ended);
    world.finish();
}
