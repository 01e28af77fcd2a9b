//! Content that clients publish: on a daemon's socket, by way of its server, to the vault.

use crate::host::Host;
use crate::ledger::{Fd, File};
use crate::world::*;
use weightd_core::content::{CheckpointId, Comparison, Generation, HandleKind, Key, Role};
use weightd_core::machine::{
    Adopt, AttachOptions, Held, Inheritance, Origin, Outcome, ServerEvent, Vault, VaultEvent, inventory_names,
};
use weightd_core::peer::{Facts, FileKind, Peer};
use weightd_core::time::Span;
use weightd_core::wire::message::{
    ContentInfo, DaemonId, DaemonInfo, DaemonStatus, Define, ErrorCode, Expects, GetMemory, GetState,
    GetStatus, Holds, Lead, Message, Publish, Published, RegionInfo, Replace,
};

const NEXT_PID: u32 = 11;
const NEXT_EPOCH: u64 = 0xF;

fn generation(number: u64) -> Generation {
    Generation { epoch: EPOCH, number }
}

/// The key of a daemon that nobody has published for: its place, and nothing else.
fn place(daemon: DaemonId) -> Key {
    Key {
        checkpoint: CheckpointId {
            bytes: 0,
            files: None,
            digest: None,
        },
        model_arch: String::new(),
        dtype: String::new(),
        expert_placement_strategy: String::new(),
        layout: String::new(),
        processing: String::new(),
        ..key(daemon)
    }
}

fn publishable(daemon: DaemonId) -> DaemonInfo {
    DaemonInfo {
        publish: Some(Replace::Keep),
        key: place(daemon),
        ..info(daemon, false)
    }
}

/// A vault whose first daemons take publications, and its server, which others can adopt.
fn vault_with(daemons: Vec<DaemonInfo>) -> World {
    let mut world = World::new();
    let mut held = Vec::new();
    for info in daemons {
        let open = |file| world.ledger.open(Facts { file, size: 0 }).strict();
        let (lock, listener) = (open(FileKind::Other), open(FileKind::Listener));
        world.listeners.push(listener.file);
        held.push(Held { info, lock, listener });
    }
    world.controlled = true;
    let vault = Vault::new(VAULT_PID, EPOCH, held).with_control(world.ends());
    world.vault = Some(Host::new(vault));
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

fn publication(daemon: DaemonId, expects: Expects, content: ContentInfo) -> Publish {
    Publish {
        daemon,
        generation: None,
        expects,
        key: key(daemon),
        content,
    }
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
        Message::Mismatch(mismatch) => mismatch.fields,
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

#[test]
fn a_daemon_is_empty_for_everyone_until_somebody_publishes() {
    let mut world = waiting();
    assert_eq!(events(&world), [VaultEvent::Armed { complete: true }]);
    let vault = &world.vault.as_ref().unwrap().machine;
    assert!(vault.is_armed() && vault.is_loaded(), "nothing is to be loaded");
    assert_eq!(served(&mut world, 0), Err(ErrorCode::Empty));
    let mut other = key(1);
    other.role = Role::Draft;
    assert!(
        matches!(get_state(&mut world, 0, other), Message::Failure(failure)
            if failure.code == ErrorCode::Empty.number()),
        "there is no key that it could differ from"
    );
    let before = status(&mut world, 0);
    assert_eq!((before.holds, &before.info), (Holds::Empty, &publishable(0)));

    let (file, answer) = publish(&mut world, 0, 1000, Expects::Empty);
    assert_eq!(answer, Ok(generation(1)));
    assert_eq!(world.ledger.open_of(file), 2, "vault and server");
    assert_eq!(served(&mut world, 0), Ok(generation(1)));
    assert_eq!(
        served(&mut world, 1),
        Err(ErrorCode::Empty),
        "the other one waits on"
    );
    let after = status(&mut world, 0);
    assert_eq!((after.holds, after.bytes), (Holds::Content(generation(1)), 1000));
    assert_eq!(after.info.key, key(0), "the content's key is the daemon's now");
    let stored = VaultEvent::Published {
        daemon: 0,
        generation: generation(1),
        replaced: None,
        tensors: 7,
        bytes: 1000,
    };
    assert!(events(&world).contains(&stored));
    assert_eq!(events(&world).last(), Some(&VaultEvent::Armed { complete: true }));
    let told = ServerEvent::Published {
        daemon: 0,
        pid: 50,
        generation: generation(1),
        tensors: 7,
        bytes: 1000,
    };
    assert!(world.server.as_ref().unwrap().events.contains(&told));
    world.finish();
}

#[test]
fn whoever_hears_that_it_is_published_finds_it() {
    let mut world = published();
    let raw = world.raw(0);
    say(&mut world, raw, 0, 500, Expects::Generation(generation(1)));
    let is_reload = false;
    let key = key(0);
    // It may ask on, over the same connection, before it was answered.
    world.say(raw, GetState { key, is_reload }, vec![]);
    world.run();
    let heard = world.heard(raw);
    let [Message::Published(told), Message::State(state)] = &heard[..] else {
        panic!("{heard:?}")
    };
    assert_eq!(
        *told,
        Published {
            daemon: 0,
            generation: generation(3)
        }
    );
    assert_eq!((state.generation, state.content.bytes()), (generation(3), 500));
    world.finish();
}

#[test]
fn engines_get_the_old_content_or_the_new_never_a_mix() {
    for turns in 0..12 {
        let mut world = waiting();
        let (old, _) = publish(&mut world, 0, 1000, Expects::Empty);
        let mapped = world.attach(0, AttachOptions::new(UID), key(0));
        world.run();
        let publisher = world.raw(0);
        let new = say(&mut world, publisher, 0, 500, Expects::Generation(generation(1)));
        world.some_turns(turns);
        let engine = world.attach(0, AttachOptions::new(UID), key(0));
        world.run();
        assert_eq!(answer(&mut world, publisher), Ok(generation(2)));
        let late = world.attach(0, AttachOptions::new(UID), key(0));
        world.run();
        for (engine, expected) in [(mapped, Some(old)), (engine, None), (late, Some(new))] {
            let fetched = world.engines[engine].mapped.as_ref().expect("a mapping");
            let file = fetched.regions[0].file;
            let (bytes, number) = if file == old { (1000, 1) } else { (500, 2) };
            assert_eq!(fetched.state.content.bytes(), bytes);
            assert_eq!(fetched.state.generation, generation(number));
            assert!(expected.is_none_or(|expected| expected == file));
        }
        // Whoever mapped the old content keeps it.
        assert!(world.ledger.open_of(old) >= 1 && world.ledger.open_of(old) <= 2);
        assert!(!world.engines[mapped].lease_ended);
        world.finish();
    }
}

#[test]
fn an_expectation_that_does_not_hold_changes_nothing() {
    let mut world = waiting();
    let wrong = Expects::Generation(generation(1));
    let (file, answer) = publish(&mut world, 0, 9, wrong);
    assert_eq!(answer, Err(ErrorCode::Conflict));
    assert_eq!(world.ledger.open_of(file), 0);
    publish(&mut world, 0, 1000, Expects::Empty).1.unwrap();
    for wrong in [Expects::Empty, Expects::Generation(generation(2))] {
        let (file, answer) = publish(&mut world, 0, 9, wrong);
        assert_eq!(answer, Err(ErrorCode::Conflict));
        assert_eq!(world.ledger.open_of(file), 0);
    }
    assert_eq!(served(&mut world, 0), Ok(generation(1)));
    world.release(0);
    let (_, answer) = publish(&mut world, 0, 9, Expects::Generation(generation(1)));
    assert_eq!(answer, Err(ErrorCode::Conflict), "it is gone");
    assert_eq!(served(&mut world, 0), Err(ErrorCode::Released));
    world.finish();
}

#[test]
fn of_two_who_publish_at_once_one_wins_and_the_other_is_told() {
    let mut world = waiting();
    let raws = [world.raw(0), world.raw(0)];
    let files = raws.map(|raw| say(&mut world, raw, 0, 1000, Expects::Empty));
    world.run();
    assert_eq!(answer(&mut world, raws[0]), Ok(generation(1)));
    let (code, retryable, _) = failure(&mut world, raws[1]);
    assert_eq!((code, retryable), (ErrorCode::Busy, true));
    assert_eq!(files.map(|file| world.ledger.open_of(file)), [2, 0]);
    // The connection is as good as before, but the world is another.
    say(&mut world, raws[1], 0, 1000, Expects::Empty);
    world.run();
    assert_eq!(answer(&mut world, raws[1]), Err(ErrorCode::Conflict));
    say(&mut world, raws[1], 0, 1000, Expects::Generation(generation(1)));
    world.run();
    assert_eq!(answer(&mut world, raws[1]), Ok(generation(2)));
    // Each daemon has its own turn.
    let (here, there) = (world.raw(0), world.raw(1));
    say(&mut world, here, 0, 5, Expects::Generation(generation(2)));
    say(&mut world, there, 1, 5, Expects::Empty);
    world.run();
    assert!(answer(&mut world, here).is_ok() && answer(&mut world, there).is_ok());
    world.finish();
}

#[test]
fn a_publisher_that_dies_leaves_the_old_content_or_the_new_and_nothing_else() {
    let whole = frame(
        &publication(0, Expects::Generation(generation(1)), content(64, &[500])).into(),
        1,
        2,
    );
    for cut in [1, 19, 20, 21, whole.len() - 1] {
        let mut world = published();
        let open = world.ledger.open_in_all();
        let raw = world.raw(0);
        let descriptors = vec![world.ledger.memory(64), world.ledger.memory(500)];
        world.send(raw, &whole[..cut], descriptors);
        world.run();
        world.hang_up(raw);
        world.run();
        assert_eq!(served(&mut world, 0), Ok(generation(1)));
        assert_eq!(world.ledger.open_in_all(), open, "cut at byte {cut}");
        world.finish();
    }
    let mut both = [false, false];
    for turns in 0..12 {
        let mut world = published();
        let raw = world.raw(0);
        let file = say(&mut world, raw, 0, 500, Expects::Generation(generation(1)));
        world.some_turns(turns);
        world.hang_up(raw);
        world.raws.remove(&raw);
        world.run();
        let current = served(&mut world, 0).unwrap();
        both[usize::from(current == generation(3))] = true;
        let vault = &world.vault.as_ref().unwrap().machine;
        assert_eq!(vault.holds(0), Some(Holds::Content(current)));
        let kept = if current == generation(3) { 2 } else { 0 };
        assert_eq!(world.ledger.open_of(file), kept, "after {turns} turns");
        // The next one has its turn.
        let (_, answer) = publish(&mut world, 0, 5, Expects::Generation(current));
        assert!(answer.is_ok());
        world.finish();
    }
    assert_eq!(both, [true, true]);
}

#[test]
fn what_the_vault_stored_is_served_by_the_next_server_whenever_this_one_dies() {
    let mut seen = [false; 3];
    for turns in 0..12 {
        let mut world = published();
        let raw = world.raw(0);
        let file = say(&mut world, raw, 0, 500, Expects::Generation(generation(1)));
        world.some_turns(turns);
        world.kill_server();
        world.start_server();
        world.run();
        let heard = world.heard(raw);
        let told = matches!(heard[..], [Message::Published(_)]);
        assert!(told || (heard.is_empty() && world.raws[&raw].ended));
        let current = served(&mut world, 0).unwrap();
        assert!(!told || current == generation(3), "what was told is so");
        seen[usize::from(told) + usize::from(current == generation(3))] = true;
        let kept = if current == generation(3) { 2 } else { 0 };
        assert_eq!(world.ledger.open_of(file), kept, "after {turns} turns");
        let key = status(&mut world, 0).info.key;
        assert_eq!(key, self::key(0));
        let (_, answer) = publish(&mut world, 0, 5, Expects::Generation(current));
        assert!(answer.is_ok());
        world.finish();
    }
    assert_eq!(seen, [true; 3], "not stored; stored and not told; told");
}

#[test]
fn a_launcher_that_dies_leaves_its_publisher_in_doubt_and_the_server_with_what_it_has() {
    let mut seen = [false; 3];
    for turns in 0..12 {
        let mut world = published();
        let raw = world.raw(0);
        let file = say(&mut world, raw, 0, 500, Expects::Generation(generation(1)));
        world.some_turns(turns);
        world.kill_vault();
        world.run();
        let current = served(&mut world, 0).unwrap();
        match failure_or_published(&mut world, raw) {
            Ok(told) => {
                assert_eq!(told, current);
                seen[0] = true;
            }
            Err((ErrorCode::InDoubt, true)) => seen[1] = true,
            Err((ErrorCode::Busy, true)) => seen[2] = true,
            other => panic!("{other:?}"),
        }
        assert!(!world.raws[&raw].ended, "the connection stays");
        let kept = if current == generation(3) { 1 } else { 0 };
        assert_eq!(world.ledger.open_of(file), kept, "after {turns} turns");
        let (file, answer) = publish(&mut world, 0, 5, Expects::Generation(current));
        assert_eq!(answer, Err(ErrorCode::Busy), "nobody stores it");
        assert_eq!(world.ledger.open_of(file), 0);

        adopt(&mut world);
        let (file, answer) = publish(&mut world, 0, 5, Expects::Generation(current));
        let new = Generation {
            epoch: NEXT_EPOCH,
            number: 1,
        };
        assert_eq!(answer, Ok(new));
        assert_eq!(world.ledger.open_of(file), 2);
        world.finish();
    }
    assert_eq!(seen, [true; 3]);
}

fn failure_or_published(world: &mut World, raw: usize) -> Result<Generation, (ErrorCode, bool)> {
    match &world.heard(raw)[..] {
        [Message::Published(published)] => Ok(published.generation),
        [Message::Failure(failure)] => Err((ErrorCode::from_number(failure.code), failure.retryable)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_publication_during_an_adoption_reaches_the_new_vault() {
    let mut world = published();
    world.kill_vault();
    world.run();
    let adopter = world.adopt(NEXT_PID);
    world.run();
    let inheritance = world.adopted(adopter).unwrap();
    let raw = world.raw(0);
    let file = say(&mut world, raw, 0, 5, Expects::Generation(generation(1)));
    world.run();
    assert!(world.heard(raw).is_empty(), "it waits for the launcher");
    world.follow(adopter, NEXT_PID, NEXT_EPOCH, inheritance);
    world.run();
    let new = Generation {
        epoch: NEXT_EPOCH,
        number: 1,
    };
    assert_eq!(answer(&mut world, raw), Ok(new));
    assert_eq!(world.ledger.open_of(file), 2);

    // A launcher that does not want what it was given leaves the publisher in doubt.
    world.kill_vault();
    world.run();
    let adopter = world.adopt(12);
    world.run();
    drop(world.adopted(adopter).unwrap());
    say(&mut world, raw, 0, 5, Expects::Generation(new));
    world.run();
    world.kill_adopter(adopter);
    world.run();
    assert_eq!(answer(&mut world, raw), Err(ErrorCode::InDoubt));
    assert_eq!(served(&mut world, 0), Ok(new));
    world.finish();
}

#[test]
fn a_key_of_another_place_is_a_conflict_that_names_it_and_everything_else_is_the_publishers() {
    type Change = (&'static str, fn(&mut Key));
    let changes: [Change; 7] = [
        ("tp_size", |key| key.tp_size = 4),
        ("tp_rank", |key| key.tp_rank = 1),
        ("pp_size", |key| key.pp_size = 2),
        ("pp_rank", |key| key.pp_rank = 1),
        ("role", |key| key.role = Role::Draft),
        ("dp_size", |key| key.dp_size = 2),
        ("dp_rank", |key| key.dp_rank = 1),
    ];
    for mut world in [waiting(), published()] {
        let holds = status(&mut world, 0).holds;
        let expects = match holds {
            Holds::Content(current) => Expects::Generation(current),
            _ => Expects::Empty,
        };
        for (field, change) in changes {
            let mut wrong = publication(0, expects, content(64, &[5]));
            change(&mut wrong.key);
            // What is the publisher's to say does not count.
            wrong.key.dtype = "float16".into();
            let raw = world.raw(0);
            let descriptors = vec![world.ledger.memory(64), world.ledger.memory(5)];
            world.say(raw, wrong, descriptors);
            world.run();
            let (code, retryable, why) = failure(&mut world, raw);
            assert_eq!((code, retryable), (ErrorCode::Conflict, false));
            assert!(why.ends_with(&format!("in {field}")), "{why}");
        }
        assert_eq!(status(&mut world, 0).holds, holds);
        let mut right = publication(0, expects, content(64, &[5]));
        right.key.dtype = "float16".into();
        right.key.processing = "marlin".into();
        right.key.enable_expert_parallel = true;
        let mine = right.key.clone();
        let raw = world.raw(0);
        let descriptors = vec![world.ledger.memory(64), world.ledger.memory(5)];
        world.say(raw, right, descriptors);
        world.run();
        assert!(answer(&mut world, raw).is_ok());
        assert_eq!(
            mismatch(&mut world, 0, key(0)),
            ["dtype", "enable_expert_parallel", "processing"],
            "an engine of the key before is told what is new"
        );
        assert!(matches!(get_state(&mut world, 0, mine), Message::State(_)));
        world.finish();
    }
}

#[test]
fn a_daemon_that_its_launcher_loads_takes_no_publication_and_goes_on_with_the_connection() {
    let mut world = World::ready();
    let open = world.ledger.open_in_all();
    let raw = world.raw(0);
    let file = say(&mut world, raw, 0, 1000, Expects::Generation(generation(1)));
    world.run();
    let (code, retryable, why) = failure(&mut world, raw);
    assert_eq!((code, retryable), (ErrorCode::NotAllowed, false));
    assert!(why.contains("weightd serve"), "{why}");
    assert_eq!(
        (world.ledger.open_of(file), world.ledger.open_in_all()),
        (0, open)
    );
    world.say(raw, GetMemory {}, vec![]);
    world.run();
    assert!(matches!(world.heard(raw)[..], [Message::Memory(_)]));
    world.finish();
}

#[test]
fn memory_that_goes_with_its_publisher_is_refused() {
    let mut world = waiting();
    let open = world.ledger.open_in_all();
    let raw = world.raw(0);
    let mut legacy = content(64, &[5]);
    legacy.regions.push(RegionInfo {
        handle: HandleKind::CudaIpc,
        bytes: 9,
    });
    let descriptors = vec![world.ledger.memory(64), world.ledger.memory(5)];
    world.say(raw, publication(0, Expects::Empty, legacy), descriptors);
    world.run();
    let (code, _, why) = failure(&mut world, raw);
    assert_eq!(code, ErrorCode::NotAllowed);
    assert!(why.contains("legacy"), "{why}");
    assert_eq!(world.ledger.open_in_all(), open);
    assert_eq!(served(&mut world, 0), Err(ErrorCode::Empty));
    world.finish();
}

#[test]
fn descriptors_that_are_not_what_is_said_of_them_end_the_publisher_and_leave_nothing() {
    let memory = |world: &World, sealed, size| {
        world.ledger.open(Facts {
            file: FileKind::Memory { sealed },
            size,
        })
    };
    type Lie = fn(&World, &dyn Fn(&World, bool, u64) -> Fd) -> Vec<Fd>;
    let lies: [Lie; 8] = [
        |_, _| vec![],
        |world, memory| vec![memory(world, true, 64)],
        |world, memory| {
            vec![
                memory(world, true, 64),
                memory(world, true, 5),
                memory(world, true, 5),
            ]
        },
        |world, memory| vec![memory(world, false, 64), memory(world, true, 5)],
        |world, memory| vec![memory(world, true, 64), memory(world, false, 5)],
        |world, memory| vec![memory(world, true, 63), memory(world, true, 5)],
        |world, memory| vec![memory(world, true, 64), memory(world, true, 6)],
        |world, memory| (0..16).map(|_| memory(world, true, 64)).collect(),
    ];
    for (number, lie) in lies.iter().enumerate() {
        let mut world = published();
        let open = world.ledger.open_in_all();
        let raw = world.raw(0);
        let descriptors = lie(&world, &memory);
        let said = publication(0, Expects::Generation(generation(1)), content(64, &[5]));
        world.say(raw, said, descriptors);
        world.run();
        assert_eq!(
            answer(&mut world, raw),
            Err(ErrorCode::BadDescriptors),
            "lie {number}"
        );
        assert!(world.raws[&raw].ended);
        assert_eq!(world.ledger.open_in_all(), open, "lie {number}: nothing is kept");
        assert_eq!(served(&mut world, 0), Ok(generation(1)));
        world.finish();
    }
}

#[test]
fn a_generation_is_named_by_the_vault_only() {
    let mut world = waiting();
    let raw = world.raw(0);
    let said = Publish {
        generation: Some(generation(9)),
        ..publication(0, Expects::Empty, content(64, &[5]))
    };
    let descriptors = vec![world.ledger.memory(64), world.ledger.memory(5)];
    world.say(raw, said, descriptors);
    world.run();
    assert_eq!(answer(&mut world, raw), Err(ErrorCode::Conflict));
    world.finish();
}

#[test]
fn a_vault_does_not_believe_a_server() {
    let mut world = vault_with(vec![publishable(0), info(1, false)]);
    world.kill_server();
    let server = world.raw_as(Origin::Server, Peer { pid: 21, uid: UID });
    world.run();
    world.heard(server);
    let open = world.ledger.open_in_all();
    let mut legacy = content(64, &[]);
    legacy.regions.push(RegionInfo {
        handle: HandleKind::CudaIpc,
        bytes: 9,
    });
    for (daemon, content, expected) in [
        (0, legacy, ErrorCode::NotAllowed),
        (1, content(64, &[]), ErrorCode::NotAllowed),
        (7, content(64, &[]), ErrorCode::Malformed),
        (0, content(65, &[]), ErrorCode::BadDescriptors),
    ] {
        let manifest = world.ledger.memory(64);
        world.say(
            server,
            publication(daemon, Expects::Empty, content),
            vec![manifest],
        );
        world.run();
        assert_eq!(answer(&mut world, server), Err(expected));
        assert_eq!(world.ledger.open_in_all(), open);
    }
    world.finish();
}

#[test]
fn what_was_released_or_lost_gives_its_place_to_the_next_publication() {
    let mut world = published();
    let raw = world.release(0);
    assert!(matches!(world.heard(raw)[..], [Message::Released(_)]));
    assert_eq!(served(&mut world, 0), Err(ErrorCode::Released));
    let mut other = key(0);
    other.dtype = "float16".into();
    assert_eq!(
        mismatch(&mut world, 0, other.clone()),
        ["dtype"],
        "the key is that of what was there"
    );
    // Also in the next server.
    world.kill_server();
    world.start_server();
    world.run();
    assert_eq!(mismatch(&mut world, 0, other), ["dtype"]);
    let (_, answer) = publish(&mut world, 0, 5, Expects::Empty);
    assert_eq!(answer, Ok(generation(3)));
    let vault = world.vault.as_mut().unwrap();
    vault.input(|vault| vault.lost(0, generation(3)));
    world.run();
    assert_eq!(served(&mut world, 0), Err(ErrorCode::Lost));
    world.kill_server();
    world.start_server();
    world.run();
    assert_eq!(
        events(&world).last(),
        Some(&VaultEvent::Armed { complete: true }),
        "nothing of it is to be loaded"
    );
    let (_, answer) = publish(&mut world, 0, 5, Expects::Empty);
    assert_eq!(answer, Ok(generation(4)));
    assert_eq!(served(&mut world, 0), Ok(generation(4)));
    world.finish();
}

#[test]
fn a_release_and_a_publication_that_cross_both_come_through() {
    for turns in 0..12 {
        let mut world = published();
        let (publisher, operator) = (world.raw(0), world.raw(0));
        say(&mut world, publisher, 0, 5, Expects::Generation(generation(1)));
        world.some_turns(turns);
        world.say_release(operator, 0);
        assert!(matches!(world.heard(operator)[..], [Message::Released(_)]));
        let holds = world.vault.as_ref().unwrap().machine.holds(0).unwrap();
        assert_eq!(status(&mut world, 0).holds, holds, "vault and server agree");
        match answer(&mut world, publisher) {
            Ok(_) => assert!(matches!(
                holds,
                Holds::Content(Generation { number: 3, .. }) | Holds::Released(Generation { number: 3, .. })
            )),
            Err(code) => assert_eq!(
                (code, holds),
                (ErrorCode::Conflict, Holds::Released(generation(1)))
            ),
        }
        world.finish();
    }
}

#[test]
fn a_checkpoint_is_the_same_by_its_files_or_by_the_digest_that_its_publisher_said() {
    let mut world = published();
    let mut elsewhere = key(0);
    elsewhere.checkpoint.files = Some([2; 32]);
    assert_eq!(
        mismatch(&mut world, 0, elsewhere.clone()),
        ["checkpoint"],
        "nobody will ever know the digest"
    );
    let mut said = publication(0, Expects::Generation(generation(1)), content(64, &[5]));
    said.key.checkpoint.digest = Some([9; 32]);
    let raw = world.raw(0);
    let descriptors = vec![world.ledger.memory(64), world.ledger.memory(5)];
    world.say(raw, said, descriptors);
    world.run();
    assert_eq!(answer(&mut world, raw), Ok(generation(3)));
    assert!(matches!(
        get_state(&mut world, 0, elsewhere.clone()),
        Message::NeedDigest(_)
    ));
    elsewhere.checkpoint.digest = Some([9; 32]);
    assert!(matches!(
        get_state(&mut world, 0, elsewhere.clone()),
        Message::State(_)
    ));
    // What is known of the same files stays known.
    publish(&mut world, 0, 6, Expects::Generation(generation(3)))
        .1
        .unwrap();
    assert!(matches!(get_state(&mut world, 0, elsewhere), Message::State(_)));
    world.finish();
}

fn stops(world: &World) -> bool {
    let stops = |event: &ServerEvent| matches!(event, ServerEvent::Stop { .. });
    world.server.as_ref().unwrap().events.iter().any(stops)
}

#[test]
fn a_server_outlives_its_launcher_where_anything_was_published() {
    let mut world = waiting();
    world.kill_vault();
    world.run();
    assert!(stops(&world), "it holds nothing");
    world.finish();

    let mut world = waiting();
    publish(&mut world, 1, 1000, Expects::Empty).1.unwrap();
    world.kill_vault();
    world.run();
    assert!(!stops(&world));
    assert_eq!(served(&mut world, 0), Err(ErrorCode::Empty));
    assert_eq!(served(&mut world, 1), Ok(generation(1)));
    adopt(&mut world);
    assert_eq!(events(&world), [VaultEvent::Armed { complete: true }]);
    assert!(world.vault.as_ref().unwrap().machine.is_loaded());
    assert_eq!(served(&mut world, 0), Err(ErrorCode::Empty));
    assert!(publish(&mut world, 0, 5, Expects::Empty).1.is_ok());
    world.finish();

    // Beside one that the launcher had not loaded, it ends as ever.
    let mut world = vault_with(vec![publishable(0), info(1, false)]);
    publish(&mut world, 0, 1000, Expects::Empty).1.unwrap();
    world.kill_vault();
    world.run();
    assert!(stops(&world));
    world.finish();
}

#[test]
fn what_was_published_is_inherited_with_its_key_and_wanted_by_its_place() {
    let mut world = waiting();
    publish(&mut world, 0, 1000, Expects::Empty).1.unwrap();
    let inventory = world.vault.as_ref().unwrap().machine.inventory();
    let description = inventory.description.clone();
    let copies = inventory.descriptors.iter();
    let copies: Vec<(Facts, Fd)> = copies.map(|(_, fd)| (fd.facts, fd.duplicate())).collect();
    assert_eq!(inventory_names(&description).unwrap().len(), copies.len());
    world.kill_vault();
    world.run();
    let adopter: usize = world.adopt(NEXT_PID);
    world.run();
    let adopted: Inheritance<Fd> = Adopt::finish(world.adopters.remove(&adopter).unwrap()).unwrap();
    let stored = Inheritance::from_inventory(&description, copies).unwrap();
    for inheritance in [&adopted, &stored] {
        let holds: Vec<Holds> = inheritance.daemons.iter().map(|daemon| daemon.holds()).collect();
        assert_eq!(holds, [Holds::Content(generation(1)), Holds::Empty]);
        assert_eq!(inheritance.daemons[0].info.key, key(0));
        let compare = |change: &dyn Fn(&mut [DaemonInfo])| {
            let mut wanted = [publishable(0), publishable(1)];
            change(&mut wanted);
            inheritance.compare(&wanted)
        };
        let different =
            |fields: &[&str]| Comparison::Different(fields.iter().map(|field| field.to_string()).collect());
        assert_eq!(compare(&|_| {}), Comparison::Same);
        let drops = |wanted: &mut [DaemonInfo]| wanted[1].publish = Some(Replace::DropFirst);
        assert_eq!(compare(&drops), different(&["publish"]));
        assert_eq!(
            compare(&|wanted| wanted[0] = info(0, false)),
            different(&["publish"])
        );
        assert_eq!(
            compare(&|wanted| wanted[0].key.tp_size = 4),
            different(&["tp_size"])
        );
    }
    // From copies alone, it is served again.
    drop(adopted);
    world.kill_adopter(adopter);
    world.kill_server();
    world.vault = Some(Host::new(Vault::inheriting(NEXT_PID, NEXT_EPOCH, stored)));
    world.start_server();
    world.run();
    assert_eq!(served(&mut world, 0), Ok(generation(1)));
    assert_eq!(events(&world), [VaultEvent::Armed { complete: true }]);
    assert!(publish(&mut world, 1, 5, Expects::Empty).1.is_ok());
    world.finish();
}

#[test]
fn a_launcher_that_does_not_answer_holds_up_its_publisher_for_a_while_only() {
    let mut world = World::new();
    world.start_server();
    let leader = world.raw_as(Origin::Control, Peer { pid: 10, uid: UID });
    let open = |file| world.ledger.open(Facts { file, size: 0 });
    let (lock, listener) = (open(FileKind::Other), open(FileKind::Listener));
    world.listeners.push(listener.file);
    world.say(leader, Lead { pid: 10 }, vec![]);
    let define = Define {
        daemon: 0,
        info: publishable(0),
        holds: Holds::Empty,
    };
    world.say(leader, define, vec![lock, listener]);
    world.run();
    world.heard(leader);
    let raw = world.raw(0);
    let file = say(&mut world, raw, 0, 5, Expects::Empty);
    world.run();
    let relayed = world.raws.get_mut(&leader).unwrap().heard.remove(0);
    let (request, descriptors) = (relayed.request, relayed.descriptors);
    let asked = Message::decode(relayed.kind, &relayed.body).unwrap();
    assert_eq!(
        asked,
        publication(0, Expects::Empty, content(64, &[5])).into(),
        "for daemon 0"
    );
    assert_eq!(world.ledger.open_of(file), 1, "with the launcher alone");
    world.pass(Span::secs(119));
    assert!(!world.raws[&raw].ended);
    world.pass(Span::secs(2));
    assert_eq!(answer(&mut world, raw), Err(ErrorCode::Timeout));
    assert!(world.raws[&raw].ended);
    assert_eq!(publish(&mut world, 0, 5, Expects::Empty).1, Err(ErrorCode::Busy));

    // An answer comes after all, and the arming.
    let (daemon, generation) = (0, generation(1));
    let told = Message::from(Published { daemon, generation });
    world.send(leader, &frame(&told, request, 0), vec![]);
    world.run();
    assert_eq!(served(&mut world, 0), Err(ErrorCode::Empty));
    let arm = Publish {
        generation: Some(generation),
        ..publication(0, Expects::Empty, content(64, &[5]))
    };
    let descriptors = descriptors.into_iter().map(|(_, fd)| fd).collect();
    world.say(leader, arm, descriptors);
    world.run();
    assert_eq!(served(&mut world, 0), Ok(generation));
    let raw = world.raw(0);
    say(&mut world, raw, 0, 6, Expects::Generation(generation));
    world.run();
    assert!(world.heard(raw).is_empty(), "its turn has come");
    world.heard(leader);
    world.finish();
}

#[test]
fn a_publisher_may_lease_what_it_published_on_the_same_connection() {
    use weightd_core::wire::message::Watch;
    let mut world = waiting();
    let raw = world.raw(0);
    say(&mut world, raw, 0, 5, Expects::Empty);
    let generation = Some(generation(1));
    world.say(raw, Watch { generation }, vec![]);
    world.run();
    assert!(matches!(
        world.heard(raw)[..],
        [Message::Published(_), Message::Watching(_)]
    ));
    world.pass(Span::secs(60));
    assert!(!world.raws[&raw].ended);
    assert_eq!(status(&mut world, 0).leases, 1);
    world.finish();
}

#[test]
fn an_engine_that_waits_for_a_publisher_maps_what_comes() {
    let mut world = waiting();
    let options = AttachOptions {
        fallback: false,
        state_timeout: Span::secs(60),
        ..AttachOptions::new(UID)
    };
    let engine = world.attach(0, options, key(0));
    world.pass(Span::secs(5));
    assert_eq!(world.engines[engine].end, None);
    publish(&mut world, 0, 5, Expects::Empty).1.unwrap();
    world.pass(Span::secs(1));
    let mapped = Outcome::Mapped {
        generation: generation(1),
        leased: true,
    };
    assert_eq!(world.engines[engine].end, Some(End::Done(mapped)));
    world.finish();
}
