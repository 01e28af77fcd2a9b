//! Content that its device, or its publisher, does not have any more; and who says so.

use crate::ledger::{Fd, Ledger};
use crate::world::*;
use weightd_core::content::{Generation, HandleKind};
use weightd_core::machine::{
    Attach, AttachError, AttachOptions, AttachStep, Client, Exchange, Fault, HandoverEvent, Mode, Origin,
    Outcome, ServerEvent, Step, VaultEvent,
};
use weightd_core::peer::Peer;
use weightd_core::time::{Now, Span};
use weightd_core::wire::Header;
use weightd_core::wire::message::{
    ContentInfo, DaemonId, ErrorCode, Expects, GetMemory, GetState, GetStatus, Holds, Lead, Lost, Memory,
    Message, RegionInfo, Release, Released, Report, State, Watching,
};

fn generation(number: u64) -> Generation {
    Generation { epoch: EPOCH, number }
}

fn lose(world: &mut World, daemon: DaemonId, number: u64) {
    let vault = world.vault.as_mut().unwrap();
    vault.input(|vault| vault.lost(daemon, generation(number)));
    world.run();
}

/// Every generation that a vault, or a server, said was lost.
fn lost(world: &World) -> [Vec<Generation>; 2] {
    let vault = world.vault.as_ref().unwrap().events.iter();
    let server = world.server.as_ref().unwrap().events.iter();
    let by_vault = vault.filter_map(|event| match event {
        VaultEvent::Lost { generation, .. } => Some(*generation),
        _ => None,
    });
    let by_server = server.filter_map(|event| match event {
        ServerEvent::Lost { generation, .. } => Some(*generation),
        _ => None,
    });
    [by_vault.collect(), by_server.collect()]
}

/// What a daemon answers an engine that asks for its content.
fn ask(world: &mut World, daemon: DaemonId) -> Result<Generation, ErrorCode> {
    let raw = world.raw(daemon);
    let is_reload = false;
    let key = key(daemon);
    world.say(raw, GetState { key, is_reload }, vec![]);
    world.run();
    match &world.heard(raw)[..] {
        [Message::State(state)] => Ok(state.generation),
        [Message::Failure(failure)] => Err(ErrorCode::from_number(failure.code)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn lost_content_is_closed_everywhere_and_whoever_asks_is_told() {
    let mut world = World::new();
    world.start_vault(false);
    world.start_server();
    world.start_loader();
    let file = world.publish(0, 1000, Expects::Empty);
    world.publish(1, 2000, Expects::Empty);
    world.run();
    let engine = world.attach(0, AttachOptions::new(UID), key(0));
    world.run();
    assert_eq!(world.ledger.open_of(file), 3, "vault, server and engine");

    lose(&mut world, 0, 1);
    assert_eq!(
        world.ledger.open_of(file),
        1,
        "what an engine mapped is the engine's"
    );
    assert_eq!(lost(&world), [[generation(1)], [generation(1)]]);
    assert_eq!(ask(&mut world, 0), Err(ErrorCode::Lost));
    assert_eq!(
        ask(&mut world, 1),
        Ok(generation(2)),
        "the other daemon serves on"
    );
    let vault = &world.vault.as_ref().unwrap().machine;
    assert!(vault.content(0).is_none());
    let (current, info, descriptors) = vault.content(1).unwrap();
    assert_eq!(
        (current, info.bytes(), descriptors.len()),
        (generation(2), 2000, 2)
    );

    assert!(!world.engines[engine].lease_ended);
    let raw = world.raw(0);
    world.say(raw, GetMemory {}, vec![]);
    world.say(raw, GetStatus {}, vec![]);
    world.run();
    let heard = world.heard(raw);
    let [Message::Memory(memory), Message::DaemonStatus(status)] = &heard[..] else {
        panic!("{heard:?}")
    };
    let leased = 1000;
    assert_eq!(*memory, Memory { current: 0, leased });
    assert_eq!((status.holds, status.leases), (Holds::Lost(generation(1)), 1));
    world.finish();
}

#[test]
fn a_loss_is_declared_once_and_only_of_the_current_generation() {
    let mut world = World::ready();
    for (daemon, number) in [(0, 2), (0, 9), (7, 1)] {
        lose(&mut world, daemon, number);
    }
    assert_eq!(lost(&world), [[], []]);
    assert_eq!(ask(&mut world, 0), Ok(generation(1)));
    for _ in 0..3 {
        lose(&mut world, 0, 1);
    }
    assert_eq!(lost(&world), [[generation(1)], [generation(1)]]);
    world.finish();
}

#[test]
fn a_server_ignores_the_loss_of_what_it_does_not_hold_and_hears_it_from_its_leader_only() {
    let mut world = World::ready();
    let control = world.raw_as(Origin::Control, Peer { pid: 11, uid: UID });
    let (daemon, generation) = (0, generation(1));
    world.say(control, Lost { daemon, generation }, vec![]);
    let public = world.raw(0);
    world.say(public, Lost { daemon, generation }, vec![]);
    world.run();
    for (raw, expected) in [
        (control, ErrorCode::NotAllowed),
        (public, ErrorCode::UnknownCommand),
    ] {
        let heard = world.heard(raw);
        let [Message::Failure(failure)] = &heard[..] else {
            panic!("{heard:?}")
        };
        assert_eq!(ErrorCode::from_number(failure.code), expected);
    }
    assert_eq!(ask(&mut world, 0), Ok(generation));

    world.kill_vault();
    world.say(control, Lead { pid: 11 }, vec![]);
    for (daemon, number) in [(0, 2), (0, 9), (7, 1)] {
        let generation = Generation { number, ..generation };
        world.say(control, Lost { daemon, generation }, vec![]);
    }
    world.run();
    assert_eq!(ask(&mut world, 0), Ok(generation));
    world.say(control, Lost { daemon, generation }, vec![]);
    world.run();
    assert_eq!(ask(&mut world, 0), Err(ErrorCode::Lost));
    assert!(
        matches!(world.heard(control)[..], [Message::Leading(_)]),
        "it has no answer"
    );
    world.finish();
}

#[test]
fn what_was_lost_stays_lost_in_the_next_server_until_it_is_published_anew() {
    let mut world = World::ready();
    lose(&mut world, 0, 1);
    world.kill_server();
    world.start_server();
    world.run();
    assert_eq!(ask(&mut world, 0), Err(ErrorCode::Lost));
    assert_eq!(ask(&mut world, 1), Ok(generation(2)));

    world.publish(0, 1000, Expects::Generation(generation(1)));
    world.run();
    assert!(matches!(
        world.published.last(),
        Some(HandoverEvent::Refused { .. })
    ));
    world.publish(0, 1000, Expects::Empty);
    world.run();
    assert_eq!(ask(&mut world, 0), Ok(generation(3)));
    lose(&mut world, 0, 1);
    assert_eq!(
        ask(&mut world, 0),
        Ok(generation(3)),
        "what is said of the old one is late"
    );
    let vault = world.vault.as_ref().unwrap();
    assert_eq!(vault.events.last(), Some(&VaultEvent::Armed { complete: true }));
    world.finish();
}

#[test]
fn a_loss_while_no_server_follows_reaches_the_next_one() {
    let mut world = World::ready();
    world.kill_server();
    let vault = world.vault.as_mut().unwrap();
    vault.input(|vault| vault.lost(0, generation(1)));
    world.start_server();
    world.run();
    assert_eq!(ask(&mut world, 0), Err(ErrorCode::Lost));
    world.finish();
}

/// A publisher whose memory is its own, and what it publishes to these daemons.
fn publisher(world: &mut World, handle: HandleKind, daemons: &[DaemonId]) -> usize {
    let publisher = world.raw_as(Origin::Loader, Peer { pid: 31, uid: UID });
    for &daemon in daemons {
        let bytes = 500;
        let mut descriptors = vec![world.ledger.memory(64)];
        if handle != HandleKind::CudaIpc {
            descriptors.push(world.ledger.memory(bytes));
        }
        let content = ContentInfo {
            regions: vec![RegionInfo { handle, bytes }],
            ..content(64, &[])
        };
        world.say(
            publisher,
            publication(daemon, Expects::Empty, content),
            descriptors,
        );
    }
    world.run();
    publisher
}

#[test]
fn legacy_memory_is_lost_when_its_publisher_goes_and_nothing_else_is() {
    for breaks_the_rules in [false, true] {
        let mut world = World::new();
        world.start_vault(false);
        world.start_server();
        let legacy = publisher(&mut world, HandleKind::CudaIpc, &[0]);
        let other = publisher(&mut world, HandleKind::Memfd, &[1]);
        assert_eq!(ask(&mut world, 0), Ok(generation(1)));
        world.hang_up(other);
        world.run();
        assert_eq!(ask(&mut world, 1), Ok(generation(2)));
        assert_eq!(lost(&world), [[], []]);
        if breaks_the_rules {
            world.send(legacy, b"HTTP/1.1 200 OK\r\n", vec![]);
        } else {
            world.hang_up(legacy);
        }
        world.run();
        assert_eq!(ask(&mut world, 0), Err(ErrorCode::Lost));
        assert_eq!(ask(&mut world, 1), Ok(generation(2)));
        assert_eq!(lost(&world), [[generation(1)], [generation(1)]]);
        world.finish();
    }
}

#[test]
fn a_publisher_that_goes_takes_only_what_is_still_its_own() {
    let mut world = World::new();
    world.start_vault(false);
    world.start_server();
    let first = publisher(&mut world, HandleKind::CudaIpc, &[0, 1]);
    lose(&mut world, 0, 1);
    let second = publisher(&mut world, HandleKind::CudaIpc, &[0]);
    world.hang_up(first);
    world.run();
    assert_eq!(ask(&mut world, 0), Ok(generation(3)));
    assert_eq!(ask(&mut world, 1), Err(ErrorCode::Lost));
    world.hang_up(second);
    world.run();
    assert_eq!(lost(&world)[0], [generation(1), generation(2), generation(3)]);
    world.finish();
}

/// What the vault was told of imports that failed.
fn reports(world: &World) -> Vec<(DaemonId, Generation, &str)> {
    let events = world.vault.as_ref().unwrap().events.iter();
    let report = |event| match event {
        &VaultEvent::ImportFailed {
            daemon,
            generation,
            ref why,
        } => Some((daemon, generation, why.as_str())),
        _ => None,
    };
    events.filter_map(report).collect()
}

#[test]
fn an_engine_reports_an_import_that_failed_and_goes_on_at_once() {
    for (mode, fallback) in [
        (Mode::ZeroCopy, true),
        (Mode::ZeroCopy, false),
        (Mode::Copy, true),
        (Mode::Copy, false),
    ] {
        let mut world = World::ready();
        let options = AttachOptions {
            mode,
            fallback,
            ..AttachOptions::new(UID)
        };
        let engine = world.attach(1, options, key(1));
        world.engines[engine].import = Err(Fault::Other("no such address".to_owned()));
        let began = world.now;
        world.run();
        let why = "no such address".to_owned();
        let error = AttachError::ImportFailed { why };
        let expected = if fallback {
            End::Disk(error)
        } else {
            End::Failed(error)
        };
        assert_eq!(world.engines[engine].end, Some(expected));
        assert_eq!(world.engines[engine].ended_at, began);
        assert_eq!(reports(&world), [(1, generation(2), "no such address")]);
        world.finish();
    }
}

#[test]
fn a_report_over_a_broken_connection_changes_nothing() {
    let mut world = World::ready();
    let engine = world.attach(0, AttachOptions::new(UID), key(0));
    world.engines[engine].import = Err(Fault::Malformed("x".to_owned()));
    world.engines[engine].works = Span::secs(2);
    world.pass(Span::secs(1));
    world.kill_server();
    let began = world.now;
    world.pass(Span::secs(1));
    let why = "x".to_owned();
    assert_eq!(
        world.engines[engine].end,
        Some(End::Disk(AttachError::Malformed { why }))
    );
    assert_eq!(world.engines[engine].ended_at, began + Span::secs(1));
    world.start_server();
    world.run();
    assert_eq!(reports(&world), []);
    world.finish();
}

/// Sends whatever an attach has to say.
fn drain(attach: &mut Attach<Fd>) -> Vec<Message> {
    let mut said = Vec::new();
    while let Some(out) = attach.outgoing() {
        let header = Header::decode(out.bytes).expect("a header").expect("all of it");
        let body = &out.bytes[out.bytes.len() - header.body..];
        said.push(Message::decode(header.kind, body).expect("a message"));
        let bytes = out.bytes.len();
        attach.wrote(Now(0), bytes);
    }
    said
}

/// An attach whose import has just failed.
fn after_a_failed_import(why: String) -> Attach<Fd> {
    let (ledger, now) = (Ledger::default(), Now(0));
    let mut attach = Attach::new(AttachOptions::new(UID), key(0));
    assert!(matches!(attach.step(now), Step::Connect));
    attach.connected(now, Ok(Peer { pid: 1, uid: UID }));
    drain(&mut attach);
    let state = State {
        generation: generation(3),
        device_uuid: device(0),
        content: content(64, &[10]),
    };
    let come = [ledger.memory(64), ledger.memory(10)].map(|fd| (fd.facts, fd));
    attach.receive(now, &frame(&state.into(), 1, 2), come, false);
    drain(&mut attach);
    attach.receive(now, &frame(&Watching {}.into(), 2, 0), [], false);
    assert!(matches!(attach.step(now), Step::Next(AttachStep::Import(_))));
    attach.imported(now, Err(Fault::Other(why)));
    attach
}

#[test]
fn a_daemon_that_does_not_read_holds_up_an_engine_for_a_moment_at_most() {
    let mut attach = after_a_failed_import("x".to_owned());
    let until = Now(0) + Span::millis(100);
    let Step::Io { until: at } = attach.step(Now(0)) else {
        panic!("the report waits to be sent")
    };
    assert_eq!(at, until);
    assert!(matches!(
        attach.step(until),
        Step::Next(AttachStep::LoadFromDisk { .. })
    ));
}

#[test]
fn a_long_reason_is_cut_to_fit_its_report() {
    let mut attach = after_a_failed_import("ß".repeat(100_000));
    assert!(matches!(attach.step(Now(0)), Step::Io { .. }));
    let said = drain(&mut attach);
    let expected = Report {
        daemon: 0,
        generation: generation(3),
        import_failed: "ß".repeat(2048),
    };
    assert_eq!(said, [expected.into()]);
    assert!(matches!(
        attach.step(Now(0)),
        Step::Next(AttachStep::LoadFromDisk { .. })
    ));
}

#[test]
fn an_import_that_works_is_not_reported() {
    let mut world = World::ready();
    let engine = world.attach(0, AttachOptions::new(UID), key(0));
    world.run();
    assert!(matches!(
        world.engines[engine].end,
        Some(End::Done(Outcome::Mapped { .. }))
    ));
    assert_eq!(reports(&world), []);
    world.finish();
}

#[test]
fn vault_and_server_agree_on_what_is_released_and_lost_at_once() {
    let mut seen = [false; 2];
    for turns in 0..8 {
        let mut world = World::ready();
        let raw = world.raw(0);
        let (daemon, current) = (0, Some(generation(1)));
        let release = Release {
            daemon,
            generation: current,
        };
        world.say(raw, release, vec![]);
        world.some_turns(turns);
        lose(&mut world, 0, 1);
        assert_eq!(world.heard(raw), [Released {}.into()]);
        world.say(raw, GetStatus {}, vec![]);
        world.run();
        let heard = world.heard(raw);
        let [Message::DaemonStatus(status)] = &heard[..] else {
            panic!("{heard:?}")
        };
        let vault = &world.vault.as_ref().unwrap().machine;
        assert_eq!(Some(status.holds), vault.holds(0), "after {turns} turns");
        seen[usize::from(status.holds == Holds::Lost(generation(1)))] = true;
        world.finish();
    }
    assert_eq!(seen, [true; 2], "released first; lost first");
}
