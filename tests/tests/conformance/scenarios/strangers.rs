//! Clients that break the rules, beside a good engine that is served.

use crate::stage::*;
use crate::world::frame;
use weightd_core::content::Generation;
use weightd_core::machine::Limits;
use weightd_core::machine::faults::{AT_ONCE, WHEN_ANSWERED};
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{
    ErrorCode, Expects, GetMemory, GetState, GetStatus, Publish, Release, Replace,
};

fn serving<S: Stage>() -> (S, Generation) {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    (stage, generation)
}

/// An engine loads, whatever else goes on.
#[track_caller]
fn is_served(stage: &mut impl Stage, generation: Generation) {
    let (engine, end) = stage.run(Order::load().patient());
    assert_eq!(end, mapped(generation));
    assert_eq!(stage.reads(&engine), FIRST.mark);
    stage.leave(engine);
}

/// What ended a connection, by what was heard last.
#[track_caller]
fn code(heard: &[Message]) -> ErrorCode {
    match heard.last() {
        Some(Message::Failure(failure)) => ErrorCode::from_number(failure.code),
        other => panic!("{other:?}"),
    }
}

fn get_state() -> Message {
    let is_reload = false;
    GetState {
        key: key(),
        is_reload,
    }
    .into()
}

pub fn half_a_request_delays_nobody<S: Stage>() {
    let limits = Limits {
        idle: Span::millis(800),
        ..Limits::default()
    };
    let mut stage = S::start(Daemon {
        limits,
        ..Daemon::loaded()
    });
    let generation = stage.load(FIRST);
    let whole = frame(&get_state(), 1, 0);
    let mut halves = Vec::new();
    for cut in [0, 1, 19, 20, whole.len() - 1] {
        let mut stranger = stage.stranger();
        stage.says(&mut stranger, &whole[..cut], Vec::new());
        halves.push(stranger);
    }
    is_served(&mut stage, generation);
    for mut stranger in halves {
        assert_eq!(code(&stage.hears_the_end(&mut stranger)), ErrorCode::Timeout);
        stage.hangs_up(stranger);
    }
}

/// Who says this hears why and is gone, and somebody else is served meanwhile and after.
fn ends<S: Stage>(bytes: &[u8], given: Vec<Given>, expected: ErrorCode) {
    let (mut stage, generation) = serving::<S>();
    let mut stranger = stage.stranger();
    stage.says(&mut stranger, bytes, given);
    is_served(&mut stage, generation);
    assert_eq!(code(&stage.hears_the_end(&mut stranger)), expected);
    is_served(&mut stage, generation);
}

/// A good request with some bytes changed.
fn changed(change: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = frame(&GetMemory {}.into(), 1, 0);
    change(&mut bytes);
    bytes
}

pub fn garbage_ends_its_sender<S: Stage>() {
    ends::<S>(b"GET / HTTP/1.1\r\n\r\n", Vec::new(), ErrorCode::Malformed);
    ends::<S>(&[0; 100_000], Vec::new(), ErrorCode::Malformed);
    ends::<S>(
        &changed(|bytes| bytes[12..16].fill(0xff)),
        Vec::new(),
        ErrorCode::Malformed,
    );
}

pub fn another_version_ends_its_sender<S: Stage>() {
    ends::<S>(&changed(|bytes| bytes[4] = 9), Vec::new(), ErrorCode::Version);
}

pub fn a_flood_delays_nobody<S: Stage>() {
    let (mut stage, generation) = serving::<S>();
    let flood: Vec<u8> = (1..=5000)
        .flat_map(|request| frame(&GetStatus {}.into(), request, 0))
        .collect();
    let mut strangers = Vec::new();
    for _ in 0..20 {
        let mut stranger = stage.stranger();
        stage.says(&mut stranger, &flood, Vec::new());
        strangers.push(stranger);
    }
    is_served(&mut stage, generation);
    for stranger in strangers {
        stage.hangs_up(stranger);
    }
    is_served(&mut stage, generation);
}

pub fn who_never_reads_delays_nobody<S: Stage>() {
    let limits = Limits {
        unread: Span::millis(500),
        ..Limits::default()
    };
    let mut stage = S::start(Daemon {
        limits,
        ..Daemon::loaded()
    });
    let generation = stage.load(FIRST);
    // Descriptors that nobody takes up count for all processes of a user.
    let asks: Vec<u8> = (1..=8)
        .flat_map(|request| frame(&get_state(), request, 0))
        .collect();
    let mut deaf = Vec::new();
    for _ in 0..10 {
        let mut stranger = stage.stranger();
        stage.says(&mut stranger, &asks, Vec::new());
        deaf.push(stranger);
    }
    for _ in 0..5 {
        is_served(&mut stage, generation);
    }
    for stranger in deaf {
        stage.hangs_up(stranger);
    }
    is_served(&mut stage, generation);
}

pub fn descriptors_that_are_not_announced_end_their_sender<S: Stage>() {
    let given = || vec![Given::Sealed(vec![1; 10]), Given::Other];
    let whole = changed(|_| {});
    ends::<S>(&whole, given(), ErrorCode::BadDescriptors);
    // Those that a request does not own, though it says so.
    let announced = changed(|bytes| bytes[16] = 2);
    ends::<S>(&announced, given(), ErrorCode::BadDescriptors);
}

pub fn descriptors_that_do_not_come_end_their_sender<S: Stage>() {
    let announced = changed(|bytes| bytes[16] = 2);
    ends::<S>(&announced, vec![Given::Other], ErrorCode::BadDescriptors);
    let too_many = changed(|bytes| bytes[16] = 17);
    ends::<S>(&too_many, Vec::new(), ErrorCode::Malformed);
}

pub fn an_unknown_command_is_answered_and_the_connection_stays<S: Stage>() {
    let mut stage = S::start(Daemon {
        publish: Some(Replace::Keep),
        ..Daemon::publishable()
    });
    let mut stranger = stage.stranger();
    let unknown = changed(|bytes| bytes[6..8].fill(0x7f));
    stage.says(&mut stranger, &unknown, Vec::new());
    assert_eq!(code(&stage.hears(&mut stranger, 1)), ErrorCode::UnknownCommand);
    let release = Release {
        daemon: 0,
        generation: None,
    };
    stage.says(&mut stranger, &frame(&release.into(), 2, 0), Vec::new());
    let heard = stage.hears(&mut stranger, 1);
    assert!(matches!(heard[..], [Message::Released(_)]), "{heard:?}");
    stage.hangs_up(stranger);
}

/// The daemon's part of it is in the core's own tests; here it is that every server goes on.
pub fn a_request_that_panics_ends_its_sender_alone<S: Stage>() {
    let (mut stage, generation) = serving::<S>();
    let (engine, end) = stage.run(Order::load().patient());
    assert_eq!(end, mapped(generation));
    for fault in [AT_ONCE, WHEN_ANSWERED] {
        let mut stranger = stage.stranger();
        stage.says(&mut stranger, &frame(&get_state(), fault, 0), Vec::new());
        assert_eq!(code(&stage.hears_the_end(&mut stranger)), ErrorCode::Internal);
        is_served(&mut stage, generation);
    }
    // With what came along, and behind another request.
    let (content, given) = stage.genuine(FIRST);
    let publish = Publish {
        daemon: 0,
        generation: None,
        expects: Expects::Generation(generation),
        key: key(),
        content,
    };
    let both = [
        frame(&GetMemory {}.into(), 1, 0),
        frame(&publish.into(), AT_ONCE, given.len()),
    ];
    let mut stranger = stage.stranger();
    stage.says(&mut stranger, &both.concat(), given);
    let heard = stage.hears_the_end(&mut stranger);
    assert!(matches!(heard[0], Message::Memory(_)), "{heard:?}");
    assert_eq!(code(&heard), ErrorCode::Internal);
    stage.settles("only the first engine leases", |status| status.leases == 1);
    assert_eq!(stage.reads(&engine), FIRST.mark);
    assert!(!stage.is_lost(&engine));
    stage.leave(engine);
}
