//! What is published is served, and nothing else is.

use super::*;

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
