//! Caps on connections, leases and what one connection may ask for, and for how long.

use crate::world::*;
use weightd_core::content::Generation;
use weightd_core::machine::{AttachOptions, Limits, Machine, Origin, Outcome, ServerEvent};
use weightd_core::peer::Peer;
use weightd_core::time::Span;
use weightd_core::wire::message::{ErrorCode, GetMemory, Message, Release, Watch};

fn code(heard: &[Message]) -> ErrorCode {
    match heard {
        [Message::Failure(failure)] => ErrorCode::from_number(failure.code),
        other => panic!("{other:?} is no single failure"),
    }
}

fn is_served(world: &mut World) {
    let engine = world.attach(0, AttachOptions::new(UID), key(0));
    world.run();
    assert!(matches!(
        world.engines[engine].end,
        Some(End::Done(Outcome::Mapped { leased: true, .. }))
    ));
    world.end_engine(engine);
}

#[test]
fn of_600_connections_the_quietest_make_room() {
    let mut world = World::ready();
    let mut raws = Vec::new();
    for number in 0..600 {
        raws.push(world.raw(number % 2));
        world.pass(Span(1000));
        is_served(&mut world);
    }
    let ended = raws.iter().filter(|raw| world.raws[raw].ended).count();
    assert!(
        (88..=90).contains(&ended),
        "{ended} had to go for 600 and a good one"
    );
    assert!(
        raws[..ended].iter().all(|raw| world.raws[raw].ended),
        "the quietest"
    );
    assert_eq!(code(&world.heard(raws[0])), ErrorCode::Busy);
    for raw in &raws[ended..] {
        world.say(*raw, GetMemory {}, vec![]);
    }
    world.run();
    for raw in &raws[ended..] {
        assert!(matches!(world.heard(*raw)[..], [Message::Memory(_)]));
    }
    world.finish();
}

#[test]
fn strangers_and_silent_controllers_cost_nobody_a_place() {
    let mut world = World::new();
    world.limits = Limits {
        connections: 4,
        ..Limits::default()
    };
    world.start_vault(false);
    world.start_server();
    world.load();
    world.run();
    let good: Vec<usize> = (0..4).map(|_| world.raw(0)).collect();
    world.run();
    for _ in 0..20 {
        let raw = world.raw_as(
            Origin::Daemon(0),
            Peer {
                pid: 60,
                uid: UID + 1,
            },
        );
        world.run();
        assert!(world.raws[&raw].ended);
    }
    assert!(good.iter().all(|raw| !world.raws[raw].ended));
    let controllers: Vec<usize> = (0..8)
        .map(|_| world.raw_as(Origin::Control, Peer { pid: 60, uid: UID }))
        .collect();
    world.run();
    is_served(&mut world);
    world.pass(Span::secs(11));
    assert!(
        controllers.iter().all(|raw| world.raws[raw].ended),
        "silence ends them too"
    );
    let server = world.server.as_ref().unwrap();
    assert!(
        !server.events.contains(&ServerEvent::LeaderGone),
        "but never the launcher"
    );
    world.finish();
}

#[test]
fn where_everyone_waits_for_an_answer_that_we_owe_a_new_one_is_told_to_come_back() {
    let mut world = World::new();
    world.limits = Limits {
        connections: 2,
        ..Limits::default()
    };
    world.start_vault(false);
    world.start_server();
    world.load();
    world.run();
    world.hold_reaper = true;
    let waiting = [world.raw(0), world.raw(0)];
    for raw in waiting {
        world.say(
            raw,
            Release {
                daemon: 0,
                generation: None,
            },
            vec![],
        );
    }
    world.run();
    let late = world.raw(1);
    world.run();
    assert_eq!(code(&world.heard(late)), ErrorCode::Busy);
    world.hold_reaper = false;
    world.run();
    for raw in waiting {
        assert!(matches!(world.heard(raw)[..], [Message::Released(_)]));
    }
    world.finish();
}

#[test]
fn leases_have_a_cap_of_their_own() {
    let mut world = World::new();
    world.limits = Limits {
        leases: 3,
        connections: 2,
        ..Limits::default()
    };
    world.start_vault(false);
    world.start_server();
    world.load();
    world.run();
    let mut leases = Vec::new();
    for _ in 0..3 {
        let raw = world.raw(0);
        world.say(raw, Watch { generation: None }, vec![]);
        world.run();
        assert!(matches!(world.heard(raw)[..], [Message::Watching(_)]));
        leases.push(raw);
    }
    let engine = world.attach(0, AttachOptions::new(UID), key(0));
    world.run();
    let end = &world.engines[engine].end;
    assert!(
        matches!(end, Some(End::Done(Outcome::Mapped { leased: false, .. }))),
        "a lease never fails an attach: {end:?}"
    );
    world.hang_up(leases[0]);
    world.run();
    is_served(&mut world);
    world.finish();
}

#[test]
fn content_is_sent_on_one_connection_a_few_times_only() {
    let mut world = World::ready();
    let raw = world.raw(0);
    for _ in 0..9 {
        world.say(raw, get_state_of(0), vec![]);
    }
    world.run();
    let heard = world.heard(raw);
    assert_eq!(heard.len(), 9);
    assert!(
        heard[..8]
            .iter()
            .all(|message| matches!(message, Message::State(_)))
    );
    assert_eq!(code(&heard[8..]), ErrorCode::Busy);
    assert!(world.raws[&raw].ended);
    world.finish();
}

#[test]
fn without_a_free_descriptor_the_quietest_makes_room_and_accepting_pauses() {
    let mut world = World::ready();
    let (quiet, lively) = (world.raw(0), world.raw(0));
    world.run();
    world.pass(Span::secs(1));
    world.say(lively, GetMemory {}, vec![]);
    world.run();
    let now = world.now;
    let server = world.server.as_mut().unwrap();
    server.input(|server| server.accept_failed(now));
    assert!(!server.accepting);
    world.run();
    assert!(world.raws[&quiet].ended && !world.raws[&lively].ended);
    world.pass(Span::secs(1));
    assert!(world.server.as_ref().unwrap().accepting);
    is_served(&mut world);
    world.finish();
}

#[test]
fn a_lease_may_be_silent_for_ever_but_not_in_the_middle_of_a_request() {
    let mut world = World::ready();
    let watch = |generation| Watch { generation };
    let generation = Generation {
        epoch: EPOCH,
        number: 1,
    };
    let leases = [Some(generation), None, Some(generation), None].map(|generation| {
        let raw = world.raw(0);
        world.say(raw, watch(generation), vec![]);
        raw
    });
    let [silent, whole, half, dripping] = leases;
    world.pass(Span::secs(1000));
    for raw in leases {
        assert!(matches!(world.heard(raw)[..], [Message::Watching(_)]));
    }
    let request = frame(&watch(None).into(), 9, 0);
    let (last, rest) = request.split_last().expect("a frame");
    world.send(half, rest, vec![]);
    world.send(whole, &request, vec![]);
    world.send(dripping, &rest[..1], vec![]);
    world.pass(Span::secs(9));
    world.send(dripping, &rest[1..2], vec![]);
    world.run();
    assert!(leases.iter().all(|raw| !world.raws[raw].ended));
    world.pass(Span::secs(2));
    for raw in [half, dripping] {
        assert_eq!(code(&world.heard(raw)), ErrorCode::Timeout);
        assert!(world.raws[&raw].ended);
    }
    assert_eq!(code(&world.heard(whole)), ErrorCode::NotAllowed);

    // The rest within its time is as good as all at once; what follows it has its own time.
    world.send(whole, rest, vec![]);
    world.pass(Span::secs(9));
    world.send(whole, &[&[*last], rest].concat(), vec![]);
    world.pass(Span::secs(9));
    world.send(whole, &[*last], vec![]);
    world.pass(Span::secs(1000));
    assert_eq!(world.heard(whole).len(), 2);
    assert!(!world.raws[&whole].ended && !world.raws[&silent].ended);
    is_served(&mut world);
    world.finish();
}

/// The first `bytes` bytes of a request with a body of 64 KiB.
fn part_of_a_request(bytes: usize, descriptors: u8) -> Vec<u8> {
    let mut part = frame(&GetMemory {}.into(), 1, 0);
    part[12..16].copy_from_slice(&65_536u32.to_le_bytes());
    part[16] = descriptors;
    part.resize(bytes, 0);
    part
}

#[test]
fn what_all_together_leave_half_said_is_bounded_and_costs_those_who_leave_most() {
    let mut world = World::ready();
    let little: Vec<usize> = (0..50).map(|_| world.raw(0)).collect();
    for raw in &little {
        world.send(*raw, &part_of_a_request(1000, 0), vec![]);
    }
    // A lease may be silent for ever, and hoards no more than others.
    let leases: Vec<usize> = (0..200).map(|_| world.raw(1)).collect();
    for lease in &leases {
        world.say(*lease, Watch { generation: None }, vec![]);
    }
    world.run();
    for raw in &leases {
        world.heard(*raw);
        world.send(*raw, &part_of_a_request(60_000, 0), vec![]);
    }
    world.run();
    let ended: Vec<&usize> = leases.iter().filter(|raw| world.raws[raw].ended).collect();
    // 8 MiB, less what the others have sent, is 139 times 60,000 bytes.
    let kept = leases.len() - ended.len();
    assert!((130..=139).contains(&kept), "{kept}");
    for raw in ended {
        assert_eq!(code(&world.heard(*raw)), ErrorCode::Busy);
    }
    assert!(little.iter().all(|raw| !world.raws[raw].ended));
    is_served(&mut world);
    world.finish();
}

#[test]
fn descriptors_of_requests_that_are_half_said_are_bounded_too() {
    let mut world = World::ready();
    let raws: Vec<usize> = (0..300).map(|_| world.raw(0)).collect();
    for raw in &raws {
        let descriptors = (0..16).map(|_| world.ledger.memory(1)).collect();
        world.send(*raw, &part_of_a_request(20, 16), descriptors);
    }
    world.run();
    let ended = raws.iter().filter(|raw| world.raws[raw].ended).count();
    assert_eq!(ended, 300 - 128, "2048 descriptors count as 8 MiB");
    is_served(&mut world);
    world.pass(Span::secs(11));
    assert!(raws.iter().all(|raw| world.raws[raw].ended));
    world.finish();
}
