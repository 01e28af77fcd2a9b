//! What an engine counts for the budget of its KV-cache.

use crate::stage::*;
use weightd_core::machine::AttachError;
use weightd_core::time::Span;

pub fn what_is_mapped_counts_and_what_is_copied_does_not<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    stage.load(FIRST);
    let copies = Order {
        mode: weightd_core::machine::Mode::Copy,
        ..Order::memory()
    };
    assert_eq!(stage.try_out(Order::memory()), End::Memory(FIRST.bytes));
    assert_eq!(stage.try_out(copies.clone()), End::Memory(0));
    stage.release(None).expect("a release");
    assert_eq!(stage.try_out(Order::memory()), End::Memory(0));
    stage.go();
    assert_eq!(
        stage.try_out(copies.patient()),
        End::Memory(0),
        "nobody need be asked"
    );
}

pub fn a_daemon_that_is_not_there_counts_as_none<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    assert_eq!(stage.try_out(Order::memory()), End::Memory(0));
    assert_is!(
        stage.try_out(Order::memory().patient().brief()).error(),
        AttachError::Unavailable { .. }
    );
}

pub fn an_engine_that_can_wait_waits_for_the_answer<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let mut engine = stage.begin(Order::memory().patient());
    stage.pass(Span::millis(20));
    stage.load(FIRST);
    assert_eq!(stage.end(&mut engine), End::Memory(FIRST.bytes));
}
