//! Names that were removed and made again, under everybody who uses them.

use crate::ledger::File;
use crate::world::*;
use weightd_core::content::Generation;
use weightd_core::machine::{AttachOptions, Ends, Origin, Outcome, VaultEvent, is_end_name};
use weightd_core::peer::Peer;
use weightd_core::time::Span;

fn generation(number: u64) -> Generation {
    Generation { epoch: EPOCH, number }
}

/// Daemon 0 gets another lock and listener, as its launcher would give it; returns their files.
fn replace_first(world: &mut World) -> [File; 2] {
    let ends = world.ends();
    let files = files(&ends);
    world.listeners[0] = files[1];
    let vault = world.vault.as_mut().unwrap();
    vault.input(|vault| vault.replace_ends(0, ends));
    files
}

fn files(ends: &Ends<crate::ledger::Fd>) -> [File; 2] {
    [ends.lock().file, ends.listener().file]
}

#[test]
fn the_next_server_gets_other_ends_and_the_same_content_and_the_old_ones_are_let_go() {
    let mut world = World::controlled();
    let server = world.server.as_ref().unwrap();
    let before = [files(&server.listening[&0]), files(&server.listening[&1])];
    let old_control = files(server.machine.control_ends().unwrap());
    let engine = world.attach(0, AttachOptions::new(UID), key(0));
    world.run();

    let replaced = replace_first(&mut world);
    let control = world.ends();
    let new_control = files(&control);
    let now = world.now;
    world.vault.as_mut().unwrap().input(|vault| {
        vault.replace_control(control);
        vault.stop_server(now);
    });
    world.run();
    assert!(!world.engines[engine].lease_ended, "it ends with the server");
    // It connects to the new listener while no server has it.
    let between = world.attach(0, AttachOptions::new(UID), key(0));
    world.pass(Span::millis(10));
    world.kill_server();
    world.run();
    assert!(world.engines[engine].lease_ended);
    for file in [before[0], old_control].concat() {
        assert_eq!(world.ledger.open_of(file), 0, "nobody holds {file:?}");
    }

    world.start_server();
    world.run();
    let server = world.server.as_ref().unwrap();
    assert_eq!(files(&server.listening[&0]), replaced);
    assert_eq!(files(&server.listening[&1]), before[1], "it was not replaced");
    assert_eq!(files(server.machine.control_ends().unwrap()), new_control);
    let mapped = Outcome::Mapped {
        generation: generation(1),
        leased: true,
    };
    assert_eq!(world.engines[between].end, Some(End::Done(mapped)));
    let events = &world.vault.as_ref().unwrap().events;
    assert_eq!(events.last(), Some(&VaultEvent::Armed { complete: true }));
    world.finish();
}

#[test]
fn names_may_be_made_again_before_anything_is_loaded_and_while_no_server_lives() {
    let mut world = World::new();
    world.start_vault(false);
    replace_first(&mut world);
    world.start_server();
    world.run();
    world.kill_server();
    let replaced = replace_first(&mut world);
    world.start_server();
    world.load();
    world.run();
    assert_eq!(files(&world.server.as_ref().unwrap().listening[&0]), replaced);
    world.finish();
}

#[test]
fn a_server_that_answers_for_the_first_time_is_given_the_ends_that_there_are_then() {
    let mut world = World::new();
    world.start_vault(false);
    // It is asked to follow, and has not answered.
    world.raw_as(Origin::Server, Peer { pid: 20, uid: UID });
    replace_first(&mut world);
    world.start_server();
    let replaced = replace_first(&mut world);
    world.run();
    assert_eq!(files(&world.server.as_ref().unwrap().listening[&0]), replaced);
    world.finish();
}

#[test]
fn copies_of_other_ends_are_to_be_kept_under_the_same_names() {
    let mut world = World::ready();
    let vault = &world.vault.as_ref().unwrap().machine;
    let revision = vault.revision();
    let kept = |world: &World| -> Vec<(String, File)> {
        let inventory = world.vault.as_ref().unwrap().machine.inventory();
        let kept = inventory.descriptors.iter();
        kept.map(|(name, fd)| (name.clone(), fd.file)).collect()
    };
    let before = kept(&world);
    let replaced = replace_first(&mut world);
    assert!(world.vault.as_ref().unwrap().machine.revision() > revision);
    let after = kept(&world);
    for ((name, old), (same_name, new)) in before.iter().zip(&after) {
        assert_eq!(name, same_name);
        let is_replaced = replaced.contains(new);
        assert_eq!(old != new, is_replaced, "{name}");
        assert!(!is_replaced || is_end_name(name), "{name}");
    }
    let ends = after.iter().filter(|(name, _)| is_end_name(name)).count();
    assert_eq!((ends, after.len()), (4, before.len()), "two for each daemon");
    world.finish();
}
