//! Content that clients publish: on a daemon's socket, by way of its server, to the vault.

mod chaos;
mod deaths;
mod keys;
mod refusals;
mod taking;

use crate::host::Host;
use crate::ledger::{Fd, File};
use crate::world::*;
use weightd_core::content::{Comparison, Generation, HandleKind, Key, Role};
use weightd_core::machine::{
    Adopt, AttachOptions, Inheritance, Origin, Outcome, ServerEvent, Vault, VaultEvent, inventory_names,
};
use weightd_core::peer::{Facts, FileKind, Peer};
use weightd_core::time::Span;
use weightd_core::wire::message::{
    DaemonId, DaemonInfo, DaemonStatus, Define, ErrorCode, Expects, GetMemory, GetState, GetStatus, Holds,
    Lead, Message, Publish, Published, RegionInfo, Replace,
};

const NEXT_PID: u32 = 11;
const NEXT_EPOCH: u64 = 0xF;

fn generation(number: u64) -> Generation {
    Generation { epoch: EPOCH, number }
}

/// A vault of these daemons, and its server, which others can adopt.
fn vault_with(daemons: Vec<DaemonInfo>) -> World {
    let mut world = World::new();
    world.controlled = true;
    world.start_vault_of(daemons);
    world.start_server();
    world.run();
    world
}

/// Two daemons that wait for publishers.
fn waiting() -> World {
    vault_with(vec![publishable(0), publishable(1)])
}

/// The same, and each holds 1000 bytes: generations 1 and 2.
fn published() -> World {
    let mut world = waiting();
    for daemon in 0..2 {
        let raw = world.raw(daemon);
        say(&mut world, raw, daemon, 1000, Expects::Empty);
        world.run();
        assert_eq!(answer(&mut world, raw), Ok(generation(u64::from(daemon) + 1)));
        world.hang_up(raw);
        world.run();
    }
    world
}

/// A client says that it publishes one region; returns the file of its memory.
fn say(world: &mut World, raw: usize, daemon: DaemonId, bytes: u64, expects: Expects) -> File {
    let region = world.ledger.memory(bytes);
    let file = region.file;
    // Which daemon it is for is said by the socket.
    let said = Publish {
        daemon: 77,
        ..publication(daemon, expects, content(64, &[bytes]))
    };
    let descriptors = vec![world.ledger.memory(64), region];
    world.say(raw, said, descriptors);
    file
}

/// A client publishes over a connection of its own, and hears this.
fn publish(
    world: &mut World,
    daemon: DaemonId,
    bytes: u64,
    expects: Expects,
) -> (File, Result<Generation, ErrorCode>) {
    let raw = world.raw(daemon);
    let file = say(world, raw, daemon, bytes, expects);
    world.run();
    let answer = answer(world, raw);
    world.hang_up(raw);
    world.run();
    (file, answer)
}

/// What was answered, which is one thing.
#[track_caller]
fn answer(world: &mut World, raw: usize) -> Result<Generation, ErrorCode> {
    match &world.heard(raw)[..] {
        [Message::Published(published)] => Ok(published.generation),
        [Message::Failure(failure)] => Err(ErrorCode::from_number(failure.code)),
        other => panic!("{other:?}"),
    }
}

fn failure(world: &mut World, raw: usize) -> (ErrorCode, bool, String) {
    match &world.heard(raw)[..] {
        [Message::Failure(failure)] => (
            ErrorCode::from_number(failure.code),
            failure.retryable,
            failure.message.clone(),
        ),
        other => panic!("{other:?}"),
    }
}

/// What a daemon answers an engine with this key.
fn get_state(world: &mut World, daemon: DaemonId, key: Key) -> Message {
    let raw = world.raw(daemon);
    let is_reload = false;
    world.say(raw, GetState { key, is_reload }, vec![]);
    world.run();
    let heard = world.heard(raw).remove(0);
    world.hang_up(raw);
    world.run();
    heard
}

/// The generation that is served, or why none is.
fn served(world: &mut World, daemon: DaemonId) -> Result<Generation, ErrorCode> {
    match get_state(world, daemon, key(daemon)) {
        Message::State(state) => Ok(state.generation),
        Message::Failure(failure) => Err(ErrorCode::from_number(failure.code)),
        other => panic!("{other:?}"),
    }
}

fn mismatch(world: &mut World, daemon: DaemonId, key: Key) -> Vec<String> {
    match get_state(world, daemon, key) {
        Message::Mismatch(mismatch) => mismatch.fields.into_iter().map(|differs| differs.field).collect(),
        other => panic!("{other:?}"),
    }
}

fn status(world: &mut World, daemon: DaemonId) -> DaemonStatus {
    let raw = world.raw(daemon);
    world.say(raw, GetStatus {}, vec![]);
    world.run();
    let heard = world.heard(raw);
    world.hang_up(raw);
    world.run();
    match &heard[..] {
        [Message::DaemonStatus(status)] => status.clone(),
        other => panic!("{other:?}"),
    }
}

fn adopt(world: &mut World) {
    let adopter = world.adopt(NEXT_PID);
    world.run();
    let inheritance = world.adopted(adopter).unwrap();
    world.follow(adopter, NEXT_PID, NEXT_EPOCH, inheritance);
    world.run();
}

fn events(world: &World) -> &[VaultEvent] {
    &world.vault.as_ref().unwrap().events
}
