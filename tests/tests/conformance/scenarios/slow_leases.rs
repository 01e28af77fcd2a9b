//! Daemons that go for longer than they may.

use super::leases::is_lost;
use crate::stage::*;
use weightd_blocking::LeaseEvent;

pub fn a_daemon_that_is_gone_is_lost<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    let (mut engine, _) = stage.run(Order::load());
    stage.go();
    is_lost(&mut stage, &mut engine, generation);
}

pub fn a_daemon_that_is_back_late_is_leased_from_again<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    let (mut engine, _) = stage.run(Order::load());
    stage.kill_server();
    is_lost(&mut stage, &mut engine, generation);
    stage.start_server();
    let event = stage.event(&mut engine);
    assert_eq!(event, LeaseEvent::LeasedAgain { generation });
    assert!(!stage.is_lost(&engine));
    assert_eq!(stage.hears_late(&mut engine), None);
    assert_eq!(stage.status().leases, 1);
}
