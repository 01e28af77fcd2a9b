//! What becomes of a lease when the daemon does not stay.

use crate::stage::*;
use weightd_blocking::LeaseEvent;
use weightd_core::content::Generation;

pub fn a_lease_ends_with_its_engine<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    stage.load(FIRST);
    let (engine, _) = stage.run(Order::load());
    let (other, _) = stage.run(Order::load());
    assert_eq!(stage.status().leases, 2);
    stage.leave(engine);
    stage.settles("one lease is left", |status| status.leases == 1);
    stage.leave(other);
    stage.settles("no lease is left", |status| status.leases == 0);
}

pub fn a_server_that_is_replaced_is_leased_from_again<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    let (mut engine, _) = stage.run(Order::load());
    for _ in 0..3 {
        stage.kill_server();
        assert_eq!(stage.reads(&engine), FIRST.mark);
        stage.start_server();
        let event = stage.event(&mut engine);
        assert_eq!(event, LeaseEvent::LeasedAgain { generation });
        assert_eq!(stage.status().leases, 1);
    }
    assert!(!stage.is_lost(&engine));
    assert_eq!(
        stage.hears_late(&mut engine),
        None,
        "that it was leased again is over"
    );
    stage.leave(engine);
    stage.settles("no lease is left", |status| status.leases == 0);
}

/// The engine knows that its daemon is lost, says so once to whoever listens, and goes on.
pub fn is_lost<S: Stage>(stage: &mut S, engine: &mut S::Engine, was: Generation) {
    let event = stage.event(engine);
    assert!(
        matches!(event, LeaseEvent::Lost { generation, .. } if generation == was),
        "{event:?}"
    );
    assert!(stage.is_lost(engine));
    assert_eq!(stage.reads(engine), FIRST.mark);
}

pub fn a_daemon_that_serves_something_else_is_lost<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let first = stage.load(FIRST);
    let (mut engine, _) = stage.run(Order::load());
    let (mut other, _) = stage.run(Order::load());
    stage.kill_server();
    let second = stage.load(SECOND);
    stage.start_server();
    for engine in [&mut engine, &mut other] {
        is_lost(&mut stage, engine, first);
        let late = stage.hears_late(engine).expect("who listens later hears it too");
        assert!(
            matches!(late, LeaseEvent::Lost { generation, .. } if generation == first),
            "{late:?}"
        );
    }
    assert_eq!(stage.status().leases, 0, "the other content is not theirs");
    assert_eq!(stage.try_out(Order::load()), mapped(second));
}

pub fn a_publisher_leases_again_too<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    let (mut publisher, end) = stage.run(Order::publish(FIRST));
    let generation = end.published();
    stage.kill_server();
    stage.start_server();
    let event = stage.event(&mut publisher);
    assert_eq!(event, LeaseEvent::LeasedAgain { generation });
    stage.kill_server();
    stage.load(SECOND);
    stage.start_server();
    is_lost(&mut stage, &mut publisher, generation);
}
