//! Engines that copy, and have the daemon let go.

use crate::stage::*;
use weightd_core::machine::AttachError;
use weightd_core::wire::message::Holds;

pub fn what_is_copied_is_let_go_by_the_daemon<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    let (engine, end) = stage.run(Order::copy());
    assert_eq!(end, copied(generation));
    assert_eq!(stage.reads(&engine), FIRST.mark);
    let status = stage.status();
    assert_eq!((status.holds, status.leases), (Holds::Released(generation), 0));
    assert_is!(
        stage.try_out(Order::copy()).because(),
        AttachError::Released { .. }
    );
    let (_, end) = stage.run_in_time(Order::copy().patient().brief());
    assert_is!(end.error(), AttachError::Released { .. });
}

pub fn where_releases_are_refused_what_is_copied_stays<S: Stage>() {
    let mut stage = S::start(Daemon {
        no_release: true,
        ..Daemon::loaded()
    });
    let generation = stage.load(FIRST);
    let (engine, end) = stage.run(Order::copy());
    let released = false;
    assert_eq!(end, End::Copied { generation, released });
    assert_eq!(stage.reads(&engine), FIRST.mark);
    assert_eq!(stage.status().holds, Holds::Content(generation));
}

fn build_failed() -> AttachError {
    AttachError::BuildFailed {
        why: "no such layer".to_owned(),
    }
}

pub fn a_failed_build_releases_what_it_got_before_the_disk_load<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    assert_eq!(stage.try_out(Order::copy().fails()), End::Disk(build_failed()));
    assert_eq!(stage.status().holds, Holds::Released(generation));
}

pub fn a_failed_build_does_not_release_what_came_meanwhile<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    stage.load(FIRST);
    let mut engine = stage.begin(Order::copy().fails().stays());
    stage.works(&mut engine);
    let second = stage.load(SECOND);
    assert_eq!(stage.end(&mut engine), End::Disk(build_failed()));
    assert_eq!(stage.status().holds, Holds::Content(second));
}

pub fn a_failed_build_without_a_disk_load_releases_nothing<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    let end = stage.try_out(Order::copy().patient().fails());
    assert_eq!(end, End::Failed(build_failed()));
    assert_eq!(stage.status().holds, Holds::Content(generation));
}
