//! Whoever ends in the middle: a publisher, a server, a launcher.

use super::*;

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
    let (lock, listener) = (world.ledger.lock(), world.ledger.listener());
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
