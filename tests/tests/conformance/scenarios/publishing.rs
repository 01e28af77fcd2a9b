//! Engines that publish what they made of their weights.

use crate::stage::*;
use crate::world::frame;
use weightd_core::content::{Difference, Key};
use weightd_core::machine::{AttachError, PublishError};
use weightd_core::time::Span;
use weightd_core::wire::message::{Expects, Holds, Publish, Replace};

fn packed() -> Order {
    Order::load().keyed(processed("packed"))
}

fn anew(content: Content) -> Order {
    Order::publish(content).keyed(processed("anew"))
}

pub fn the_next_engine_maps_what_was_published<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let (publisher, end) = stage.run(Order::publish(FIRST));
    let generation = end.clone().published();
    let leased = true;
    assert_eq!(end, End::Published { generation, leased });
    assert_eq!(stage.reads(&publisher), FIRST.mark, "as everybody maps it");
    let (engine, end) = stage.run(packed());
    assert_eq!(end, mapped(generation));
    assert_eq!(stage.reads(&engine), FIRST.mark);
    let status = stage.status();
    assert_eq!((status.leases, status.bytes), (2, FIRST.bytes));
    assert_eq!(status.info.key.processing, "packed");
    stage.leave(publisher);
    assert_eq!(stage.try_out(packed()), mapped(generation));
}

pub fn what_is_published_is_known_by_its_digest<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let generation = stage.try_out(Order::publish(FIRST)).published();
    let mut elsewhere = processed("packed");
    elsewhere.checkpoint.files = Some([77; 32]);
    let order = Order::load().keyed(elsewhere);
    assert_eq!(stage.try_out(order.clone()), mapped(generation));
    let other = Order {
        digest: Ok([8; 32]),
        ..order
    };
    let mismatch = AttachError::Mismatch {
        fields: vec![Difference::new(
            "checkpoint",
            "digest 08080808",
            "digest 09090909",
        )],
    };
    assert_eq!(stage.try_out(other), End::Disk(mismatch));
    let why = "a file is gone".to_owned();
    let unknown = Order {
        digest: Err(why.clone()),
        ..anew(SECOND)
    };
    let error = stage.try_out(unknown).not_published();
    assert_eq!(error, PublishError::Daemon(AttachError::DigestFailed { why }));
    assert_eq!(stage.status().holds, Holds::Content(generation));
}

pub fn what_is_published_takes_the_place_of_what_there_was<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let (_first, _) = stage.run(Order::publish(FIRST));
    let (engine, _) = stage.run(packed());
    let (_second, end) = stage.run(anew(SECOND));
    let generation = end.published();
    assert_eq!(stage.status().holds, Holds::Content(generation));
    let mismatch = AttachError::Mismatch {
        fields: vec![Difference::new("processing", "packed", "anew")],
    };
    assert_eq!(stage.try_out(packed()), End::Disk(mismatch));
    let (other, end) = stage.run(Order::load().keyed(processed("anew")));
    assert_eq!(end, mapped(generation));
    assert_eq!(
        (stage.reads(&engine), stage.reads(&other)),
        (FIRST.mark, SECOND.mark)
    );
}

pub fn content_that_the_daemon_has_is_not_published_again<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let generation = stage.run(Order::publish(FIRST)).1.published();
    for order in [Order::publish(SECOND), Order::publish(SECOND).patient()] {
        let error = stage.try_out(order).not_published();
        assert_eq!(error, PublishError::Held { generation });
    }
    // What was let go may come back.
    stage.release(None).expect("a release");
    let again = stage.try_out(Order::publish(SECOND)).published();
    assert_ne!(again, generation);
}

pub fn content_of_another_place_is_not_published<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let elsewhere = Key {
        tp_rank: 1,
        dp_size: 2,
        ..processed("packed")
    };
    let fields = vec![
        Difference::new("tp_rank", "1", "0"),
        Difference::new("dp_size", "2", "1"),
    ];
    let order = Order::publish(FIRST).keyed(elsewhere);
    let error = stage.try_out(order).not_published();
    assert_eq!(error, PublishError::Misplaced { fields });
    assert_eq!(stage.status().holds, Holds::Empty);
}

pub fn an_ordinary_daemon_takes_nothing<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    let error = stage.try_out(Order::publish(SECOND)).not_published();
    assert_eq!(error, PublishError::NotTaken);
    assert_eq!(stage.status().holds, Holds::Content(generation));
}

pub fn on_another_device_nothing_is_published<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let order = Order {
        here: false,
        ..Order::publish(FIRST)
    };
    assert_is!(
        stage.try_out(order).not_published(),
        PublishError::Daemon(AttachError::WrongDevice { .. })
    );
}

pub fn to_a_daemon_of_another_user_nothing_is_published<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let order = Order {
        ours: false,
        ..Order::publish(FIRST)
    };
    assert_is!(
        stage.try_out(order.patient()).not_published(),
        PublishError::Daemon(AttachError::RefusedPeer { .. })
    );
}

pub fn what_came_meanwhile_is_not_replaced<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    for expected in [SECOND, OTHER_SHAPE] {
        let mut slow = stage.begin(Order::publish(FIRST).stays());
        stage.works(&mut slow);
        let how = format!("{expected:?}");
        let (quick, end) = stage.run(Order::publish(expected).keyed(processed(&how)));
        let generation = end.published();
        let error = stage.end(&mut slow).not_published();
        assert!(matches!(error, PublishError::Conflict { .. }), "{error:?}");
        assert_eq!(stage.status().holds, Holds::Content(generation));
        assert_eq!(stage.reads(&quick), expected.mark);
    }
    // So is a release: the publisher's engine may not be what its operator wants there any more.
    let mut slow = stage.begin(Order::publish(FIRST).stays());
    stage.works(&mut slow);
    stage.release(None).expect("a release");
    assert_is!(
        stage.end(&mut slow).not_published(),
        PublishError::Conflict { .. }
    );
}

pub fn of_two_that_publish_at_once_one_does<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let mut one = stage.begin(Order::publish(FIRST).stays());
    let mut other = stage.begin(anew(SECOND).stays());
    stage.works(&mut one);
    stage.works(&mut other);
    let (one_ends, other_ends) = (stage.end(&mut one), stage.end(&mut other));
    let (winner, loser) = match &one_ends {
        End::Published { .. } => (one_ends, other_ends),
        _ => (other_ends, one_ends),
    };
    assert_is!(loser.not_published(), PublishError::Conflict { .. });
    assert_eq!(stage.status().holds, Holds::Content(winner.published()));
}

pub fn a_fill_that_fails_leaves_what_there_was<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let generation = stage.run(Order::publish(FIRST)).1.published();
    assert_is!(
        stage.try_out(anew(SECOND).fails()).not_published(),
        PublishError::FillFailed { .. }
    );
    let (engine, end) = stage.run(packed());
    assert_eq!(end, mapped(generation));
    assert_eq!(stage.reads(&engine), FIRST.mark);
}

pub fn a_publisher_that_vanishes_leaves_what_there_was<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let (publisher, end) = stage.run(Order::publish(FIRST));
    let generation = end.published();
    stage.leave(publisher);
    let (content, given) = stage.genuine(SECOND);
    let publish = Publish {
        daemon: 0,
        generation: None,
        expects: Expects::Generation(generation),
        key: processed("anew"),
        content,
    };
    let whole = frame(&publish.into(), 1, given.len());
    for cut in [1, 19, 20, 21, whole.len() / 2, whole.len() - 1] {
        let mut vanishes = stage.stranger();
        stage.says(&mut vanishes, &whole[..cut], given.clone());
        stage.hangs_up(vanishes);
        let (engine, end) = stage.run(packed());
        assert_eq!(end, mapped(generation), "after {cut} bytes");
        assert_eq!(stage.reads(&engine), FIRST.mark);
        stage.leave(engine);
    }
    // Who says all of it and vanishes has published.
    let mut vanishes = stage.stranger();
    stage.says(&mut vanishes, &whole, given);
    stage.hangs_up(vanishes);
    let expected = processed("anew");
    stage.settles("it is published", |status| status.info.key == expected);
    let (engine, _) = stage.run(Order::load().keyed(processed("anew")));
    assert_eq!(stage.reads(&engine), SECOND.mark);
}

pub fn without_room_what_there_was_is_kept<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let generation = stage.run(Order::publish(FIRST)).1.published();
    assert_is!(
        stage.try_out(anew(HUGE)).not_published(),
        PublishError::OutOfMemory { .. }
    );
    assert_eq!(stage.status().holds, Holds::Content(generation));
    assert_eq!(stage.try_out(packed()), mapped(generation));
}

pub fn what_would_not_fit_alone_either_drops_nothing<S: Stage>() {
    let mut stage = S::start(Daemon {
        publish: Some(Replace::DropFirst),
        ..Daemon::publishable()
    });
    let generation = stage.run(Order::publish(FIRST)).1.published();
    // Where there is room, nothing is dropped before the new is there.
    let mut slow = stage.begin(anew(SECOND).stays());
    stage.works(&mut slow);
    assert_eq!(stage.status().holds, Holds::Content(generation));
    let second = stage.end(&mut slow).published();
    // This does not fit alone either, so nothing is dropped for it.
    assert_is!(
        stage.try_out(Order::publish(HUGE)).not_published(),
        PublishError::OutOfMemory { .. }
    );
    assert_eq!(stage.status().holds, Holds::Content(second));
    let third = stage.try_out(Order::publish(FIRST)).published();
    assert_eq!(stage.status().holds, Holds::Content(third));
}

pub fn a_publisher_that_can_wait_publishes_once_the_daemon_is_there<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    stage.kill_server();
    let mut publisher = stage.begin(Order::publish(FIRST).patient());
    stage.pass(Span::millis(20));
    stage.start_server();
    let generation = stage.end(&mut publisher).published();
    assert_eq!(stage.status().holds, Holds::Content(generation));
    stage.go();
    assert_is!(
        stage.try_out(Order::publish(FIRST)).not_published(),
        PublishError::Daemon(AttachError::Unavailable { .. })
    );
    assert_is!(
        stage
            .try_out(Order::publish(FIRST).patient().brief())
            .not_published(),
        PublishError::Daemon(AttachError::Unavailable { .. })
    );
}

pub fn a_server_may_be_replaced_while_the_memory_is_filled<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let mut publisher = stage.begin(Order::publish(FIRST).stays());
    stage.works(&mut publisher);
    stage.kill_server();
    stage.start_server();
    let generation = stage.end(&mut publisher).published();
    let (engine, end) = stage.run(packed());
    assert_eq!(end, mapped(generation));
    assert_eq!(stage.reads(&engine), FIRST.mark);
}

pub fn what_was_published_is_served_by_the_next_server<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let generation = stage.try_out(Order::publish(FIRST)).published();
    stage.kill_server();
    stage.start_server();
    let (engine, end) = stage.run(packed());
    assert_eq!(end, mapped(generation));
    assert_eq!(stage.reads(&engine), FIRST.mark);
}
