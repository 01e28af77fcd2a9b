//! What outlives whom.

use crate::world::*;
use weightd_core::content::Generation;
use weightd_core::machine::{AttachOptions, Origin, Outcome, ServerEvent, VaultEvent};
use weightd_core::peer::Peer;
use weightd_core::time::Span;
use weightd_core::wire::message::{
    Define, ErrorCode, Expects, Failure, GetStatus, Holds, Lead, Leading, Message, Publish, Report, Reported,
    Stop,
};

fn generation(number: u64) -> Generation {
    Generation { epoch: EPOCH, number }
}

fn stops(world: &World) -> Vec<bool> {
    let events = world.server.as_ref().unwrap().events.iter();
    events
        .filter_map(|event| match event {
            ServerEvent::Stop { orphaned } => Some(*orphaned),
            _ => None,
        })
        .collect()
}

fn control(world: &mut World, pid: u32) -> usize {
    world.raw_as(Origin::Control, Peer { pid, uid: UID })
}

#[test]
fn a_dead_server_is_armed_anew_with_the_same_generations_and_no_connect_is_refused() {
    let mut world = World::ready();
    let before = world.attach(0, AttachOptions::new(UID), key(0));
    world.run();
    world.kill_server();
    world.run();
    assert!(world.engines[before].lease_ended);
    // It connects while there is no server, and waits in the backlog.
    let between = world.attach(0, AttachOptions::new(UID), key(0));
    world.pass(Span::secs(1));
    assert_eq!(world.engines[between].end, None);
    world.start_server();
    world.run();
    let mapped = Outcome::Mapped {
        generation: generation(1),
        leased: true,
    };
    assert_eq!(world.engines[between].end, Some(End::Done(mapped)));
    assert_eq!(world.engines[between].log, ["connect", "import", "build"]);
    let vault = world.vault.as_ref().unwrap();
    assert_eq!(vault.events.last(), Some(&VaultEvent::Armed { complete: true }));
    assert!(
        vault
            .events
            .contains(&VaultEvent::ServerGone { why: String::new() })
    );
    world.finish();
}

#[test]
fn a_server_lets_nobody_in_before_content_that_was_announced_is_there() {
    let mut world = World::new();
    world.start_server();
    let leader = control(&mut world, 10);
    world.say(leader, Lead { pid: 10 }, vec![]);
    let (lock, listener) = (world.ledger.lock(), world.ledger.listener());
    let define = Define {
        daemon: 0,
        info: info(0, false),
        holds: Holds::Content(generation(1)),
    };
    world.say(leader, define, vec![lock, listener]);
    world.run();
    assert!(matches!(
        world.heard(leader)[..],
        [Message::Leading(_), Message::Defined(_)]
    ));
    assert!(world.server.as_ref().unwrap().listening.is_empty());
    world.hang_up(leader);
    world.run();
    assert!(
        world.server.as_ref().unwrap().listening.contains_key(&0),
        "it will not come: say so"
    );
    world.finish();
}

#[test]
fn a_lost_generation_has_its_own_code() {
    let mut world = World::new();
    world.start_server();
    let leader = control(&mut world, 10);
    world.say(leader, Lead { pid: 10 }, vec![]);
    let (lock, listener) = (world.ledger.lock(), world.ledger.listener());
    world.listeners.push(listener.file);
    let define = Define {
        daemon: 0,
        info: info(0, false),
        holds: Holds::Lost(generation(4)),
    };
    world.say(leader, define, vec![lock, listener]);
    world.run();
    let raw = world.raw(0);
    world.say(raw, get_state_of(0), vec![]);
    world.run();
    let [Message::Failure(failure)] = &world.heard(raw)[..] else {
        panic!("one failure")
    };
    assert_eq!(ErrorCode::from_number(failure.code), ErrorCode::Lost);
    world.finish();
}

#[test]
fn a_launcher_that_dies_leaves_its_server_serving() {
    let mut world = World::ready();
    world.kill_vault();
    world.pass(Span::secs(100));
    assert_eq!(stops(&world), [true; 0]);
    let engine = world.attach(1, AttachOptions::new(UID), key(1));
    world.run();
    assert!(matches!(
        world.engines[engine].end,
        Some(End::Done(Outcome::Mapped { leased: true, .. }))
    ));
    world.finish();
}

#[test]
fn an_orphan_that_holds_nothing_stops_after_its_last_answer() {
    let mut world = World::ready();
    world.kill_vault();
    world.run();
    world.release(0);
    assert_eq!(stops(&world), [true; 0], "daemon 1 still has content");
    let other = world.release(1);
    assert!(matches!(world.heard(other)[..], [Message::Released(_)]));
    assert_eq!(stops(&world), [true]);
    world.finish();
}

#[test]
fn a_server_without_content_stops_with_its_launcher() {
    let mut world = World::new();
    world.start_vault(false);
    world.start_server();
    world.run();
    world.kill_vault();
    world.run();
    assert_eq!(stops(&world), [true]);
    world.finish();
}

#[test]
fn a_server_that_nobody_leads_stops_after_a_while() {
    let mut world = World::new();
    world.start_server();
    world.pass(Span::secs(29));
    assert_eq!(stops(&world), [true; 0]);
    world.pass(Span::secs(2));
    assert_eq!(stops(&world), [true]);
    world.finish();
}

#[test]
fn a_second_lead_is_refused_and_the_first_is_named() {
    let mut world = World::ready();
    let second = control(&mut world, 11);
    world.say(second, Lead { pid: 11 }, vec![]);
    world.say(second, GetStatus {}, vec![]);
    world.run();
    let heard = world.heard(second);
    let Message::Failure(failure) = &heard[0] else {
        panic!("{heard:?}")
    };
    assert_eq!(failure.message, "launcher 10 leads this server");
    let Message::ServerStatus(status) = &heard[1] else {
        panic!("{heard:?}")
    };
    assert_eq!((status.launcher_pid, status.daemons), (10, 2));
    world.finish();
}

#[test]
fn a_server_that_ends_before_it_answers_is_given_up_at_once_and_one_that_answered_is_not() {
    let mut world = World::new();
    world.start_vault(false);
    let server = world.raw_as(Origin::Server, Peer { pid: 20, uid: UID });
    world.run();
    assert!(matches!(world.heard(server)[..], [Message::Lead(_)]));
    world.vault.as_mut().unwrap().input(|vault| vault.server_ended());
    world.run();
    let gone = VaultEvent::ServerGone { why: String::new() };
    assert_eq!(world.vault.as_ref().unwrap().events, [gone]);
    world.finish();

    let mut world = World::new();
    world.start_vault(false);
    world.start_server();
    world.run();
    world.vault.as_mut().unwrap().input(|vault| vault.server_ended());
    world.run();
    let events = &world.vault.as_ref().unwrap().events;
    let gone = |event: &VaultEvent| matches!(event, VaultEvent::ServerGone { .. });
    assert!(!events.iter().any(gone), "{events:?}");
    world.finish();
}

#[test]
fn a_second_vault_learns_whose_server_it_is() {
    let mut world = World::new();
    world.start_vault(false);
    let server = world.raw_as(Origin::Server, Peer { pid: 20, uid: UID });
    let why = "launcher 10 leads this server".to_owned();
    let refusal = Failure {
        code: ErrorCode::NotAllowed.number(),
        retryable: false,
        message: why.clone(),
    };
    world.say(server, refusal, vec![]);
    world.run();
    assert!(matches!(
        world.heard(server)[..],
        [Message::Lead(Lead { pid: VAULT_PID })]
    ));
    assert_eq!(
        world.vault.as_ref().unwrap().events,
        [VaultEvent::ServerGone { why }]
    );
    world.finish();
}

#[test]
fn who_does_not_lead_may_not_define_arm_or_say_digests() {
    let mut world = World::ready();
    let other = control(&mut world, 11);
    world.say(
        other,
        weightd_core::wire::message::Digest {
            daemon: 0,
            digest: [1; 32],
        },
        vec![],
    );
    world.run();
    let [Message::Failure(failure)] = &world.heard(other)[..] else {
        panic!("one failure")
    };
    assert_eq!(ErrorCode::from_number(failure.code), ErrorCode::NotAllowed);
    let fd = world.ledger.memory(1);
    let file = fd.file;
    let define = Define {
        daemon: 5,
        info: info(5, false),
        holds: Holds::Empty,
    };
    world.say(other, define, vec![fd]);
    world.run();
    assert_eq!(world.ledger.open_of(file), 0);
    assert!(
        world.raws[&other].ended,
        "descriptors that nobody wants end a connection"
    );
    world.finish();
}

#[test]
fn a_stop_is_relayed_to_the_launcher_once_and_who_asked_may_wait_for_the_end() {
    let mut world = World::ready();
    let (first, second) = (control(&mut world, 11), control(&mut world, 12));
    world.say(first, Stop {}, vec![]);
    world.say(second, Stop {}, vec![]);
    world.run();
    assert!(matches!(world.heard(first)[..], [Message::Stopping(_)]));
    let requests = |world: &World| {
        let events = world.vault.as_ref().unwrap().events.iter();
        events
            .filter(|event| **event == VaultEvent::StopRequested)
            .count()
    };
    assert!((1..=2).contains(&requests(&world)));
    assert_eq!(stops(&world), [true; 0], "the launcher decides");
    world.pass(Span::secs(60));
    assert!(!world.raws[&first].ended);
    let now = world.now;
    world
        .vault
        .as_mut()
        .unwrap()
        .input(|vault| vault.stop_server(now));
    world.run();
    assert_eq!(stops(&world), [false]);
    world.kill_server();
    world.run();
    assert!(world.raws[&first].ended);
    world.finish();
}

#[test]
fn an_orphan_is_stopped_directly() {
    let mut world = World::ready();
    world.kill_vault();
    let raw = control(&mut world, 11);
    world.say(raw, Stop {}, vec![]);
    world.run();
    assert!(matches!(world.heard(raw)[..], [Message::Stopping(_)]));
    assert_eq!(stops(&world), [true]);
    world.finish();
}

#[test]
fn imports_that_failed_are_told_one_at_a_time_and_only_of_the_current_generation() {
    let mut world = World::ready();
    let report = |number| Report {
        daemon: 9,
        generation: generation(number),
        import_failed: "no".into(),
    };
    // A leader that has not answered the first report yet is sent no other.
    world.kill_vault();
    let leader = control(&mut world, 12);
    world.say(leader, Lead { pid: 12 }, vec![]);
    world.run();
    world.heard(leader);
    let raw = world.raw(0);
    for number in [7, 1, 8, 1, 1] {
        world.say(raw, report(number), vec![]);
    }
    world.run();
    assert_eq!(world.heard(raw).len(), 5, "each is answered");
    let told = Message::from(Report {
        daemon: 0,
        ..report(1)
    });
    let asked: Vec<u32> = world.raws[&leader]
        .heard
        .iter()
        .map(|frame| frame.request)
        .collect();
    assert_eq!(world.heard(leader), std::slice::from_ref(&told));
    world.send(leader, &frame(&Reported {}.into(), asked[0], 0), vec![]);
    world.run();
    world.say(raw, report(1), vec![]);
    world.run();
    assert_eq!(world.heard(leader), std::slice::from_ref(&told));
    // What a leader did not answer, the next one may hear.
    world.hang_up(leader);
    let next = control(&mut world, 13);
    world.say(next, Lead { pid: 13 }, vec![]);
    world.run();
    world.heard(next);
    world.say(raw, report(1), vec![]);
    world.run();
    assert_eq!(world.heard(next), [told]);
    world.finish();
}

#[test]
fn a_server_that_answers_nothing_is_given_up() {
    let mut world = World::new();
    world.start_vault(false);
    let silent = world.raw_as(Origin::Server, Peer { pid: 20, uid: UID });
    world.pass(Span::secs(9));
    assert!(!world.raws[&silent].ended);
    world.pass(Span::secs(2));
    assert!(world.raws[&silent].ended);
    let why = "it did not answer within 10 s".to_owned();
    assert_eq!(
        world.vault.as_ref().unwrap().events,
        [VaultEvent::ServerGone { why }]
    );
    world.pass(Span::secs(100));
    world.start_server();
    world.load();
    world.run();
    let vault = world.vault.as_ref().unwrap();
    assert_eq!(vault.events.last(), Some(&VaultEvent::Armed { complete: true }));
    world.finish();
}

#[test]
fn a_digest_has_no_answer_and_none_is_waited_for() {
    let mut world = World::ready();
    let digest = weightd_core::wire::message::Digest {
        daemon: 0,
        digest: [3; 32],
    };
    world.loader.as_mut().unwrap().digest(digest);
    world.pass(Span::secs(100));
    let vault = world.vault.as_ref().unwrap();
    assert!(
        !vault
            .events
            .iter()
            .any(|event| matches!(event, VaultEvent::ServerGone { .. }))
    );
    world.finish();
}

#[test]
fn a_server_that_talks_nonsense_is_given_up() {
    let mut world = World::new();
    world.start_vault(false);
    let server = world.raw_as(Origin::Server, Peer { pid: 20, uid: UID });
    world.send(server, b"HTTP/1.1 200 OK\r\n", vec![]);
    world.run();
    assert!(world.raws[&server].ended);
    assert!(matches!(
        world.vault.as_ref().unwrap().events[..],
        [VaultEvent::ServerGone { .. }]
    ));
    world.finish();
}

#[test]
fn a_new_server_takes_the_place_of_the_old_one() {
    let mut world = World::new();
    world.start_vault(false);
    let old = world.raw_as(Origin::Server, Peer { pid: 20, uid: UID });
    world.start_server();
    world.run();
    assert!(world.raws[&old].ended);
    let vault = world.vault.as_ref().unwrap();
    assert_eq!(vault.events.last(), Some(&VaultEvent::Armed { complete: false }));
    world.finish();
}

/// A server whose launcher dies while it hands over daemon 0, which is armed, and daemon 1, which
/// is only defined, as `holds`.
fn half_armed(holds: Holds) -> World {
    let mut world = World::new();
    world.start_server();
    let leader = control(&mut world, 10);
    world.say(leader, Lead { pid: 10 }, vec![]);
    for (daemon, holds) in [(0, Holds::Content(generation(1))), (1, holds)] {
        let (lock, listener) = (world.ledger.lock(), world.ledger.listener());
        world.listeners.push(listener.file);
        let info = info(daemon, false);
        world.say(leader, Define { daemon, info, holds }, vec![lock, listener]);
    }
    let publish = Publish {
        generation: Some(generation(1)),
        ..publication(0, Expects::Empty, content(64, &[1000]))
    };
    let descriptors = vec![world.ledger.memory(64), world.ledger.memory(1000)];
    world.say(leader, publish, descriptors);
    world.run();
    assert!(matches!(
        world.heard(leader)[..],
        [
            Message::Leading(_),
            Message::Defined(_),
            Message::Defined(_),
            Message::Published(_)
        ]
    ));
    world.hang_up(leader);
    world.run();
    world
}

#[test]
fn a_launcher_that_dies_while_it_arms_a_server_leaves_it_serving_what_it_has() {
    let mut world = half_armed(Holds::Content(generation(2)));
    assert!(stops(&world).is_empty());
    let engine = world.attach(0, AttachOptions::new(UID), key(0));
    world.run();
    let mapped = Outcome::Mapped {
        generation: generation(1),
        leased: true,
    };
    assert_eq!(world.engines[engine].end, Some(End::Done(mapped)));
    let raw = world.raw(1);
    world.say(raw, get_state_of(1), vec![]);
    world.run();
    let heard = world.heard(raw);
    assert!(
        matches!(&heard[..], [Message::Failure(failure)] if failure.code == ErrorCode::Empty.number()),
        "{heard:?}"
    );
    world.finish();
}

#[test]
fn a_launcher_that_dies_before_all_was_loaded_takes_its_server_along() {
    let world = half_armed(Holds::Empty);
    assert_eq!(
        stops(&world),
        [true],
        "no socket has its name, so nobody could find it"
    );
    world.finish();
}

#[test]
fn a_vault_hands_over_every_listener_before_any_content() {
    let mut world = World::ready();
    world.kill_server();
    let server = world.raw_as(Origin::Server, Peer { pid: 21, uid: UID });
    world.run();
    assert!(matches!(world.heard(server)[..], [Message::Lead(_)]));
    world.say(server, Leading {}, vec![]);
    world.run();
    assert!(matches!(
        world.heard(server)[..],
        [
            Message::Define(_),
            Message::Define(_),
            Message::Publish(_),
            Message::Publish(_)
        ]
    ));
    world.raws.get_mut(&server).unwrap().heard.clear();
    world.hang_up(server);
    world.run();
    world.finish();
}
