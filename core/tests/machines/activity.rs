//! What a daemon says of those who asked it, and of those who lease.

use crate::world::*;
use weightd_core::content::{Generation, Key};
use weightd_core::machine::{AttachOptions, Origin, VaultEvent};
use weightd_core::peer::Peer;
use weightd_core::wire::message::{
    Activity, CodeCount, ErrorCode, Expects, FieldCount, GetActivity, GetState, GetStatus, Lease, Leased,
    Loaded, MAX_GENERATIONS_LISTED, MAX_LEASES_LISTED, Message, Release, Watch,
};

fn generation(number: u64) -> Generation {
    Generation { epoch: EPOCH, number }
}

fn activity(world: &mut World) -> Activity {
    let raw = world.raw(0);
    world.say(raw, GetActivity {}, vec![]);
    world.run();
    let heard = world.heard(raw);
    world.hang_up(raw);
    world.run();
    match &heard[..] {
        [Message::Activity(activity)] => activity.clone(),
        other => panic!("{other:?}"),
    }
}

fn ask(world: &mut World, key: Key) {
    let raw = world.raw(0);
    let is_reload = false;
    world.say(raw, GetState { key, is_reload }, vec![]);
    world.run();
    world.hang_up(raw);
    world.run();
}

fn field(field: &str, count: u64) -> FieldCount {
    let field = field.to_owned();
    FieldCount { field, count }
}

fn code(code: ErrorCode, count: u64) -> CodeCount {
    let code = code.number();
    CodeCount { code, count }
}

#[test]
fn outcomes_are_counted_and_hostile_names_make_no_counters() {
    let mut world = World::ready();
    let empty = Activity {
        need_digest: 0,
        mismatches: 0,
        mismatched: vec![],
        refused: vec![],
        generations: vec![],
        leases: vec![],
        more_generations: 0,
        more_leases: 0,
    };
    assert_eq!(activity(&mut world), empty);

    let mut other_files = key(0);
    other_files.checkpoint.files = Some([9; 32]);
    ask(&mut world, other_files.clone());
    other_files.checkpoint.digest = Some([9; 32]);
    ask(&mut world, other_files);
    for number in 0..50 {
        let mut hostile = key(0);
        hostile.dtype = "float16".into();
        hostile.extra = (0..3)
            .map(|name| (format!("{number}-{name}"), String::new()))
            .collect();
        ask(&mut world, hostile);
    }
    let raw = world.raw(0);
    world.say(raw, Message::Loaded(loaded(0)), vec![]);
    world.send(raw, &[0; 20], vec![]);
    world.run();

    let expected = Activity {
        need_digest: 1,
        mismatches: 50,
        mismatched: vec![field("dtype", 50), field("extra", 50)],
        refused: vec![
            code(ErrorCode::Malformed, 1),
            code(ErrorCode::UnknownCommand, 1),
            code(ErrorCode::DigestPending, 1),
        ],
        ..empty.clone()
    };
    assert_eq!(activity(&mut world), expected);
    let other = world.raw(1);
    world.say(other, GetActivity {}, vec![]);
    world.run();
    assert_eq!(
        world.heard(other),
        [Message::Activity(empty)],
        "daemons count apart"
    );
    world.finish();
}

#[test]
fn leases_are_listed_with_their_processes_also_those_of_a_generation_that_was_released() {
    let mut world = World::new();
    world.start_vault(false);
    world.start_server();
    world.start_loader();
    world.publish(0, 1000, Expects::Empty);
    world.publish(1, 2000, Expects::Empty);
    world.run();
    world.attach(0, AttachOptions::new(UID), key(0));
    let raw = world.raw_as(Origin::Daemon(0), Peer { pid: 77, uid: UID });
    let generation = generation(1);
    let watch = |generation| Watch { generation };
    world.say(raw, watch(Some(generation)), vec![]);
    let plain = world.raw(0);
    world.say(plain, watch(None), vec![]);
    world.run();
    let release = world.raw(0);
    let daemon = 0;
    world.say(
        release,
        Release {
            daemon,
            generation: None,
        },
        vec![],
    );
    world.run();

    let found = activity(&mut world);
    let (bytes, leases) = (1000, 2);
    assert_eq!(
        found.generations,
        [Leased {
            generation,
            bytes,
            leases
        }]
    );
    assert!(found.leases.contains(&Lease { pid: 77, generation }), "{found:?}");
    assert_eq!((found.leases.len(), found.more_leases), (2, 0));
    world.hang_up(raw);
    world.run();
    assert_eq!(activity(&mut world).leases.len(), 1);
    world.finish();
}

#[test]
fn more_leases_than_fit_an_answer_are_counted() {
    let mut world = World::ready();
    for number in 0..MAX_LEASES_LISTED + 5 {
        let raw = world.raw(0);
        let generation = Some(generation(1));
        world.say(raw, Watch { generation }, vec![]);
        // Before there are too many connections that are no leases yet.
        if number % 256 == 0 {
            world.run();
        }
    }
    world.run();
    let found = activity(&mut world);
    assert_eq!((found.leases.len(), found.more_leases), (MAX_LEASES_LISTED, 5));
    assert_eq!(found.generations[0].leases as usize, MAX_LEASES_LISTED + 5);
    world.finish();
}

#[test]
fn the_longest_activity_fits_a_frame() {
    let generation = generation(1);
    let pid = u32::MAX;
    let longest = Activity {
        need_digest: u64::MAX,
        mismatches: u64::MAX,
        mismatched: (0..19).map(|_| field(&"x".repeat(40), 1)).collect(),
        refused: (0..64)
            .map(|number| CodeCount {
                code: number,
                count: 1,
            })
            .collect(),
        generations: vec![
            Leased {
                generation,
                bytes: 1,
                leases: 1
            };
            MAX_GENERATIONS_LISTED
        ],
        leases: vec![Lease { pid, generation }; MAX_LEASES_LISTED],
        more_generations: u32::MAX,
        more_leases: u32::MAX,
    };
    let message = Message::from(longest);
    let body = message.encode().expect("it fits");
    assert_eq!(Message::decode(message.kind(), &body), Ok(message));
}

fn loaded(daemon: u32) -> Loaded {
    Loaded {
        daemon,
        checkpoint: "/models/x".into(),
        tensors: 7,
        bytes: 1000,
        buffered: 3000,
        direct: 0,
        daemons: 2,
        micros: 5,
        path: "page cache".into(),
    }
}

#[test]
fn a_launcher_is_told_how_weights_were_read_before_it_holds_them() {
    let mut world = World::new();
    world.start_vault(false);
    world.start_server();
    world.start_loader();
    let long = Loaded {
        checkpoint: "ü".repeat(100_000),
        ..loaded(0)
    };
    world.loader.as_mut().unwrap().loaded(long);
    world.publish(0, 1000, Expects::Empty);
    world.run();
    let told: Vec<_> = world
        .vault
        .as_ref()
        .unwrap()
        .events
        .iter()
        .filter_map(|event| match event {
            VaultEvent::Loaded(loaded) => {
                Some((loaded.daemon, loaded.buffered, loaded.checkpoint.chars().count()))
            }
            VaultEvent::Stored { daemon, .. } => Some((*daemon, 0, 0)),
            _ => None,
        })
        .collect();
    assert_eq!(told, [(0, 3000, 2048), (0, 0, 0)]);
    world.finish();
}

#[test]
fn an_activity_is_asked_for_on_a_daemons_socket_only() {
    let mut world = World::ready();
    let control = world.raw_as(Origin::Control, Peer { pid: 11, uid: UID });
    world.say(control, GetActivity {}, vec![]);
    let public = world.raw(0);
    world.say(public, GetStatus {}, vec![]);
    world.run();
    let heard = world.heard(control);
    let [Message::Failure(failure)] = &heard[..] else {
        panic!("{heard:?}")
    };
    assert_eq!(ErrorCode::from_number(failure.code), ErrorCode::UnknownCommand);
    assert_eq!(
        activity(&mut world).refused,
        [],
        "what is refused elsewhere is not a daemon's"
    );
    world.finish();
}
