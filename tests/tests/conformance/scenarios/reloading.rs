//! Engines that have weights, and change to what is served now.

use crate::stage::*;
use weightd_core::content::Difference;
use weightd_core::machine::AttachError;
use weightd_core::wire::message::Holds;

pub fn what_is_mapped_already_is_not_mapped_again<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    let (mut engine, _) = stage.run(Order::load());
    for order in [Order::reload(generation), Order::reload(generation).patient()] {
        assert_eq!(stage.reload(&mut engine, order), End::Unchanged);
    }
    assert_eq!(stage.reads(&engine), FIRST.mark);
    let status = stage.status();
    assert_eq!(status.reloads, 2);
    stage.settles("it has the lease that it had", |status| status.leases == 1);
    assert!(!stage.is_lost(&engine));
}

pub fn a_new_generation_is_mapped_anew<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let first = stage.load(FIRST);
    let (mut engine, _) = stage.run(Order::load());
    let (other, _) = stage.run(Order::load());
    let second = stage.load(OTHER_SHAPE);
    assert_eq!(stage.reload(&mut engine, Order::reload(first)), mapped(second));
    assert_eq!(stage.reads(&engine), OTHER_SHAPE.mark);
    assert_eq!(
        stage.reads(&other),
        FIRST.mark,
        "who does not reload keeps what it has"
    );
    stage.settles("each leases what it has", |status| status.leases == 2);
}

pub fn what_is_gone_leaves_the_engine_what_it_had<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    let (mut engine, _) = stage.run(Order::load());
    stage.release(None).expect("a release");
    let error = stage.reload(&mut engine, Order::reload(generation)).error();
    assert_is!(error, AttachError::Released { .. });
    stage.go();
    assert_is!(
        stage.reload(&mut engine, Order::reload(generation)).error(),
        AttachError::Unavailable { .. }
    );
    let error = stage.reload(&mut engine, Order::reload(generation).patient().brief());
    assert_is!(error.error(), AttachError::Unavailable { .. });
    assert_eq!(stage.reads(&engine), FIRST.mark);
}

pub fn what_another_key_published_is_no_reload<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let (mut engine, end) = stage.run(Order::publish(FIRST));
    let first = end.published();
    let (_other, end) = stage.run(Order::publish(SECOND).keyed(processed("otherwise")));
    end.published();
    let order = Order::reload(first).keyed(processed("packed"));
    let mismatch = AttachError::Mismatch {
        fields: vec![Difference::new("processing", "packed", "otherwise")],
    };
    assert_eq!(stage.reload(&mut engine, order), End::Failed(mismatch));
    assert_eq!(stage.reads(&engine), FIRST.mark);
}

fn reload_copy() -> Order {
    Order {
        what: What::Reload(None),
        ..Order::copy()
    }
}

pub fn a_copy_is_overwritten_in_place<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    stage.load(FIRST);
    let (mut engine, _) = stage.run(Order::copy());
    let second = stage.load(SECOND);
    assert_eq!(stage.reload(&mut engine, reload_copy()), copied(second));
    assert_eq!(stage.reads(&engine), SECOND.mark);
    assert_eq!(stage.status().holds, Holds::Released(second));
}

pub fn a_copy_that_does_not_fit_is_left_as_it_was<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    stage.load(FIRST);
    let (mut engine, _) = stage.run(Order::copy());
    let other = stage.load(OTHER_SHAPE);
    assert_is!(
        stage.reload(&mut engine, reload_copy()).error(),
        AttachError::BuildFailed { .. }
    );
    assert_eq!(stage.reads(&engine), FIRST.mark);
    assert_eq!(
        stage.status().holds,
        Holds::Content(other),
        "others may have use for it"
    );
}
