//! Content that is let go.

use crate::stage::*;
use weightd_core::content::Generation;
use weightd_core::machine::AttachError;
use weightd_core::wire::message::{ErrorCode, Holds};

pub fn what_was_released_is_not_served<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    for which in [Some(generation), None, Some(generation)] {
        assert_eq!(stage.release(which), Ok(()), "as often as anybody wants");
        assert_eq!(stage.status().holds, Holds::Released(generation));
    }
    assert_is!(
        stage.try_out(Order::load()).because(),
        AttachError::Released { .. }
    );
    let (_, end) = stage.run_in_time(Order::load().patient().brief());
    assert_is!(end.error(), AttachError::Released { .. });
}

pub fn what_is_mapped_outlives_its_release<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    stage.load(FIRST);
    let (one, _) = stage.run(Order::load());
    let (other, _) = stage.run(Order::load());
    let (_third, end) = stage.run(Order::copy());
    assert!(matches!(end, End::Copied { released: true, .. }), "{end:?}");
    stage.leave(one);
    assert_eq!(stage.reads(&other), FIRST.mark);
    stage.settles("who maps it is counted", |status| status.leases == 1);
}

pub fn a_stale_generation_releases_nothing<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let first = stage.load(FIRST);
    let second = stage.load(SECOND);
    let unknown = Generation { number: 77, ..second };
    for which in [first, unknown] {
        assert_eq!(stage.release(Some(which)), Err(ErrorCode::StaleGeneration));
    }
    assert_eq!(stage.try_out(Order::load()), mapped(second));
}

pub fn where_releases_are_refused_the_content_stays<S: Stage>() {
    let mut stage = S::start(Daemon {
        no_release: true,
        ..Daemon::loaded()
    });
    let generation = stage.load(FIRST);
    for which in [Some(generation), None] {
        assert_eq!(stage.release(which), Err(ErrorCode::NotAllowed));
    }
    assert_eq!(stage.try_out(Order::load()), mapped(generation));
}

pub fn what_was_released_stays_so_in_the_next_server<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    stage.release(None).expect("a release");
    stage.kill_server();
    stage.start_server();
    assert_eq!(stage.status().holds, Holds::Released(generation));
    assert_is!(
        stage.try_out(Order::load()).because(),
        AttachError::Released { .. }
    );
    let fresh = stage.load(SECOND);
    assert_eq!(stage.try_out(Order::load()), mapped(fresh));
}
