//! Clients that break the rules: each ends alone, told why, while a good one is served.

use crate::ledger::Fd;
use crate::world::*;
use weightd_core::content::HandleKind;
use weightd_core::machine::{
    AttachError, AttachOptions, AttachStep, Client, Machine, Origin, Outcome, ServerEvent,
};
use weightd_core::peer::{FileKind, OVERFLOW_UID, Peer};
use weightd_core::time::Span;
use weightd_core::wire::message::{
    ContentInfo, ErrorCode, Expects, Failure, GetMemory, GetState, GetStatus, Message, Publish, RegionInfo,
    State,
};

fn failure(heard: &[Message]) -> &Failure {
    match heard {
        [Message::Failure(failure)] => failure,
        other => panic!("{other:?} is no single failure"),
    }
}

fn code(heard: &[Message]) -> ErrorCode {
    ErrorCode::from_number(failure(heard).code)
}

/// A good client attaches beside whatever else goes on.
fn is_served(world: &mut World) {
    let options = AttachOptions {
        fallback: false,
        ..AttachOptions::new(UID)
    };
    let engine = world.attach(0, options, key(0));
    world.run();
    let end = &world.engines[engine].end;
    assert!(
        matches!(end, Some(End::Done(Outcome::Mapped { leased: true, .. }))),
        "{end:?}"
    );
    world.end_engine(engine);
}

/// Sends `bytes` with `descriptors`: the connection ends with this code, and nothing is kept.
fn ends(bytes: &[u8], descriptors: fn(&World) -> Vec<Fd>, expected: ErrorCode) {
    let mut world = World::ready();
    let (open, raw) = (world.ledger.open_in_all(), world.raw(0));
    let descriptors = descriptors(&world);
    world.send(raw, bytes, descriptors);
    world.run();
    let heard = world.heard(raw);
    assert_eq!(code(&heard[heard.len() - 1..]), expected);
    assert!(world.raws[&raw].ended, "it is closed");
    assert_eq!(world.ledger.open_in_all(), open, "nothing of it is kept");
    let events = &world.server.as_ref().unwrap().events;
    assert!(matches!(events.last(), Some(ServerEvent::Ended { .. })));
    is_served(&mut world);
    world.finish();
}

fn header(change: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = frame(&GetMemory {}.into(), 1, 0);
    change(&mut bytes);
    bytes
}

fn none(_: &World) -> Vec<Fd> {
    Vec::new()
}

#[test]
fn garbage_ends_its_sender() {
    ends(b"GET / HTTP/1.1\r\n", none, ErrorCode::Malformed);
    ends(b"x", none, ErrorCode::Malformed);
}

#[test]
fn another_major_version_ends_its_sender() {
    ends(&header(|bytes| bytes[4] = 2), none, ErrorCode::Version);
}

#[test]
fn reserved_bytes_end_their_sender() {
    ends(&header(|bytes| bytes[18] = 1), none, ErrorCode::Malformed);
}

#[test]
fn a_huge_length_ends_its_sender() {
    ends(
        &header(|bytes| bytes[12..16].fill(0xff)),
        none,
        ErrorCode::Malformed,
    );
}

#[test]
fn too_many_descriptors_end_their_sender() {
    ends(&header(|bytes| bytes[16] = 17), none, ErrorCode::Malformed);
}

#[test]
fn too_few_descriptors_end_their_sender() {
    ends(
        &header(|bytes| bytes[16] = 2),
        |world| vec![world.ledger.memory(1)],
        ErrorCode::BadDescriptors,
    );
}

#[test]
fn stray_descriptors_end_their_sender() {
    ends(
        &header(|_| {}),
        |world| vec![world.ledger.memory(1)],
        ErrorCode::BadDescriptors,
    );
    // With half a header, which could still announce some.
    let many = |world: &World| (0..20).map(|_| world.ledger.memory(1)).collect();
    ends(
        &header(|bytes| bytes.truncate(7)),
        many,
        ErrorCode::BadDescriptors,
    );
}

#[test]
fn descriptors_that_a_request_does_not_own_end_their_sender() {
    ends(
        &header(|bytes| bytes[16] = 1),
        |world| vec![world.ledger.memory(1)],
        ErrorCode::BadDescriptors,
    );
}

#[test]
fn descriptors_that_the_kernel_dropped_end_their_sender() {
    let mut world = World::ready();
    let (now, peer) = (world.now, Peer { pid: 50, uid: UID });
    let server = world.server.as_mut().unwrap();
    let conn = server.input(|server| server.accept(now, Origin::Daemon(0), peer));
    let bytes = header(|bytes| bytes[16] = 2);
    server.input(|server| server.receive(now, conn, &bytes, None, true));
    assert!(
        matches!(server.events.last(), Some(ServerEvent::Ended { why, .. }) if why.contains("MSG_CTRUNC"))
    );
    assert_eq!(
        server.interest[&conn],
        (false, true),
        "only the error frame is left to do"
    );
    server.input(|server| server.hangup(now, conn));
    is_served(&mut world);
    world.finish();
}

#[test]
fn half_a_frame_and_silence_end_at_their_deadline() {
    let mut world = World::ready();
    let half = world.raw(0);
    let silent = world.raw(0);
    let dripping = world.raw(0);
    world.send(half, &header(|bytes| bytes.truncate(11)), vec![]);
    for byte in header(|_| {}).into_iter().take(9) {
        world.send(dripping, &[byte], vec![]);
        world.pass(Span::secs(1));
        is_served(&mut world);
    }
    assert!(!world.raws[&half].ended);
    world.pass(Span::secs(2));
    for raw in [half, silent, dripping] {
        assert_eq!(code(&world.heard(raw)), ErrorCode::Timeout);
        assert!(world.raws[&raw].ended);
    }
    world.finish();
}

#[test]
fn a_whole_request_sets_the_deadline_anew() {
    let mut world = World::ready();
    let raw = world.raw(0);
    for _ in 0..10 {
        world.pass(Span::secs(9));
        world.say(raw, GetMemory {}, vec![]);
        world.run();
        assert!(matches!(world.heard(raw)[..], [Message::Memory(_)]));
    }
    world.pass(Span::secs(11));
    assert!(world.raws[&raw].ended);
    world.finish();
}

#[test]
fn who_never_reads_is_ended_and_holds_up_nobody() {
    let mut world = World::ready();
    world.capacity = 100;
    let deaf = world.raw(0);
    world.raws.get_mut(&deaf).unwrap().deaf = true;
    world.capacity = 200_000;
    for _ in 0..3 {
        world.say(deaf, GetStatus {}, vec![]);
    }
    world.run();
    let interest: Vec<_> = world
        .server
        .as_ref()
        .unwrap()
        .interest
        .values()
        .copied()
        .collect();
    assert!(
        interest.contains(&(false, true)),
        "it is not read while it does not read"
    );
    is_served(&mut world);
    world.pass(Span::secs(6));
    world.raws.get_mut(&deaf).unwrap().deaf = false;
    world.run();
    assert!(world.raws[&deaf].ended && world.raws[&deaf].heard.is_empty());
    world.finish();
}

#[test]
fn a_flood_of_requests_is_answered_one_by_one() {
    let mut world = World::ready();
    let raw = world.raw(0);
    for _ in 0..1000 {
        world.say(raw, GetMemory {}, vec![]);
    }
    world.run();
    assert_eq!(world.heard(raw).len(), 1000);
    world.finish();
}

#[test]
fn an_unknown_command_keeps_the_connection_usable() {
    let mut world = World::ready();
    let raw = world.raw(0);
    let mut unknown = frame(&GetMemory {}.into(), 9, 0);
    unknown[6..8].copy_from_slice(&999_u16.to_le_bytes());
    world.send(raw, &unknown, vec![]);
    // Known, but not here.
    world.say(raw, weightd_core::wire::message::Stop {}, vec![]);
    world.say(raw, GetMemory {}, vec![]);
    world.run();
    let heard = world.heard(raw);
    assert_eq!(code(&heard[..1]), ErrorCode::UnknownCommand);
    assert_eq!(failure(&heard[..1]).message, "unknown command 999");
    assert_eq!(code(&heard[1..2]), ErrorCode::UnknownCommand);
    assert!(matches!(heard[2], Message::Memory(_)));
    world.finish();
}

#[test]
fn a_malformed_body_is_named_and_keeps_the_connection_usable() {
    let mut world = World::ready();
    let raw = world.raw(0);
    let mut long = frame(&GetMemory {}.into(), 1, 0);
    long[12] = 3;
    long.extend([1, 2, 3]);
    world.send(raw, &long, vec![]);
    world.say(raw, GetMemory {}, vec![]);
    world.run();
    let heard = world.heard(raw);
    assert_eq!(code(&heard[..1]), ErrorCode::Malformed);
    assert_eq!(
        failure(&heard[..1]).message,
        "the body of a GetMemory message is malformed (3 bytes)"
    );
    assert!(matches!(heard[1], Message::Memory(_)));
    world.finish();
}

#[test]
fn of_a_mismatch_in_more_fields_than_a_frame_can_carry_as_many_are_said_as_it_can() {
    let mut world = World::ready();
    let raw = world.raw(0);
    let mut huge = key(0);
    for number in 0..5000 {
        huge.extra.insert(format!("{number}"), String::new());
    }
    world.say(
        raw,
        GetState {
            key: huge,
            is_reload: false,
        },
        vec![],
    );
    world.run();
    let heard = world.heard(raw);
    let [Message::Mismatch(mismatch)] = &heard[..] else {
        panic!("{heard:?}")
    };
    assert_eq!(mismatch.fields.len(), 100);
    is_served(&mut world);
    world.finish();
}

#[test]
fn a_key_that_no_frame_can_carry_is_the_engines_own_error() {
    let mut world = World::ready();
    let mut huge = key(0);
    huge.extra.insert("x".repeat(70_000), String::new());
    let engine = world.attach(0, AttachOptions::new(UID), huge);
    world.run();
    assert!(matches!(
        &world.engines[engine].end,
        Some(End::Disk(AttachError::Malformed { .. }))
    ));
    world.finish();
}

#[test]
fn publishing_on_a_daemons_socket_is_refused() {
    let mut world = World::ready();
    let raw = world.raw(0);
    let publish = publication(0, Expects::Empty, content(64, &[]));
    world.say(raw, publish, vec![]);
    world.run();
    assert_eq!(code(&world.heard(raw)), ErrorCode::NotAllowed);
    world.finish();
}

#[test]
fn a_foreign_user_and_the_overflow_user_are_refused_by_the_daemon() {
    let mut world = World::ready();
    for uid in [UID + 1, 0, OVERFLOW_UID] {
        let raw = world.raw_as(Origin::Daemon(0), Peer { pid: 60, uid });
        world.say(raw, get_state_of(0), vec![]);
        world.run();
        assert_eq!(code(&world.heard(raw)), ErrorCode::RefusedPeer);
        assert!(world.raws[&raw].ended);
    }
    is_served(&mut world);
    world.finish();
}

#[test]
fn the_overflow_user_does_not_even_trust_itself() {
    let peer = Peer {
        pid: 1,
        uid: OVERFLOW_UID,
    };
    assert!(!peer.is_trusted_by(OVERFLOW_UID));
}

#[test]
fn a_foreign_daemon_is_refused_by_the_engine() {
    for server_uid in [UID + 1, OVERFLOW_UID] {
        let mut world = World::ready();
        world.server_uid = server_uid;
        let options = AttachOptions {
            fallback: false,
            ..AttachOptions::new(UID)
        };
        let engine = world.attach(0, options, key(0));
        world.pass(Span::secs(10));
        let engine = &world.engines[engine];
        assert!(matches!(
            &engine.end,
            Some(End::Failed(AttachError::RefusedPeer { .. }))
        ));
        assert_eq!(engine.log, ["connect"], "it is not retried");
        world.finish();
    }
}

/// Facts that are not what a message about one region of 1000 bytes says.
fn lies(world: &World, lie: usize) -> (ContentInfo, Vec<Fd>) {
    use weightd_core::peer::Facts;
    let memory = |sealed, size| {
        world.ledger.open(Facts {
            file: FileKind::Memory { sealed },
            size,
        })
    };
    let device = || {
        world.ledger.open(Facts {
            file: FileKind::CharDevice { major: 195 },
            size: 0,
        })
    };
    let told = |handle| ContentInfo {
        manifest_bytes: 64,
        regions: vec![RegionInfo { handle, bytes: 1000 }],
        tensors: 1,
        aliases: 0,
        checksums: false,
    };
    let host = told(HandleKind::Memfd);
    match lie {
        0 => (host, vec![memory(false, 64), memory(true, 1000)]),
        1 => (host, vec![memory(true, 64), memory(false, 1000)]),
        2 => (host, vec![memory(true, 65), memory(true, 1000)]),
        3 => (host, vec![memory(true, 64), memory(true, 999)]),
        4 => (host, vec![memory(true, 64), device()]),
        5 => (
            told(HandleKind::CudaFd),
            vec![memory(true, 64), memory(true, 1000)],
        ),
        6 => (host, vec![device(), memory(true, 1000)]),
        7 => (host, vec![memory(true, 64)]),
        8 => (host, vec![]),
        9 => (
            host,
            vec![memory(true, 64), memory(true, 1000), memory(true, 1000)],
        ),
        10 => (
            told(HandleKind::CudaIpc),
            vec![memory(true, 64), memory(true, 1000)],
        ),
        11 => {
            let mut many = content(64, &[]);
            many.regions = vec![
                RegionInfo {
                    handle: HandleKind::CudaIpc,
                    bytes: 1
                };
                16
            ];
            (many, vec![memory(true, 64)])
        }
        _ => unreachable!("there are 12 lies"),
    }
}

#[test]
fn a_vault_does_not_believe_a_loader() {
    for lie in 0..12 {
        let mut world = World::new();
        world.start_vault(false);
        let open = world.ledger.open_in_all();
        let loader = world.raw_as(Origin::Loader, Peer { pid: 30, uid: UID });
        let (content, descriptors) = lies(&world, lie);
        world.say(loader, publication(0, Expects::Empty, content), descriptors);
        world.run();
        assert_eq!(code(&world.heard(loader)), ErrorCode::BadDescriptors, "lie {lie}");
        assert_eq!(world.ledger.open_in_all(), open, "lie {lie}: nothing is kept");
        world.finish();
    }
}

#[test]
fn a_server_does_not_believe_a_vault() {
    use weightd_core::content::Generation;
    use weightd_core::wire::message::{Define, Holds, Lead};
    for lie in 0..12 {
        let mut world = World::new();
        world.start_server();
        let leader = world.raw_as(Origin::Control, Peer { pid: 10, uid: UID });
        let (lock, listener) = (world.ledger.lock(), world.ledger.listener());
        world.say(leader, Lead { pid: 10 }, vec![]);
        let define = Define {
            daemon: 0,
            info: info(0, false),
            holds: Holds::Empty,
        };
        world.say(leader, define, vec![lock, listener]);
        world.run();
        world.heard(leader);
        let open = world.ledger.open_in_all();
        let (content, descriptors) = lies(&world, lie);
        let publish = Publish {
            generation: Some(Generation { epoch: 1, number: 1 }),
            ..publication(0, Expects::Empty, content)
        };
        world.say(leader, publish, descriptors);
        world.run();
        assert_eq!(code(&world.heard(leader)), ErrorCode::BadDescriptors, "lie {lie}");
        assert!(world.raws[&leader].ended);
        assert_eq!(world.ledger.open_in_all(), open, "lie {lie}: nothing is kept");
        world.finish();
    }
}

#[test]
fn an_engine_does_not_believe_a_daemon() {
    use weightd_core::content::Generation;
    use weightd_core::machine::{Attach, Exchange, Step};
    for lie in 0..12 {
        let world = World::new();
        let options = AttachOptions {
            fallback: false,
            ..AttachOptions::new(UID)
        };
        let mut attach = Attach::new(options, key(0));
        assert!(matches!(attach.step(world.now), Step::Connect));
        attach.connected(world.now, Ok(Peer { pid: 1, uid: UID }));
        let (content, descriptors) = lies(&world, lie);
        let generation = Generation { epoch: 1, number: 1 };
        let state = State {
            generation,
            device_uuid: device(0),
            content,
        };
        let bytes = frame(&state.into(), 1, descriptors.len());
        attach.receive(
            world.now,
            &bytes,
            descriptors.into_iter().map(|fd| (fd.facts, fd)),
            false,
        );
        let step = attach.step(world.now);
        assert!(
            matches!(
                step,
                Step::Next(AttachStep::Done(Err(AttachError::Malformed { .. })))
            ),
            "lie {lie}: {step:?}"
        );
        assert_eq!(world.ledger.open_in_all(), 0, "lie {lie}: nothing is kept");
    }
}

#[test]
fn a_client_that_vanishes_at_any_byte_leaves_nothing_behind() {
    let request = frame(&get_state_of(0).into(), 1, 0);
    for cut in 0..=request.len() {
        let mut world = World::ready();
        let open = world.ledger.open_in_all();
        let raw = world.raw(0);
        world.send(raw, &request[..cut.max(1)], vec![]);
        world.run();
        world.hang_up(raw);
        world.raws.get_mut(&raw).unwrap().heard.clear();
        world.run();
        assert_eq!(world.ledger.open_in_all(), open, "cut at byte {cut}");
        let raw = world.release(0);
        assert!(matches!(world.heard(raw)[..], [Message::Released(_)]));
        world.finish();
    }
}
