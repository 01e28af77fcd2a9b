//! What an engine retries, how often, for how long, and what it does then: every row of the table.

use crate::ledger::Fd;
use crate::scripted::{self, Act, GENERATION};
use crate::world::{UID, content, device, frame, key};
use weightd_core::content::{Difference, Generation};
use weightd_core::machine::{
    Attach, AttachError, AttachOptions, AttachStep, Client, ConnectFailure, Exchange, Fault, Mode, Outcome,
    Step,
};
use weightd_core::peer::Peer;
use weightd_core::time::{Now, Span};
use weightd_core::wire::message::{ErrorCode, Message, Mismatch, NeedDigest, Released, State, Watching};

type Run = scripted::Run<Step<AttachStep<Fd>>>;

/// How the engine's own work ends.
struct Work {
    digest_takes: Span,
    import: Result<(), Fault>,
    copy: Result<(), Fault>,
    build: Result<(), String>,
}

impl Default for Work {
    fn default() -> Work {
        Work {
            digest_takes: Span(0),
            import: Ok(()),
            copy: Ok(()),
            build: Ok(()),
        }
    }
}

fn drive(options: AttachOptions, work: Work, daemon: impl Fn(Option<&Message>, Span) -> Act) -> Run {
    let attach = Attach::new(options, key(0));
    scripted::drive(attach, daemon, |attach, now, step, _| {
        match step {
            AttachStep::Digest => {
                *now = *now + work.digest_takes;
                attach.digested(*now, Ok([1; 32]));
            }
            AttachStep::Import(_) => attach.imported(*now, work.import.clone()),
            AttachStep::Copy => attach.copied(*now, work.copy.clone()),
            AttachStep::Build => attach.built(*now, work.build.clone()),
            end => return Some(Step::Next(end)),
        }
        None
    })
}

/// What the daemon does, and which error comes of it.
type Row = (Act, fn(&AttachError) -> bool);

fn hasty() -> AttachOptions {
    AttachOptions {
        device: Some(device(0)),
        ..AttachOptions::new(UID)
    }
}

fn patient() -> AttachOptions {
    AttachOptions {
        fallback: false,
        ..hasty()
    }
}

fn copying(options: AttachOptions) -> AttachOptions {
    AttachOptions {
        mode: Mode::Copy,
        ..options
    }
}

fn against(options: AttachOptions, daemon: Act) -> Run {
    drive(options, Work::default(), move |_, _| daemon.clone())
}

fn because(run: &Run) -> &AttachError {
    match &run.end {
        Step::Next(AttachStep::LoadFromDisk { because }) => because,
        other => panic!("{other:?} is no disk load"),
    }
}

fn error(run: &Run) -> &AttachError {
    match &run.end {
        Step::Next(AttachStep::Done(Err(error))) => error,
        other => panic!("{other:?} is no error"),
    }
}

fn absent() -> Act {
    Act::Connect(ConnectFailure::Absent("no such file".into()))
}

fn differs() -> Act {
    Act::Says(
        Mismatch {
            fields: vec![Difference::new("dtype", "auto", "float16")],
        }
        .into(),
    )
}

fn elsewhere() -> Act {
    let state = State {
        generation: GENERATION,
        device_uuid: device(9),
        content: content(64, &[10]),
    };
    Act::Says(state.into())
}

#[test]
fn with_a_disk_to_fall_back_on_only_what_passes_is_retried() {
    use AttachError::*;
    let rows: [Row; 14] = [
        (absent(), |e| matches!(e, Unavailable { .. })),
        (Act::Connect(ConnectFailure::Other("EMFILE".into())), |e| {
            matches!(e, Local { .. })
        }),
        (Act::Connect(ConnectFailure::Refused("a symlink".into())), |e| {
            matches!(e, RefusedPeer { .. })
        }),
        (Act::User(7), |e| matches!(e, RefusedPeer { .. })),
        (differs(), |e| matches!(e, Mismatch { .. })),
        (elsewhere(), |e| matches!(e, WrongDevice { .. })),
        (Act::Fails(ErrorCode::Empty), |e| matches!(e, Empty { .. })),
        (Act::Fails(ErrorCode::Released), |e| matches!(e, Released { .. })),
        (Act::Fails(ErrorCode::Lost), |e| matches!(e, Lost { .. })),
        (Act::Fails(ErrorCode::RefusedPeer), |e| {
            matches!(e, RefusedPeer { .. })
        }),
        (Act::Fails(ErrorCode::Malformed), |e| {
            matches!(e, Malformed { .. })
        }),
        (Act::Fails(ErrorCode::UnknownCommand), |e| {
            matches!(
                e,
                Daemon {
                    code: ErrorCode::UnknownCommand,
                    ..
                }
            )
        }),
        (Act::Fails(ErrorCode::Unknown(700)), |e| {
            matches!(
                e,
                Daemon {
                    code: ErrorCode::Unknown(700),
                    ..
                }
            )
        }),
        (Act::Lies, |e| matches!(e, Malformed { .. })),
    ];
    for (number, (daemon, expected)) in rows.into_iter().enumerate() {
        let run = against(hasty(), daemon);
        assert!(expected(because(&run)), "row {number}: {:?}", run.end);
        assert_eq!((run.took, run.connects), (Span(0), 1), "row {number}");
    }
}

#[test]
fn with_a_disk_to_fall_back_on_a_connection_that_breaks_is_retried_for_the_connect_timeout() {
    let rows = [
        Act::Breaks,
        Act::Connect(ConnectFailure::Busy),
        Act::Fails(ErrorCode::Busy),
        Act::Fails(ErrorCode::DigestPending),
        Act::Fails(ErrorCode::Timeout),
    ];
    for daemon in rows {
        let run = against(hasty(), daemon);
        because(&run);
        assert!(
            run.took > Span::millis(4_900) && run.took <= Span::secs(5),
            "{:?}",
            run.took
        );
        assert_eq!(run.connects, 100, "every 50 ms");
    }
    let back_after_two_seconds = drive(hasty(), Work::default(), |question, at| match question {
        _ if at < Span::secs(2) => Act::Breaks,
        Some(Message::Watch(_)) => Act::Says(Watching {}.into()),
        _ => Act::Serves,
    });
    let mapped = Outcome::Mapped {
        generation: GENERATION,
        leased: true,
    };
    assert!(
        matches!(back_after_two_seconds.end, Step::Next(AttachStep::Done(Ok(outcome))) if outcome == mapped)
    );
}

#[test]
fn with_a_disk_to_fall_back_on_silence_is_waited_for_once() {
    let run = against(hasty(), Act::Silent);
    assert_eq!(
        because(&run),
        &AttachError::Timeout {
            waited: Span::secs(5)
        }
    );
    assert_eq!((run.took, run.connects), (Span::secs(5), 1));
}

#[test]
fn without_a_fallback_absence_breaks_and_daemon_errors_are_retried_until_the_state_timeout() {
    use AttachError::*;
    let rows: [Row; 10] = [
        (absent(), |e| matches!(e, Unavailable { .. })),
        (Act::Connect(ConnectFailure::Busy), |e| matches!(e, Broken { .. })),
        (Act::Breaks, |e| matches!(e, Broken { .. })),
        (Act::Fails(ErrorCode::Empty), |e| matches!(e, Empty { .. })),
        (Act::Fails(ErrorCode::Released), |e| matches!(e, Released { .. })),
        (Act::Fails(ErrorCode::Lost), |e| matches!(e, Lost { .. })),
        (Act::Fails(ErrorCode::Busy), |e| matches!(e, Daemon { .. })),
        (Act::Fails(ErrorCode::DigestPending), |e| {
            matches!(e, Daemon { .. })
        }),
        (Act::Fails(ErrorCode::Timeout), |e| matches!(e, Daemon { .. })),
        (Act::Fails(ErrorCode::Unknown(700)), |e| {
            matches!(e, Daemon { .. })
        }),
    ];
    for (number, (daemon, expected)) in rows.into_iter().enumerate() {
        let run = against(patient(), daemon);
        assert!(expected(error(&run)), "row {number}: {:?}", run.end);
        assert!(
            run.took >= Span::millis(299_500) && run.took <= Span::secs(300),
            "{:?}",
            run.took
        );
        assert_eq!(
            (run.connects, run.shortest_pause),
            (600, Some(Span::millis(500))),
            "row {number}"
        );
    }
}

#[test]
fn without_a_fallback_mismatch_wrong_device_and_refused_peers_are_not_retried() {
    let rows = [
        differs(),
        elsewhere(),
        Act::User(7),
        Act::Connect(ConnectFailure::Refused("a symlink".into())),
        Act::Fails(ErrorCode::RefusedPeer),
        Act::Fails(ErrorCode::Malformed),
        Act::Lies,
    ];
    for daemon in rows {
        let run = against(patient(), daemon);
        error(&run);
        assert_eq!((run.took, run.connects), (Span(0), 1));
    }
}

#[test]
fn without_a_fallback_silence_is_asked_again_and_never_past_the_state_timeout() {
    let run = against(patient(), Act::Silent);
    let waited = Span::secs(5);
    assert_eq!(error(&run), &AttachError::Timeout { waited });
    assert!(
        run.took >= Span::millis(299_500) && run.took <= Span::secs(300),
        "{:?}",
        run.took
    );
    let short = AttachOptions {
        state_timeout: Span::secs(2),
        ..patient()
    };
    let run = against(short, Act::Silent);
    assert_eq!(run.took, Span::secs(2));
    let said = "no answer within 2 s; see the daemon's log";
    assert_eq!(error(&run).to_string(), said);
}

#[test]
fn a_failed_import_goes_to_disk_or_fails_and_releases_nothing_that_is_mapped() {
    let faults = [
        Fault::OutOfMemory("x".into()),
        Fault::Malformed("x".into()),
        Fault::Other("x".into()),
    ];
    for fault in faults {
        for options in [hasty(), patient()] {
            let run = drive(
                options.clone(),
                Work {
                    import: Err(fault.clone()),
                    ..Work::default()
                },
                |question, _| match question {
                    Some(Message::Watch(_)) => Act::Says(Watching {}.into()),
                    _ => Act::Serves,
                },
            );
            if options.fallback {
                because(&run)
            } else {
                error(&run)
            };
            assert_eq!(run.connects, 1);
            assert!(!run.asked.iter().any(|asked| matches!(asked, Message::Release(_))));
        }
    }
}

/// What was asked to be released, if anything.
fn releases(run: &Run) -> Vec<Option<Generation>> {
    let releases = run.asked.iter().filter_map(|asked| match asked {
        Message::Release(release) => Some(release.generation),
        _ => None,
    });
    releases.collect()
}

fn serves_and_releases(question: Option<&Message>, _: Span) -> Act {
    match question {
        Some(Message::Release(_)) => Act::Says(Released {}.into()),
        _ => Act::Serves,
    }
}

#[test]
fn what_the_platform_cannot_do_is_an_error_of_its_own_whatever_there_is_to_fall_back_on() {
    for options in [hasty(), patient(), copying(hasty())] {
        let work = Work {
            import: Err(Fault::Unsupported("no such handles".into())),
            ..Work::default()
        };
        let run = drive(options, work, serves_and_releases);
        let why = "no such handles".to_owned();
        assert_eq!(error(&run), &AttachError::UnsupportedPlatform { why });
        assert_eq!(releases(&run), []);
    }
}

#[test]
fn copy_mode_asks_for_the_release_of_what_it_copied() {
    for options in [hasty(), patient()] {
        let run = drive(copying(options), Work::default(), serves_and_releases);
        let copied = Outcome::Copied {
            generation: GENERATION,
            released: true,
        };
        assert!(matches!(run.end, Step::Next(AttachStep::Done(Ok(outcome))) if outcome == copied));
        assert_eq!(releases(&run), [Some(GENERATION)]);
    }
}

#[test]
fn copy_mode_releases_that_generation_before_the_disk_load() {
    let fault = || Err(Fault::OutOfMemory("x".into()));
    for (import, copy) in [(fault(), Ok(())), (Ok(()), fault())] {
        let run = drive(
            copying(hasty()),
            Work {
                import,
                copy,
                ..Work::default()
            },
            serves_and_releases,
        );
        assert!(matches!(because(&run), AttachError::OutOfMemory { .. }));
        assert_eq!(releases(&run), [Some(GENERATION)]);
    }
    let run = drive(copying(hasty()), Work::default(), |question, at| match question {
        Some(Message::GetState(_)) => Act::Lies,
        other => serves_and_releases(other, at),
    });
    assert!(matches!(because(&run), AttachError::Malformed { .. }));
    assert_eq!(releases(&run), [Some(GENERATION)]);
}

#[test]
fn copy_mode_releases_nothing_that_it_did_not_copy_when_there_is_no_disk_load() {
    let fault = || Err(Fault::OutOfMemory("x".into()));
    for (import, copy) in [(fault(), Ok(())), (Ok(()), fault())] {
        let run = drive(
            copying(patient()),
            Work {
                import,
                copy,
                ..Work::default()
            },
            serves_and_releases,
        );
        assert!(matches!(error(&run), AttachError::OutOfMemory { .. }));
        assert_eq!(releases(&run), []);
    }
    let run = against(copying(hasty()), elsewhere());
    assert_eq!(
        releases(&run),
        [],
        "what is on another device is not ours to release"
    );
}

#[test]
fn a_release_that_fails_never_fails_an_attach() {
    let not_released = Outcome::Copied {
        generation: GENERATION,
        released: false,
    };
    let rows = [
        (Act::Breaks, Span::secs(5)),
        (Act::Silent, Span::secs(5)),
        (Act::Fails(ErrorCode::NotAllowed), Span(0)),
        (Act::Fails(ErrorCode::StaleGeneration), Span(0)),
        (Act::Says(Watching {}.into()), Span(0)),
    ];
    for (daemon, longest) in rows {
        let run = drive(copying(hasty()), Work::default(), |question, at| match question {
            Some(Message::Release(_)) => daemon.clone(),
            other => serves_and_releases(other, at),
        });
        assert!(
            matches!(run.end, Step::Next(AttachStep::Done(Ok(outcome))) if outcome == not_released),
            "{:?}",
            run.end
        );
        assert!(run.took <= longest, "{:?}", run.took);
    }
    // A server that is on its way back is asked again.
    let run = drive(copying(hasty()), Work::default(), |question, at| match question {
        Some(Message::Release(_)) if at < Span::secs(1) => Act::Breaks,
        other => serves_and_releases(other, at),
    });
    assert!(matches!(
        run.end,
        Step::Next(AttachStep::Done(Ok(Outcome::Copied { released: true, .. })))
    ));
}

#[test]
fn a_lease_that_fails_never_fails_an_attach() {
    let rows = [
        (Act::Breaks, Span(0)),
        (Act::Silent, Span::secs(5)),
        (Act::Fails(ErrorCode::StaleGeneration), Span(0)),
        (Act::Fails(ErrorCode::Busy), Span(0)),
        (Act::Says(Released {}.into()), Span(0)),
    ];
    for (daemon, took) in rows {
        for options in [hasty(), patient()] {
            let run = drive(options, Work::default(), |question, _| match question {
                Some(Message::Watch(_)) => daemon.clone(),
                _ => Act::Serves,
            });
            let mapped = Outcome::Mapped {
                generation: GENERATION,
                leased: false,
            };
            assert!(
                matches!(run.end, Step::Next(AttachStep::Done(Ok(outcome))) if outcome == mapped),
                "{:?}",
                run.end
            );
            assert_eq!(run.took, took);
        }
    }
}

#[test]
fn an_answer_to_another_question_is_malformed() {
    let run = against(hasty(), Act::Says(Released {}.into()));
    assert!(matches!(because(&run), AttachError::Malformed { .. }));
    let mut attach: Attach<Fd> = Attach::new(hasty(), key(0));
    assert!(matches!(attach.step(Now(0)), Step::Connect));
    attach.connected(Now(0), Ok(Peer { pid: 1, uid: UID }));
    let bytes = frame(&Mismatch { fields: vec![] }.into(), 77, 0);
    attach.receive(Now(0), &bytes, None, false);
    assert!(matches!(
        attach.step(Now(0)),
        Step::Next(AttachStep::LoadFromDisk {
            because: AttachError::Malformed { .. }
        })
    ));
}

fn unbuilt() -> Work {
    Work {
        build: Err("no such layer".into()),
        ..Work::default()
    }
}

#[test]
fn a_failed_build_leads_to_the_disk_and_is_not_the_daemons_fault() {
    for options in [hasty(), copying(hasty())] {
        let copies = options.mode == Mode::Copy;
        let run = drive(options, unbuilt(), serves_and_releases);
        assert_eq!(
            *because(&run),
            AttachError::BuildFailed {
                why: "no such layer".into()
            }
        );
        let reported = run.asked.iter().any(|asked| matches!(asked, Message::Report(_)));
        assert!(!reported, "nothing is wrong with the device");
        // The disk load must not run out of memory.
        assert_eq!(
            releases(&run),
            if copies { vec![Some(GENERATION)] } else { vec![] }
        );
    }
    let run = drive(patient(), unbuilt(), serves_and_releases);
    assert!(matches!(error(&run), AttachError::BuildFailed { .. }));
    assert_eq!(run.connects, 1, "it would fail again");
}

fn reloading(options: AttachOptions) -> AttachOptions {
    AttachOptions {
        is_reload: true,
        current: Some(GENERATION),
        ..options
    }
}

#[test]
fn a_reload_of_what_is_mapped_changes_nothing() {
    for options in [reloading(hasty()), reloading(patient())] {
        let run = drive(options, unbuilt(), serves_and_releases);
        let unchanged = Outcome::Unchanged {
            generation: GENERATION,
        };
        assert!(matches!(run.end, Step::Next(AttachStep::Done(Ok(outcome))) if outcome == unchanged));
        assert!(matches!(&run.asked[..], [Message::GetState(ask)] if ask.is_reload));
    }
    // Copied tensors may have been written to.
    let run = drive(reloading(copying(hasty())), Work::default(), serves_and_releases);
    assert!(matches!(
        run.end,
        Step::Next(AttachStep::Done(Ok(Outcome::Copied { .. })))
    ));
}

#[test]
fn a_reload_has_no_disk_to_fall_back_on() {
    let other = Generation {
        number: GENERATION.number + 1,
        ..GENERATION
    };
    for options in [reloading(hasty()), reloading(copying(hasty()))] {
        let options = AttachOptions {
            current: Some(other),
            ..options
        };
        let run = drive(options, unbuilt(), serves_and_releases);
        assert!(matches!(error(&run), AttachError::BuildFailed { .. }));
        assert_eq!(releases(&run), [], "the engine goes on with what it has");
    }
}

#[test]
fn a_reload_in_copy_mode_copies_into_what_is_there_and_clones_nothing() {
    let work = Work {
        copy: Err(Fault::OutOfMemory("a second copy".into())),
        ..Work::default()
    };
    let run = drive(reloading(copying(hasty())), work, serves_and_releases);
    assert!(matches!(
        run.end,
        Step::Next(AttachStep::Done(Ok(Outcome::Copied { released: true, .. })))
    ));
}

#[test]
fn the_engines_own_work_takes_nothing_of_its_patience() {
    let asks_for_the_digest = |question: Option<&Message>, at: Span| match question {
        Some(Message::GetState(ask)) if ask.key.checkpoint.digest.is_none() => {
            Act::Says(NeedDigest {}.into())
        }
        // And then it is not ready itself for a while.
        Some(Message::GetState(_)) if at < Span::secs(1003) => Act::Fails(ErrorCode::DigestPending),
        Some(Message::Watch(_)) => Act::Says(Watching {}.into()),
        _ => Act::Serves,
    };
    for options in [hasty(), patient()] {
        let work = Work {
            digest_takes: Span::secs(1000),
            ..Work::default()
        };
        let run = drive(options, work, asks_for_the_digest);
        assert!(
            matches!(
                run.end,
                Step::Next(AttachStep::Done(Ok(Outcome::Mapped { leased: true, .. })))
            ),
            "{:?}",
            run.end
        );
    }
}
