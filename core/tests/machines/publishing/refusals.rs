//! What is not taken, and leaves nothing behind.

use super::*;

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

/// A key that takes about this many bytes.
fn key_of(bytes: usize) -> Key {
    let mut key = key(0);
    key.extra.insert("x".to_owned(), "x".repeat(bytes));
    key
}

#[test]
fn a_key_that_comes_in_a_frame_and_would_not_go_out_in_another_is_refused() {
    for bytes in [61_440, 64_000, 65_150] {
        let mut world = published();
        let open = world.ledger.open_in_all();
        let raw = world.raw(0);
        let said = Publish {
            key: key_of(bytes),
            ..publication(0, Expects::Generation(generation(1)), content(64, &[5]))
        };
        let descriptors = vec![world.ledger.memory(64), world.ledger.memory(5)];
        world.say(raw, said, descriptors);
        world.run();
        assert_eq!(answer(&mut world, raw), Err(ErrorCode::Malformed));
        assert_eq!(world.ledger.open_in_all(), open);
        assert_eq!(served(&mut world, 0), Ok(generation(1)));
        world.finish();
    }
    // The longest that is taken goes through everything that follows.
    let mut world = waiting();
    let mut long = publication(0, Expects::Empty, content(64, &[1; 14]));
    long.key = key_of(61_000);
    let mut descriptors = vec![world.ledger.memory(64)];
    descriptors.extend((0..14).map(|_| world.ledger.memory(1)));
    let raw = world.raw(0);
    world.say(raw, long.clone(), descriptors);
    world.run();
    assert_eq!(answer(&mut world, raw), Ok(generation(1)));
    world.kill_server();
    world.start_server();
    world.run();
    assert_eq!(status(&mut world, 0).info.key, long.key);
    let description = world.vault.as_ref().unwrap().machine.inventory().description;
    assert!(inventory_names(&description).is_ok());
    world.kill_vault();
    world.run();
    adopt(&mut world);
    assert!(matches!(get_state(&mut world, 0, long.key), Message::State(_)));
    world.finish();
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
