//! Loading, arming, attaching, and what an engine is told that cannot attach.

use crate::world::*;
use weightd_core::content::{Difference, Generation, Role};
use weightd_core::machine::{
    AttachError, AttachOptions, HandoverEvent, Machine, Mode, Outcome, ServerEvent, VaultEvent,
};
use weightd_core::time::Span;
use weightd_core::wire::message::{
    Digest, ErrorCode, GetMemory, GetState, GetStatus, Holds, Memory, Message, Watch,
};

fn generation(number: u64) -> Generation {
    Generation { epoch: EPOCH, number }
}

fn patient() -> AttachOptions {
    AttachOptions {
        fallback: false,
        ..AttachOptions::new(UID)
    }
}

fn armed(world: &World) -> Vec<bool> {
    let events = world.vault.as_ref().unwrap().events.iter();
    events
        .filter_map(|event| match event {
            VaultEvent::Armed { complete } => Some(*complete),
            _ => None,
        })
        .collect()
}

#[test]
fn the_vault_is_armed_once_when_everything_is_loaded() {
    let mut world = World::new();
    world.start_vault(false);
    world.start_server();
    world.run();
    assert_eq!(
        armed(&world),
        [false],
        "the server runs both daemons, and they are empty"
    );
    assert!(!world.vault.as_ref().unwrap().machine.is_loaded());
    world.load();
    world.run();
    assert_eq!(armed(&world).iter().filter(|complete| **complete).count(), 1);
    assert_eq!(armed(&world).last(), Some(&true));
    assert!(world.vault.as_ref().unwrap().machine.is_loaded());
    let published = |daemon, number| HandoverEvent::Published {
        daemon,
        generation: generation(number),
    };
    assert_eq!(world.published, [published(0, 1), published(1, 2)]);
    assert!(world.loader.as_ref().unwrap().is_settled());
    world.pass(Span::secs(600));
    assert_eq!(armed(&world).len(), 2, "nothing happens by itself");
    world.finish();
}

#[test]
fn content_that_is_loaded_before_the_server_follows_is_armed_when_it_does() {
    let mut world = World::new();
    world.start_vault(false);
    world.load();
    world.run();
    world.start_server();
    world.run();
    assert_eq!(armed(&world), [true]);
    world.finish();
}

#[test]
fn an_engine_maps_what_was_published_and_leases_it() {
    let mut world = World::ready();
    let engine = world.attach(1, patient(), key(1));
    world.run();
    let mapped = Outcome::Mapped {
        generation: generation(2),
        leased: true,
    };
    assert_eq!(world.engines[engine].end, Some(End::Done(mapped)));
    assert_eq!(world.engines[engine].log, ["connect", "import", "build"]);
    let fetched = world.engines[engine].mapped.take().expect("what was imported");
    assert_eq!(fetched.state.device_uuid, device(1));
    assert_eq!(fetched.state.content, content(64, &[2000]));
    assert_eq!(fetched.regions.len(), 1);
    drop(fetched);
    let server = world.server.as_ref().unwrap();
    let leased = ServerEvent::Leased {
        daemon: 1,
        pid: 40,
        generation: generation(2),
    };
    assert!(server.events.contains(&leased));
    world.pass(Span::secs(3600));
    assert!(!world.engines[engine].lease_ended, "a lease has no deadline");
    world.finish();
}

#[test]
fn copy_mode_releases_after_the_copy_over_a_connection_of_its_own() {
    let mut world = World::ready();
    let options = AttachOptions {
        mode: Mode::Copy,
        ..patient()
    };
    let engine = world.attach(0, options, key(0));
    // Longer than the daemon waits for a next request.
    world.engines[engine].works = Span::secs(60);
    world.pass(Span::secs(200));
    let copied = Outcome::Copied {
        generation: generation(1),
        released: true,
    };
    assert_eq!(world.engines[engine].end, Some(End::Done(copied)));
    assert_eq!(
        world.engines[engine].log,
        ["connect", "import", "copy", "build", "connect"]
    );
    world.finish();
}

#[test]
fn a_mismatch_names_all_fields_and_is_not_retried() {
    let mut world = World::ready();
    let mut other = key(0);
    other.dtype = "float16".into();
    other.tp_rank = 1;
    other.extra.insert("kv_cache_dtype".into(), "fp8".into());
    let fields = ["tp_rank", "dtype", "extra.kv_cache_dtype"].map(String::from);
    let fields = key(0).differences(&other, &fields);
    let engine = world.attach(0, patient(), other);
    world.run();
    let mismatch = AttachError::Mismatch {
        fields: fields.clone(),
    };
    assert_eq!(
        mismatch.to_string(),
        "the daemon serves something else: tp_rank (asked for 1, served 0), dtype (asked for float16, served auto), \
         extra.kv_cache_dtype (asked for fp8, served none); start it and the engine with the same model and options"
    );
    assert_eq!(world.engines[engine].end, Some(End::Failed(mismatch)));
    let mismatched = ServerEvent::Mismatched {
        daemon: 0,
        pid: 40,
        fields,
    };
    assert!(world.server.as_ref().unwrap().events.contains(&mismatched));
    world.finish();
}

#[test]
fn a_digest_is_asked_for_and_decides() {
    let other = "checkpoint (asked for digest 09090909, served digest 08080808)";
    for (daemons_digest, expected) in [([9; 32], None), ([8; 32], Some(other))] {
        let mut world = World::ready();
        world.loader.as_mut().unwrap().digest(Digest {
            daemon: 0,
            digest: daemons_digest,
        });
        world.run();
        let mut other_files = key(0);
        other_files.checkpoint.files = None;
        let engine = world.attach(0, patient(), other_files);
        world.run();
        let engine = &world.engines[engine];
        match expected {
            None => {
                assert_eq!(engine.log, ["connect", "digest", "connect", "import", "build"]);
                assert!(matches!(engine.end, Some(End::Done(Outcome::Mapped { .. }))));
            }
            Some(other) => {
                let Some(End::Failed(AttachError::Mismatch { fields })) = &engine.end else {
                    panic!("{:?}", engine.end)
                };
                assert_eq!(Difference::list(fields), other);
            }
        }
        world.finish();
    }
}

#[test]
fn a_digest_that_is_not_ready_yet_is_waited_for() {
    let mut world = World::ready();
    let mut other_files = key(0);
    other_files.checkpoint.files = None;
    let engine = world.attach(0, patient(), other_files);
    world.pass(Span::secs(60));
    assert_eq!(world.engines[engine].end, None);
    let raw = world.raw(0);
    let mut with_digest = key(0);
    with_digest.checkpoint.files = None;
    with_digest.checkpoint.digest = Some([9; 32]);
    world.say(
        raw,
        GetState {
            key: with_digest,
            is_reload: false,
        },
        vec![],
    );
    world.run();
    let [Message::Failure(failure)] = &world.heard(raw)[..] else {
        panic!("one failure")
    };
    assert_eq!(
        (failure.code, failure.retryable),
        (ErrorCode::DigestPending.number(), true)
    );
    world.loader.as_mut().unwrap().digest(Digest {
        daemon: 0,
        digest: [9; 32],
    });
    world.pass(Span::secs(1));
    assert!(matches!(
        world.engines[engine].end,
        Some(End::Done(Outcome::Mapped { .. }))
    ));
    world.finish();
}

#[test]
fn a_digest_that_came_before_the_content_is_kept_and_armed() {
    let mut world = World::new();
    world.start_vault(false);
    world.start_server();
    world.start_loader();
    world.loader.as_mut().unwrap().digest(Digest {
        daemon: 0,
        digest: [9; 32],
    });
    world.publish(0, 1000, weightd_core::wire::message::Expects::Empty);
    world.run();
    for _ in 0..2 {
        let mut with_digest = key(0);
        with_digest.checkpoint.files = None;
        with_digest.checkpoint.digest = Some([9; 32]);
        let engine = world.attach(0, patient(), with_digest);
        world.run();
        assert!(matches!(
            world.engines[engine].end,
            Some(End::Done(Outcome::Mapped { .. }))
        ));
        world.kill_server();
        world.start_server();
        world.run();
    }
    world.finish();
}

#[test]
fn the_key_is_compared_before_the_digest_and_the_digest_before_the_content() {
    let mut world = World::new();
    world.start_vault(false);
    world.start_server();
    world.run();
    let raw = world.raw(0);
    let ask = |change: fn(&mut weightd_core::content::Key)| {
        let mut key = key(0);
        change(&mut key);
        GetState {
            key,
            is_reload: false,
        }
    };
    let unknown = |key: &mut weightd_core::content::Key| key.checkpoint.files = None;
    world.say(
        raw,
        ask(|key| (key.pp_size, key.checkpoint.files) = (2, None)),
        vec![],
    );
    world.say(raw, ask(unknown), vec![]);
    world.say(raw, ask(|_| {}), vec![]);
    world.run();
    let heard = world.heard(raw);
    assert!(
        matches!(&heard[0], Message::Mismatch(mismatch) if mismatch.fields[..] == [Difference::new("pp_size", "2", "1")])
    );
    assert!(matches!(&heard[1], Message::NeedDigest(_)));
    let Message::Failure(failure) = &heard[2] else {
        panic!("{heard:?}")
    };
    assert_eq!(ErrorCode::from_number(failure.code), ErrorCode::Empty);
    assert!(failure.message.contains("`weightd status`"), "{failure:?}");
    world.finish();
}

#[test]
fn a_role_that_is_not_the_engines_is_a_mismatch_without_a_request() {
    let mut world = World::ready();
    let options = AttachOptions {
        role: Role::Draft,
        ..patient()
    };
    let engine = world.attach(0, options, key(0));
    world.run();
    let mismatch = AttachError::Mismatch {
        fields: vec![Difference::new("role", "target", "draft")],
    };
    assert_eq!(world.engines[engine].end, Some(End::Failed(mismatch)));
    assert_eq!(world.engines[engine].log, [""; 0], "nothing was asked");
    world.finish();
}

#[test]
fn leases_and_memory_are_counted_by_generation() {
    let mut world = World::ready();
    let first = world.attach(0, patient(), key(0));
    let second = world.attach(0, patient(), key(0));
    world.run();
    let raw = world.raw(0);
    let memory = |world: &mut World| {
        world.say(raw, GetMemory {}, vec![]);
        world.run();
        match &world.heard(raw)[..] {
            [Message::Memory(memory)] => memory.clone(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        memory(&mut world),
        Memory {
            current: 1000,
            leased: 1000
        }
    );
    let expects = weightd_core::wire::message::Expects::Generation(generation(1));
    world.publish(0, 300, expects);
    world.run();
    assert_eq!(
        memory(&mut world),
        Memory {
            current: 300,
            leased: 1000
        }
    );
    let third = world.attach(0, patient(), key(0));
    world.run();
    assert_eq!(
        memory(&mut world),
        Memory {
            current: 300,
            leased: 1300
        }
    );
    world.say(raw, GetStatus {}, vec![]);
    world.run();
    let [Message::DaemonStatus(status)] = &world.heard(raw)[..] else {
        panic!("one status")
    };
    assert_eq!((status.leases, status.served, status.bytes), (3, 3, 300));
    assert_eq!(status.holds, Holds::Content(generation(3)));
    assert_eq!((status.pid, status.launcher_pid), (SERVER_PID, VAULT_PID));
    world.end_engine(first);
    world.run();
    assert_eq!(
        memory(&mut world),
        Memory {
            current: 300,
            leased: 1300
        }
    );
    world.end_engine(second);
    world.end_engine(third);
    world.run();
    assert_eq!(
        memory(&mut world),
        Memory {
            current: 300,
            leased: 0
        }
    );
    world.finish();
}

#[test]
fn a_stale_generation_cannot_be_leased_and_a_watch_needs_none() {
    let mut world = World::ready();
    let raw = world.raw(0);
    world.say(
        raw,
        Watch {
            generation: Some(generation(77)),
        },
        vec![],
    );
    world.say(raw, Watch { generation: None }, vec![]);
    world.say(raw, Watch { generation: None }, vec![]);
    world.run();
    let heard = world.heard(raw);
    let code = |message: &Message| match message {
        Message::Failure(failure) => ErrorCode::from_number(failure.code),
        other => panic!("{other:?} is no failure"),
    };
    assert_eq!(code(&heard[0]), ErrorCode::StaleGeneration);
    assert!(matches!(heard[1], Message::Watching(_)));
    assert_eq!(code(&heard[2]), ErrorCode::NotAllowed, "it is a watch already");
    world.pass(Span::secs(3600));
    assert!(!world.raws[&raw].ended);
    world.kill_server();
    world.run();
    assert!(world.raws[&raw].ended, "its end means that this daemon is gone");
    world.finish();
}

#[test]
fn reloads_are_counted() {
    let mut world = World::ready();
    for is_reload in [true, false, true] {
        world.attach(
            0,
            AttachOptions {
                is_reload,
                ..patient()
            },
            key(0),
        );
    }
    let raw = world.raw(0);
    world.run();
    world.say(raw, GetStatus {}, vec![]);
    world.run();
    let [Message::DaemonStatus(status)] = &world.heard(raw)[..] else {
        panic!("one status")
    };
    assert_eq!((status.served, status.reloads), (3, 2));
    world.finish();
}

#[test]
fn a_publish_that_expects_something_else_changes_nothing() {
    use weightd_core::wire::message::Expects;
    let mut world = World::ready();
    let file = world.publish(0, 5, Expects::Empty);
    world.publish(0, 6, Expects::Generation(generation(2)));
    world.publish(9, 7, Expects::Empty);
    world.run();
    let refusals: Vec<&HandoverEvent> = world.published[2..].iter().collect();
    assert!(
        refusals
            .iter()
            .all(|event| matches!(event, HandoverEvent::Refused { .. }))
            && refusals.len() == 3,
        "{refusals:?}"
    );
    assert_eq!(world.ledger.open_of(file), 0, "what was refused is closed");
    let engine = world.attach(0, patient(), key(0));
    world.run();
    let mapped = Outcome::Mapped {
        generation: generation(1),
        leased: true,
    };
    assert_eq!(world.engines[engine].end, Some(End::Done(mapped)));
    world.finish();
}

#[test]
fn replaced_content_is_closed_when_no_reply_needs_it() {
    use weightd_core::wire::message::Expects;
    let mut world = World::ready();
    let old = world.server.as_ref().unwrap().machine.sockets().count();
    assert_eq!(old, 2);
    let expects = Expects::Generation(generation(1));
    let new = world.publish(0, 300, expects);
    world.run();
    assert_eq!(
        world.ledger.open_of(new),
        2,
        "one in the vault, one in the server"
    );
    let engine = world.attach(0, patient(), key(0));
    world.run();
    assert_eq!(world.ledger.open_of(new), 3);
    world.publish(0, 400, Expects::Generation(generation(3)));
    world.run();
    assert_eq!(
        world.ledger.open_of(new),
        1,
        "the engine's mapping alone keeps it"
    );
    world.end_engine(engine);
    assert_eq!(world.ledger.open_of(new), 0);
    world.finish();
}

#[test]
fn progress_and_failure_of_the_loader_are_told() {
    use weightd_core::wire::message::Progress;
    let mut world = World::new();
    world.start_vault(false);
    world.start_loader();
    let loader = world.loader.as_mut().unwrap();
    loader.progress(Progress {
        daemon: 1,
        done: 5,
        total: 10,
    });
    loader.failed("disk full ".repeat(100_000));
    world.run();
    let vault = world.vault.as_ref().unwrap();
    assert_eq!(
        vault.events[0],
        VaultEvent::Progress {
            daemon: 1,
            done: 5,
            total: 10
        }
    );
    assert!(matches!(&vault.events[1], VaultEvent::LoadFailed { why } if why.starts_with("disk full")));
    assert!(vault.machine.info(1).is_some() && vault.machine.info(2).is_none());
    assert!(
        vault
            .machine
            .outgoing(weightd_core::machine::ConnId(99))
            .is_none()
    );
    world.finish();
}
