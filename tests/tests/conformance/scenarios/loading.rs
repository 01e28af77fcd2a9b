//! Engines that map, or load from disk.

use crate::stage::*;
use weightd_core::content::{CheckpointId, Difference, Key, Role};
use weightd_core::machine::{AttachError, Limits};
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{Activity, ErrorCode, GetActivity};

pub fn an_engine_maps_what_is_served_and_leases_it<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    let (engine, end) = stage.run(Order::load());
    assert_eq!(end, mapped(generation));
    assert_eq!(stage.reads(&engine), FIRST.mark);
    let status = stage.status();
    assert_eq!((status.leases, status.served), (1, 1));
    assert!(!stage.is_lost(&engine));
}

pub fn at_the_limit_of_leases_an_engine_maps_without_one<S: Stage>() {
    let limits = Limits {
        leases: 1,
        ..Limits::default()
    };
    let mut stage = S::start(Daemon {
        limits,
        ..Daemon::loaded()
    });
    let generation = stage.load(FIRST);
    let (_first, end) = stage.run(Order::load());
    assert_eq!(end, mapped(generation));
    let (second, end) = stage.run(Order::load());
    let leased = false;
    assert_eq!(end, End::Mapped { generation, leased });
    assert_eq!(stage.reads(&second), FIRST.mark);
    assert_eq!(stage.status().leases, 1);
}

pub fn several_engines_map_the_same<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    let mut engines: Vec<_> = (0..5).map(|_| stage.begin(Order::load())).collect();
    for engine in &mut engines {
        assert_eq!(stage.end(engine), mapped(generation));
    }
    assert_eq!(stage.status().leases, 5);
    let last = engines.pop().expect("five");
    for engine in engines {
        stage.leave(engine);
    }
    assert_eq!(
        stage.reads(&last),
        FIRST.mark,
        "what others give up is not its own"
    );
}

fn activity(stage: &mut impl Stage) -> Activity {
    match stage.ask(GetActivity {}.into()) {
        Ok(Message::Activity(activity)) => activity,
        other => panic!("{other:?}"),
    }
}

pub fn a_mismatch_names_every_field_and_is_not_asked_again<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    stage.load(FIRST);
    let mut key = Key {
        dtype: "float32".to_owned(),
        tp_size: 4,
        ..processed("packed")
    };
    key.extra.insert("kv".to_owned(), "fp8".to_owned());
    let fields = ["tp_size", "dtype", "processing", "extra.kv"].map(str::to_owned);
    let mismatch = AttachError::Mismatch {
        fields: processed("stored").differences(&key, &fields),
    };
    let end = stage.try_out(Order::load().keyed(key.clone()));
    assert_eq!(end, End::Disk(mismatch.clone()));
    let end = stage.try_out(Order::load().patient().keyed(key));
    assert_eq!(end, End::Failed(mismatch));
    assert_eq!(activity(&mut stage).mismatches, 2, "once by each");
}

pub fn a_draft_with_a_targets_key_is_a_mismatch_before_anybody_is_asked<S: Stage>() {
    // There is nobody: an engine that asked would find that out.
    let mut stage = S::start(Daemon::loaded());
    let role = |asked: &str, served: &str| AttachError::Mismatch {
        fields: vec![Difference::new("role", asked, served)],
    };
    let of_target = role("target", "draft");
    let order = Order {
        role: Role::Draft,
        ..Order::load()
    };
    assert_eq!(stage.try_out(order.clone()), End::Disk(of_target.clone()));
    assert_eq!(stage.try_out(order.patient()), End::Failed(of_target));
    let draft = Key {
        role: Role::Draft,
        ..key()
    };
    let of_draft = role("draft", "target");
    assert_eq!(stage.try_out(Order::load().keyed(draft)), End::Disk(of_draft));
}

pub fn where_nobody_is_an_engine_loads_from_disk<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    for order in [Order::load(), Order::copy()] {
        let because = stage.try_out(order).because();
        assert!(matches!(because, AttachError::Unavailable { .. }), "{because:?}");
    }
}

pub fn an_engine_that_can_wait_maps_what_comes<S: Stage>() {
    let mut absent = S::start(Daemon::loaded());
    let mut empty = S::start(Daemon::publishable());
    let mut lost = S::start(Daemon::loaded());
    lost.load(FIRST);
    lost.lose();
    let packed = Order::load().keyed(processed("packed"));
    let mut engines = [
        absent.begin(Order::load().patient()),
        empty.begin(packed.patient()),
        lost.begin(Order::load().patient()),
    ];
    absent.pass(Span::millis(20));
    let (_publisher, end) = empty.run(Order::publish(SECOND));
    let come = [absent.load(SECOND), end.published(), lost.load(SECOND)];
    for ((stage, engine), generation) in [&mut absent, &mut empty, &mut lost]
        .into_iter()
        .zip(&mut engines)
        .zip(come)
    {
        assert_eq!(stage.end(engine), mapped(generation));
        assert_eq!(stage.reads(engine), SECOND.mark);
    }
}

pub fn an_engine_that_waited_in_vain_is_told_why<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    assert_is!(
        stage.try_out(Order::load().patient().brief()).error(),
        AttachError::Unavailable { .. }
    );
}

pub fn where_nobody_published_an_engine_loads_from_disk<S: Stage>() {
    let mut stage = S::start(Daemon::publishable());
    for order in [Order::load(), Order::copy()] {
        assert_is!(stage.try_out(order).because(), AttachError::Empty { .. });
    }
}

pub fn what_the_device_lost_is_loaded_from_disk<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let lost = stage.load(FIRST);
    stage.lose();
    assert_is!(stage.try_out(Order::load()).because(), AttachError::Lost { .. });
    let fresh = stage.load(SECOND);
    assert_ne!(fresh, lost);
    assert_eq!(stage.try_out(Order::load()), mapped(fresh));
}

pub fn on_another_device_nothing_is_mapped<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    stage.load(FIRST);
    let elsewhere = |order| Order { here: false, ..order };
    for order in [Order::load(), Order::copy()] {
        let because = stage.try_out(elsewhere(order.clone())).because();
        assert!(matches!(because, AttachError::WrongDevice { .. }), "{because:?}");
        let error = stage.try_out(elsewhere(order.patient())).error();
        assert!(matches!(error, AttachError::WrongDevice { .. }), "{error:?}");
    }
    let status = stage.status();
    assert_ne!(status.bytes, 0, "it is not theirs to release");
    assert_eq!(status.leases, 0);
}

pub fn a_daemon_of_another_user_is_refused<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    stage.load(FIRST);
    let foreign = |order| Order { ours: false, ..order };
    assert_is!(
        stage.try_out(foreign(Order::load())).because(),
        AttachError::RefusedPeer { .. }
    );
    assert_is!(
        stage.try_out(foreign(Order::load().patient())).error(),
        AttachError::RefusedPeer { .. }
    );
    assert_eq!(stage.status().served, 0, "it is asked nothing");
}

/// The key of the same checkpoint in other files.
fn elsewhere() -> Key {
    let checkpoint = CheckpointId {
        files: Some([77; 32]),
        ..key().checkpoint
    };
    Key { checkpoint, ..key() }
}

pub fn the_same_bytes_in_other_files_are_found_by_their_digest<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    stage.digest([9; 32]);
    let equal = Order::load().keyed(elsewhere());
    let (_engine, end) = stage.run(equal.clone());
    assert_eq!(end, mapped(generation));
    let different = Order {
        digest: Ok([8; 32]),
        ..equal
    };
    let mismatch = AttachError::Mismatch {
        fields: vec![Difference::new(
            "checkpoint",
            "digest 08080808",
            "digest 09090909",
        )],
    };
    assert_eq!(stage.try_out(different.clone()), End::Disk(mismatch.clone()));
    assert_eq!(stage.try_out(different.patient()), End::Failed(mismatch));
    assert_eq!(activity(&mut stage).need_digest, 3);
}

pub fn a_digest_that_fails_leads_to_the_disk<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    stage.load(FIRST);
    let order = Order {
        digest: Err("a file is gone".to_owned()),
        ..Order::load().keyed(elsewhere())
    };
    let failed = AttachError::DigestFailed {
        why: "a file is gone".to_owned(),
    };
    assert_eq!(stage.try_out(order.clone()), End::Disk(failed.clone()));
    assert_eq!(stage.try_out(order.patient()), End::Failed(failed));
}

pub fn a_digest_that_is_not_ready_is_waited_for<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    let order = Order::load().keyed(elsewhere());
    let mut engines = [stage.begin(order.clone()), stage.begin(order.patient())];
    stage.comes_to("both are told to ask again", |stage| {
        let pending = ErrorCode::DigestPending.number();
        let refused = activity(stage).refused;
        refused
            .iter()
            .any(|refused| refused.code == pending && refused.count >= 2)
    });
    stage.digest([9; 32]);
    for engine in &mut engines {
        assert_eq!(stage.end(engine), mapped(generation));
    }
}

pub fn a_failed_build_leads_to_the_disk_and_nothing_is_reported<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    let failed = AttachError::BuildFailed {
        why: "no such layer".to_owned(),
    };
    assert_eq!(stage.try_out(Order::load().fails()), End::Disk(failed.clone()));
    assert_eq!(
        stage.try_out(Order::load().patient().fails()),
        End::Failed(failed)
    );
    stage.settles("their leases end", |status| status.leases == 0);
    assert_eq!(stage.reports(), 0);
    assert_eq!(stage.try_out(Order::load()), mapped(generation));
}

pub fn content_that_cannot_be_imported_is_reported<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    stage.load(UNSOUND);
    assert_is!(
        stage.try_out(Order::load()).because(),
        AttachError::Malformed { .. }
    );
    stage.comes_to("the launcher is told", |stage| stage.reports() == 1);
    stage.settles("its lease ends", |status| status.leases == 0);
    assert_ne!(stage.status().bytes, 0, "the launcher decides what follows");
}

pub fn an_engine_that_connects_while_a_server_is_replaced_is_served_by_the_next<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    stage.kill_server();
    let mut engine = stage.begin(Order::load());
    stage.pass(Span::millis(20));
    stage.start_server();
    assert_eq!(stage.end(&mut engine), mapped(generation));
    assert_eq!(stage.reads(&engine), FIRST.mark);
}

pub fn a_server_may_be_replaced_while_an_engine_builds<S: Stage>() {
    let mut stage = S::start(Daemon::loaded());
    let generation = stage.load(FIRST);
    let mut engine = stage.begin(Order::load().stays());
    stage.works(&mut engine);
    stage.kill_server();
    stage.start_server();
    assert_eq!(stage.end(&mut engine), mapped(generation));
    assert_eq!(stage.reads(&engine), FIRST.mark);
    stage.settles("it is leased again", |status| status.leases == 1);
}
