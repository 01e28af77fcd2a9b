//! An engine's lease, once more.

use crate::world::frame;
use weightd_core::content::Generation;
use weightd_core::machine::{Client, ConnectFailure, Exchange, RENEWS_WITHIN, Renewal, Renewed, Step};
use weightd_core::peer::{Facts, Peer};
use weightd_core::time::{Now, Span};
use weightd_core::wire::message::{ErrorCode, Failure, GetStatus, Message, Watch, Watching};
use weightd_core::wire::{Decoder, Frame};

const UID: u32 = 1000;
const PEER: Peer = Peer { pid: 7, uid: UID };

fn generation() -> Generation {
    Generation { epoch: 3, number: 4 }
}

fn start() -> Renewal<u32> {
    Renewal::new(Now(0), generation(), UID)
}

/// What was asked; the renewal waits for the answer then.
fn asked(renewal: &mut Renewal<u32>, now: Now) -> Frame<u32> {
    assert_eq!(renewal.step(now), Step::Connect);
    renewal.connected(now, Ok(PEER));
    let bytes = renewal.exchange().outgoing().unwrap().bytes.to_vec();
    renewal.exchange().wrote(now, bytes.len());
    assert!(matches!(renewal.step(now), Step::Io { .. }));
    let mut decoder = Decoder::default();
    decoder.push(&bytes, Vec::<(Facts, u32)>::new(), false).unwrap();
    decoder.next_frame().unwrap().unwrap()
}

fn answer(renewal: &mut Renewal<u32>, now: Now, request: u32, message: impl Into<Message>) -> Step<Renewed> {
    let bytes = frame(&message.into(), request, 0);
    renewal
        .exchange()
        .receive(now, &bytes, Vec::<(Facts, u32)>::new(), false);
    renewal.step(now)
}

#[test]
fn the_same_generation_is_leased_from_whoever_serves_it_now() {
    let mut renewal = start();
    let frame = asked(&mut renewal, Now(0));
    let watch = Watch {
        generation: Some(generation()),
    };
    assert_eq!(Message::decode(frame.kind, &frame.body), Ok(watch.into()));
    assert_eq!(
        answer(&mut renewal, Now(0), frame.request, Watching {}),
        Step::Next(Renewed::Leased)
    );
}

#[test]
fn a_daemon_that_is_on_its_way_back_is_waited_for_and_not_for_ever() {
    let mut renewal = start();
    let mut now = Now(0);
    let mut tries = 0;
    loop {
        match renewal.step(now) {
            Step::Connect => {
                tries += 1;
                let failure = match tries % 3 {
                    0 => Err(ConnectFailure::Busy),
                    1 => Err(ConnectFailure::Absent("no socket".to_owned())),
                    _ => Ok(PEER),
                };
                renewal.connected(now, failure);
            }
            Step::Io { .. } => renewal.exchange().hangup(now, "it died"),
            Step::Sleep { until } => {
                assert!(until > now);
                now = until;
            }
            Step::Next(Renewed::Lost { .. }) => break,
            Step::Next(Renewed::Leased) => panic!("nobody leased it"),
        }
    }
    assert!(
        tries > 10 && now <= Now(0) + RENEWS_WITHIN,
        "{tries} tries until {now:?}"
    );
}

#[test]
fn an_answer_that_does_not_come_is_asked_for_again() {
    let mut renewal = start();
    asked(&mut renewal, Now(0));
    let Step::Io { until } = renewal.step(Now(0)) else {
        panic!("it waits")
    };
    assert!(matches!(renewal.step(until), Step::Sleep { .. }));
}

#[test]
fn what_cannot_get_better_is_lost_at_once() {
    let failure = |code: ErrorCode| Failure {
        code: code.number(),
        retryable: false,
        message: "generation 9 is served".to_owned(),
    };
    for message in [
        Message::from(failure(ErrorCode::StaleGeneration)),
        failure(ErrorCode::Released).into(),
        GetStatus {}.into(),
    ] {
        let mut renewal = start();
        let frame = asked(&mut renewal, Now(0));
        let step = answer(&mut renewal, Now(0), frame.request, message.clone());
        assert!(
            matches!(step, Step::Next(Renewed::Lost { .. })),
            "{message:?}: {step:?}"
        );
    }
    let mut renewal = start();
    let frame = asked(&mut renewal, Now(0));
    let step = answer(&mut renewal, Now(0), frame.request, failure(ErrorCode::Busy));
    assert!(matches!(step, Step::Sleep { .. }), "{step:?}");

    let mut foreign = start();
    assert_eq!(foreign.step(Now(0)), Step::Connect);
    foreign.connected(Now(0), Ok(Peer { pid: 7, uid: UID + 1 }));
    assert!(
        foreign.exchange().outgoing().is_none(),
        "a stranger is told nothing"
    );
    assert!(matches!(foreign.step(Now(0)), Step::Next(Renewed::Lost { .. })));

    let mut refused = start();
    refused.connected(
        Now(0) + Span::millis(1),
        Err(ConnectFailure::Refused("a symlink".to_owned())),
    );
    assert!(matches!(refused.step(Now(0)), Step::Next(Renewed::Lost { .. })));
}
