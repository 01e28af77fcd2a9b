//! What somebody may do who listens to a lease.

use crate::pair::Pair;
use crate::stage::{Daemon, FIRST, Order, SECOND, Stage};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weightd_blocking::Lease;
use weightd_tests::runtimes::{Blocking, OnSmol, OnTokio, Subject};

/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn a_listener_may_ask_and_drop_the_lease<S: Subject>() {
    let mut stage = Pair::<S, Blocking>::start(Daemon::loaded());
    stage.load(FIRST);
    let (mut engine, _) = stage.run(Order::load());
    let lease: Arc<Mutex<Option<Lease>>> = Arc::new(Mutex::new(engine.lease()));
    let (tells, told) = channel();
    let listened_to = Arc::clone(&lease);
    let listener = move |_: &_| {
        let lease = listened_to.lock().expect("a lease").take();
        let lease = lease.expect("it is told once");
        let is_lost = lease.is_lost();
        // Another takes its place, in vain.
        lease.on_event(|_| {});
        drop(lease);
        let _ = tells.send(is_lost);
    };
    lease
        .lock()
        .expect("a lease")
        .as_ref()
        .expect("a lease")
        .on_event(listener);
    stage.kill_server();
    stage.load(SECOND);
    stage.start_server();
    assert_eq!(told.recv_timeout(PATIENCE), Ok(true));
    assert_eq!(stage.reads(&engine), FIRST.mark);
}

#[test]
fn a_listener_may_ask_and_drop_the_lease_that_a_thread_keeps() {
    a_listener_may_ask_and_drop_the_lease::<Blocking>();
}

#[test]
fn a_listener_may_ask_and_drop_the_lease_that_tokio_keeps() {
    a_listener_may_ask_and_drop_the_lease::<OnTokio>();
}

#[test]
fn a_listener_may_ask_and_drop_the_lease_that_smol_keeps() {
    a_listener_may_ask_and_drop_the_lease::<OnSmol>();
}
