//! Daemons that are none: whatever they say, an engine ends in time, with an error of a known cause or at its disk.

use crate::stage::*;
use crate::world::frame;
use weightd_blocking::LeaseEvent;
use weightd_core::content::{DeviceUuid, Generation};
use weightd_core::machine::{AttachError, PublishError};
use weightd_core::wire::Message;
use weightd_core::wire::message::{ContentInfo, GetStatus, Memory, NeedDigest, Released, State, Watching};

const GENERATION: Generation = Generation { epoch: 5, number: 6 };

/// Reacts to requests, and says nothing before.
fn on_request(act: impl Fn(&Message, u32) -> Reaction + Send + 'static) -> Act {
    Box::new(move |asked| match asked {
        None => Reaction::default(),
        Some((message, request)) => act(message, request),
    })
}

/// What engines make of each of these at once: one that may load from disk, and one that may not.
fn told<S: Stage>(sound: bool, order: &Order, acts: Vec<impl Fn(&S) -> Act>) -> Vec<AttachError> {
    let mut tries = Vec::new();
    for act in acts {
        for order in [order.clone(), order.clone().patient()] {
            let mut stage = S::start(Daemon::loaded());
            let act = act(&stage);
            stage.impersonate(sound, act);
            let engine = stage.begin(order);
            tries.push((stage, engine));
        }
    }
    let ends = tries
        .into_iter()
        .map(|(mut stage, mut engine)| stage.end(&mut engine));
    let errors = ends.enumerate().map(|(number, end)| match number % 2 {
        0 => end.because(),
        _ => end.error(),
    });
    errors.collect()
}

#[track_caller]
fn malformed<S: Stage>(sound: bool, act: impl Fn(&S) -> Act) {
    for error in told(sound, &Order::load(), vec![act]) {
        assert!(matches!(error, AttachError::Malformed { .. }), "{error:?}");
    }
}

pub fn garbage_is_malformed<S: Stage>() {
    malformed::<S>(true, |_| {
        Box::new(|_| Reaction::says("HTTP/1.1 400 Bad Request\r\n\r\n"))
    });
    malformed::<S>(true, |_| {
        on_request(|_, request| {
            let mut long = frame(&NeedDigest {}.into(), request, 0);
            long[12..16].fill(0xff);
            Reaction::says(long)
        })
    });
    malformed::<S>(true, |_| {
        on_request(|_, request| {
            let mut body = frame(&NeedDigest {}.into(), request, 0);
            body[12] = 3;
            Reaction::says([body, vec![1, 2, 3]].concat())
        })
    });
}

pub fn half_an_answer_is_waited_for_and_not_for_ever<S: Stage>() {
    let cut = |cut| {
        move |_: &S| {
            on_request(move |_, request| {
                let memory = Memory {
                    current: 1,
                    leased: 1,
                };
                let whole = frame(&memory.into(), request, 0);
                Reaction::says(&whole[..cut])
            })
        }
    };
    let halves = [1, 19, 20, 35].map(cut).into();
    for error in told(true, &Order::load().brief(), halves) {
        assert!(matches!(error, AttachError::Timeout { .. }), "{error:?}");
    }
}

pub fn a_connection_that_closes_is_tried_again_and_not_for_ever<S: Stage>() {
    let acts: Vec<fn(&S) -> Act> = vec![
        |_| Box::new(|_| Reaction::default().then_ends()),
        |_| on_request(|_, _| Reaction::default().then_ends()),
        |_| on_request(|_, _| Reaction::says("wgtd").then_ends()),
    ];
    for error in told(true, &Order::load().brief(), acts) {
        // The last try may be cut short.
        let passing = matches!(error, AttachError::Broken { .. } | AttachError::Timeout { .. });
        assert!(passing, "{error:?}");
    }
}

pub fn silence_is_waited_for_and_not_for_ever<S: Stage>() {
    let silence = |_: &S| -> Act { Box::new(|_| Reaction::default()) };
    for error in told(true, &Order::load().brief(), vec![silence]) {
        assert!(matches!(error, AttachError::Timeout { .. }), "{error:?}");
    }
}

pub fn an_answer_to_something_else_is_malformed<S: Stage>() {
    malformed::<S>(true, |_| {
        on_request(|_, request| Reaction::answers(request + 1, NeedDigest {}))
    });
    malformed::<S>(true, |_| {
        on_request(|_, request| Reaction::answers(request, Released {}))
    });
    malformed::<S>(true, |_| {
        on_request(|_, request| Reaction::answers(request, GetStatus {}))
    });
}

pub fn a_digest_that_is_asked_for_again_and_again_is_malformed<S: Stage>() {
    malformed::<S>(true, |_| {
        on_request(|_, request| Reaction::answers(request, NeedDigest {}))
    });
}

/// Says that there is content, and gives this; leases are given.
fn serves(device_uuid: DeviceUuid, content: ContentInfo, given: Vec<Given>) -> Act {
    on_request(move |message, request| match message {
        Message::GetState(_) => {
            let state = State {
                generation: GENERATION,
                device_uuid,
                content: content.clone(),
            };
            Reaction::gives(request, state, given.clone())
        }
        Message::Watch(_) => Reaction::answers(request, Watching {}),
        _ => Reaction::default(),
    })
}

/// What becomes of content that was changed like this on its way.
#[track_caller]
fn malformed_when<S: Stage>(sound: bool, change: impl Fn(&S, &mut ContentInfo, &mut Vec<Given>)) {
    malformed::<S>(sound, |stage| {
        let (mut content, mut given) = stage.genuine(FIRST);
        change(stage, &mut content, &mut given);
        serves(stage.device(), content, given)
    });
}

pub fn memory_that_may_change_is_malformed<S: Stage>() {
    for which in [0, 1] {
        malformed_when::<S>(true, |_, _, given| {
            let Given::Sealed(bytes) = given[which].clone() else {
                panic!("genuine memory is sealed")
            };
            given[which] = Given::Unsealed(bytes);
        });
        malformed_when::<S>(true, |_, _, given| given[which] = Given::Other);
    }
}

pub fn descriptors_that_are_not_what_was_stated_are_malformed<S: Stage>() {
    malformed_when::<S>(true, |_, _, given| drop(given.pop()));
    malformed_when::<S>(true, |_, _, given| given.clear());
    malformed_when::<S>(true, |_, _, given| given.push(Given::Other));
    malformed_when::<S>(true, |_, _, given| given.swap(0, 1));
    malformed_when::<S>(true, |_, content, _| content.regions[0].bytes += 1);
    malformed_when::<S>(true, |_, content, _| content.manifest_bytes -= 1);
    malformed_when::<S>(true, |_, content, _| {
        let region = content.regions[0];
        content.regions.extend(vec![region; 15]);
    });
    // More were announced than come.
    malformed::<S>(true, |_| {
        on_request(|_, request| Reaction::says(frame(&NeedDigest {}.into(), request, 3)))
    });
}

pub fn content_that_is_not_what_was_stated_is_malformed<S: Stage>() {
    malformed_when::<S>(false, |stage, content, given| {
        (*content, *given) = stage.genuine(UNSOUND);
    });
    // A manifest of other regions than those that come with it.
    malformed_when::<S>(false, |stage, content, given| {
        let (other, mut others) = stage.genuine(OTHER_SHAPE);
        content.regions = other.regions;
        given[1] = others.remove(1);
    });
}

pub fn a_lease_that_is_never_given_fails_no_load<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let (content, given) = stage.genuine(FIRST);
    let mut serves = serves(stage.device(), content, given);
    let act = move |asked: Option<(&Message, u32)>| match asked {
        Some((Message::Watch(_), _)) => Reaction::default(),
        asked => serves(asked),
    };
    stage.impersonate(true, Box::new(act));
    let (engine, end) = stage.run_in_time(Order::load().brief());
    // An engine goes on looking for it.
    assert!(
        matches!(
            end,
            End::Mapped {
                generation: GENERATION,
                ..
            }
        ),
        "{end:?}"
    );
    assert_eq!(stage.reads(&engine), FIRST.mark);
}

pub fn a_copy_that_is_never_released_is_a_copy<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let (content, given) = stage.genuine(FIRST);
    stage.impersonate(true, serves(stage.device(), content, given));
    let (engine, end) = stage.run_in_time(Order::copy().brief());
    let (generation, released) = (GENERATION, false);
    assert_eq!(end, End::Copied { generation, released });
    assert_eq!(stage.reads(&engine), FIRST.mark);
}

/// What is no daemon's answer to anything.
fn nonsense() -> [Act; 6] {
    [
        Box::new(|_| Reaction::says("220 ready\r\n")),
        Box::new(|_| Reaction::default()),
        Box::new(|_| Reaction::default().then_ends()),
        on_request(|_, _| Reaction::says("wgtd\x01")),
        on_request(|_, request| Reaction::answers(request, NeedDigest {})),
        on_request(|_, request| Reaction::gives(request, Released {}, vec![Given::Other])),
    ]
}

/// What comes of an errand to each of these, for an engine that has something to fall back on and one that has not.
fn told_nonsense<S: Stage>(order: &Order) -> Vec<[End; 2]> {
    let begun = nonsense().map(|act| {
        let mut stage = S::start(Daemon::publishable());
        stage.impersonate(true, act);
        let engines = [order.clone(), order.clone().patient()].map(|order| stage.begin(order));
        (stage, engines)
    });
    let ends = |(mut stage, engines): (S, [_; 2])| engines.map(|mut engine| stage.end(&mut engine));
    begun.into_iter().map(ends).collect()
}

pub fn a_memory_that_is_none_counts_as_none<S: Stage>() {
    for [hasty, patient] in told_nonsense::<S>(&Order::memory().brief()) {
        assert_eq!(hasty, End::Memory(0));
        patient.error();
    }
}

pub fn nothing_is_published_to_nonsense<S: Stage>() {
    for end in told_nonsense::<S>(&Order::publish(FIRST).brief())
        .into_iter()
        .flatten()
    {
        use AttachError::*;
        let error = end.not_published();
        let expected = matches!(
            error,
            PublishError::Daemon(Malformed { .. } | Broken { .. } | Timeout { .. })
        );
        assert!(expected, "{error:?}");
    }
}

pub fn a_lease_is_not_renewed_by_nonsense<S: Stage>() {
    let acts: [fn() -> Act; 2] = [
        || Box::new(|_| Reaction::says("220 ready\r\n")),
        || on_request(|_, request| Reaction::answers(request, NeedDigest {})),
    ];
    for act in acts {
        let mut stage = S::start(Daemon::loaded());
        let generation = stage.load(FIRST);
        let (mut engine, _) = stage.run(Order::load());
        stage.impersonate(true, act());
        let event = stage.event(&mut engine);
        assert!(
            matches!(event, LeaseEvent::Lost { generation: lost, .. } if lost == generation),
            "{event:?}"
        );
        assert_eq!(stage.reads(&engine), FIRST.mark);
    }
}
