//! What an engine that publishes does with whatever a daemon may answer.

use crate::ledger::Fd;
use crate::scripted::{self, Act, GENERATION};
use crate::world::{UID, content, device, key, publishable};
use std::cell::Cell;
use weightd_core::content::{Difference, Generation};
use weightd_core::machine::{
    AttachError, AttachOptions, ConnectFailure, Fault, Filled, Publish, PublishError, PublishStep, Published,
};
use weightd_core::time::Span;
use weightd_core::wire::message::{
    Confinement, DaemonInfo, DaemonStatus, ErrorCode, Expects, GetStatus, Holds, Message,
    Publish as Publication, Published as Stored, Release, Released, Replace, Watch, Watching,
};

const STORED: Generation = Generation {
    number: 4,
    ..GENERATION
};

/// How long a daemon may take to hand over or to close.
const WORKS_WITHIN: Span = Span::secs(130);

type Run = scripted::Run<Result<Published, PublishError>>;

/// Why memory is not filled.
enum Lack {
    /// The device has no room, but so many bytes free for the 10 that are wanted, where that is known.
    Room(&'static str, Option<u64>),
    Fault(Fault),
}

/// How the engine's own work goes.
struct Work {
    digest: Result<[u8; 32], String>,
    /// Each time that it is to fill memory.
    fills: Vec<Result<(), Lack>>,
    takes: Span,
}

impl Default for Work {
    fn default() -> Work {
        Work {
            digest: Ok([9; 32]),
            fills: vec![Ok(())],
            takes: Span(0),
        }
    }
}

fn drive(options: AttachOptions, work: Work, daemon: impl Fn(Option<&Message>, Span) -> Act) -> Run {
    let mut fills = work.fills.into_iter();
    let publish: Publish<Fd> = Publish::new(&options, key(0));
    scripted::drive(publish, daemon, |publish, now, step, ledger| {
        match step {
            PublishStep::Digest => publish.digested(*now, work.digest.clone()),
            PublishStep::Fill => {
                *now = *now + work.takes;
                let fill = fills.next().expect("it is filled as often as was expected");
                let filled = match fill {
                    Ok(()) => Ok(Filled {
                        content: content(64, &[10]),
                        descriptors: vec![ledger.memory(64), ledger.memory(10)],
                    }),
                    Err(Lack::Fault(fault)) => Err(fault),
                    Err(Lack::Room(why, free)) => {
                        publish.no_room(*now, 10, free, why.to_owned());
                        return None;
                    }
                };
                publish.filled(*now, filled);
            }
            PublishStep::Done(end) => return Some(end),
        }
        None
    })
}

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

fn holding(holds: Holds, replace: Replace) -> Act {
    let status = DaemonStatus {
        version: String::new(),
        pid: 1,
        launcher_pid: 1,
        info: DaemonInfo {
            publish: Some(replace),
            ..publishable(0)
        },
        holds,
        bytes: 8,
        tensors: 0,
        aliases: 0,
        checksums: false,
        leases: 0,
        served: 0,
        reloads: 0,
        uptime_s: 0,
        confinement: Confinement::default(),
    };
    Act::Says(status.into())
}

fn stored() -> Act {
    let generation = STORED;
    Act::Says(
        Stored {
            daemon: 0,
            generation,
        }
        .into(),
    )
}

/// A daemon that holds the old content and does all that it is asked.
fn takes(question: Option<&Message>, _: Span) -> Act {
    match question {
        Some(Message::Publish(_)) => stored(),
        Some(Message::Release(_)) => Act::Says(Released {}.into()),
        Some(Message::Watch(_)) => Act::Says(Watching {}.into()),
        _ => holding(Holds::Content(GENERATION), Replace::Keep),
    }
}

/// The same daemon, but for what it does with the publication.
fn but(act: Act) -> impl Fn(Option<&Message>, Span) -> Act {
    move |question, at| match question {
        Some(Message::Publish(_)) => act.clone(),
        question => takes(question, at),
    }
}

fn publications(run: &Run) -> Vec<&Publication> {
    let publications = run.asked.iter().filter_map(|asked| match asked {
        Message::Publish(publish) => Some(publish),
        _ => None,
    });
    publications.collect()
}

#[test]
fn it_asks_what_there_is_and_replaces_that() {
    for options in [hasty(), patient()] {
        let run = drive(options, Work::default(), takes);
        let published = Published {
            generation: STORED,
            leased: true,
        };
        assert_eq!(run.end, Ok(published));
        let [
            Message::GetStatus(_),
            Message::Publish(publication),
            Message::Watch(watch),
        ] = &run.asked[..]
        else {
            panic!("{:?}", run.asked)
        };
        assert_eq!(publication.expects, Expects::Generation(GENERATION));
        assert_eq!(publication.generation, None, "the launcher names it");
        assert_eq!(publication.key.checkpoint.digest, Some([9; 32]));
        assert_eq!(
            *watch,
            Watch {
                generation: Some(STORED)
            }
        );
        assert_eq!((run.took, run.connects), (Span(0), 3), "a connection each");
    }
}

#[test]
fn once_it_is_sent_only_a_clear_answer_says_that_nothing_has_changed() {
    let leave_it_open = [
        Act::Breaks,
        Act::Silent,
        Act::Babbles,
        Act::Says(GetStatus {}.into()),
        Act::Fails(ErrorCode::InDoubt),
        Act::Fails(ErrorCode::Timeout),
        Act::Fails(ErrorCode::Internal),
    ];
    for (number, act) in leave_it_open.into_iter().enumerate() {
        for options in [hasty(), patient()] {
            let run = drive(options, Work::default(), but(act.clone()));
            assert!(
                matches!(run.end, Err(PublishError::Unknown { .. })),
                "{number}: {:?}",
                run.end
            );
            assert_eq!(publications(&run).len(), 1, "it may be stored already");
            assert!(run.took <= WORKS_WITHIN);
        }
    }
}

#[test]
fn what_is_refused_is_known_to_have_changed_nothing() {
    type Is = fn(&PublishError) -> bool;
    let rows: [(ErrorCode, Is); 5] = [
        (ErrorCode::Conflict, |e| {
            matches!(e, PublishError::Conflict { .. })
        }),
        (ErrorCode::Malformed, |e| {
            matches!(e, PublishError::Daemon(AttachError::Malformed { .. }))
        }),
        (ErrorCode::BadDescriptors, |e| {
            matches!(e, PublishError::Daemon(AttachError::Malformed { .. }))
        }),
        (ErrorCode::RefusedPeer, |e| {
            matches!(e, PublishError::Daemon(AttachError::RefusedPeer { .. }))
        }),
        (ErrorCode::NotAllowed, |e| {
            matches!(e, PublishError::Daemon(AttachError::Daemon { .. }))
        }),
    ];
    for (code, expected) in rows {
        let run = drive(hasty(), Work::default(), but(Act::Fails(code)));
        let error = run.end.expect_err("it is refused");
        assert!(expected(&error), "{code:?}: {error:?}");
        assert_eq!(run.took, Span(0), "{code:?} is not asked again");
    }
}

#[test]
fn a_daemon_that_has_no_time_is_asked_again_with_the_same_content() {
    for options in [hasty(), patient()] {
        let run = drive(options, Work::default(), |question, at| match question {
            Some(Message::Publish(_)) if at < Span::secs(2) => Act::Fails(ErrorCode::Busy),
            question => takes(question, at),
        });
        assert!(run.end.is_ok(), "{:?}", run.end);
        let publications = publications(&run);
        assert!(publications.len() > 2 && publications.windows(2).all(|two| two[0] == two[1]));
    }
    let run = drive(hasty(), Work::default(), but(Act::Fails(ErrorCode::Busy)));
    assert!(matches!(
        run.end,
        Err(PublishError::Daemon(AttachError::Daemon { .. }))
    ));
    assert!(run.took > Span::millis(4_900) && run.took <= Span::secs(5));
}

#[test]
fn what_was_not_sent_whole_is_sent_again() {
    let rows = [
        Act::BreaksBefore,
        Act::Connect(ConnectFailure::Busy),
        Act::Fails(ErrorCode::Busy),
    ];
    for act in rows {
        for options in [hasty(), patient()] {
            // It fails for as long as the memory is filled, and a second more.
            let work = Work {
                takes: Span::secs(10),
                ..Work::default()
            };
            let run = drive(options, work, |question, at| {
                let fails = at >= Span::secs(10) && at < Span::secs(11);
                match (question, &act) {
                    (None, Act::Connect(_)) if fails => act.clone(),
                    (Some(Message::Publish(_)), _) if fails => act.clone(),
                    _ => takes(question, at),
                }
            });
            assert!(run.end.is_ok(), "{:?}", run.end);
        }
    }
}

#[test]
fn before_anything_is_sent_the_daemon_is_waited_for_as_by_an_engine_that_loads() {
    let absent = Act::Connect(ConnectFailure::Absent("no such file".into()));
    let run = drive(hasty(), Work::default(), |_, _| absent.clone());
    assert!(matches!(
        run.end,
        Err(PublishError::Daemon(AttachError::Unavailable { .. }))
    ));
    assert_eq!((run.took, run.connects), (Span(0), 1));
    for act in [absent, Act::Breaks] {
        let run = drive(patient(), Work::default(), |_, _| act.clone());
        assert!(matches!(run.end, Err(PublishError::Daemon(_))), "{:?}", run.end);
        assert!(run.took > Span::secs(299) && run.took <= Span::secs(300));
        assert_eq!(run.shortest_pause, Some(Span::millis(500)));
    }
    for options in [hasty(), patient()] {
        let run = drive(options, Work::default(), |question, at| {
            if at < Span::secs(2) {
                Act::Breaks
            } else {
                takes(question, at)
            }
        });
        assert!(run.end.is_ok(), "{:?}", run.end);
    }
}

fn short(why: &'static str) -> Result<(), Lack> {
    Err(Lack::Room(why, Some(4)))
}

/// A daemon that gives up the old for the new.
fn gives_way(question: Option<&Message>, at: Span) -> Act {
    match question {
        Some(Message::GetStatus(_)) => holding(Holds::Content(GENERATION), Replace::DropFirst),
        question => takes(question, at),
    }
}

#[test]
fn without_room_the_old_content_is_released_first_and_only_that() {
    let work = Work {
        fills: vec![short("no room for both"), Ok(())],
        ..Work::default()
    };
    let run = drive(hasty(), work, gives_way);
    assert!(run.end.is_ok(), "{:?}", run.end);
    let [
        Message::GetStatus(_),
        Message::Release(Release { generation, .. }),
        Message::Publish(publication),
        Message::Watch(_),
    ] = &run.asked[..]
    else {
        panic!("{:?}", run.asked)
    };
    assert_eq!(*generation, Some(GENERATION));
    assert_eq!(publication.expects, Expects::Empty);
}

#[test]
fn what_does_not_fit_into_an_empty_device_either_is_given_up() {
    let work = Work {
        fills: vec![short("no room for both"), short("no room at all")],
        ..Work::default()
    };
    let run = drive(hasty(), work, gives_way);
    let why = "no room at all (and the content before was released to make room)".to_owned();
    assert_eq!(run.end, Err(PublishError::OutOfMemory { why }));
    // Where nothing is held, or what is held shall stay, nothing is released for it.
    for (holds, replace) in [
        (Holds::Empty, Replace::DropFirst),
        (Holds::Released(GENERATION), Replace::DropFirst),
        (Holds::Content(GENERATION), Replace::Keep),
    ] {
        let work = Work {
            fills: vec![short("no room")],
            ..Work::default()
        };
        let run = drive(hasty(), work, |_, _| holding(holds, replace));
        assert!(matches!(run.end, Err(PublishError::OutOfMemory { .. })));
        assert_eq!(run.asked, [GetStatus {}.into()]);
    }
}

#[test]
fn what_is_held_is_not_released_for_something_that_would_not_fit_then_either() {
    // One byte too few with both, a limit that is the engine's own, and a lack after the filling.
    let after = || Err(Lack::Fault(Fault::OutOfMemory("no room to map it".into())));
    for lack in [
        Err(Lack::Room("free 1, held 8", Some(1))),
        Err(Lack::Room("ulimit", None)),
        after(),
    ] {
        let work = Work {
            fills: vec![lack],
            ..Work::default()
        };
        let run = drive(hasty(), work, gives_way);
        let error = run.end.unwrap_err();
        assert!(
            matches!(
                error,
                PublishError::OutOfMemory { .. } | PublishError::FillFailed { .. }
            ),
            "{error:?}"
        );
        let remedies = [
            "; free memory, or",
            "nothing was published: mend that, and publish again",
        ];
        assert!(
            remedies.iter().any(|remedy| error.to_string().contains(remedy)),
            "{error}"
        );
        assert_eq!(run.asked, [GetStatus {}.into()]);
    }
}

#[test]
fn what_is_replaced_before_it_is_released_is_not_dropped() {
    for code in [ErrorCode::StaleGeneration, ErrorCode::NotAllowed] {
        let work = Work {
            fills: vec![short("no room for both")],
            ..Work::default()
        };
        let run = drive(hasty(), work, |question, at| match question {
            Some(Message::Release(_)) => Act::Fails(code),
            question => gives_way(question, at),
        });
        let error = run.end.expect_err("it is refused");
        match code {
            ErrorCode::StaleGeneration => assert!(matches!(error, PublishError::Conflict { .. })),
            _ => assert!(matches!(error, PublishError::Daemon(AttachError::Daemon { .. }))),
        }
        assert!(!run.asked.iter().any(|asked| matches!(asked, Message::Publish(_))));
    }
    // That may be said twice.
    let work = Work {
        fills: vec![short("no room for both"), Ok(())],
        ..Work::default()
    };
    let run = drive(hasty(), work, |question, at| match question {
        Some(Message::Release(_)) if at < Span::secs(1) => Act::Breaks,
        question => gives_way(question, at),
    });
    assert!(run.end.is_ok(), "{:?}", run.end);
}

#[test]
fn a_lease_that_fails_does_not_take_the_publication_back() {
    for act in [
        Act::Breaks,
        Act::Silent,
        Act::Babbles,
        Act::Fails(ErrorCode::StaleGeneration),
        Act::Says(Released {}.into()),
    ] {
        let run = drive(hasty(), Work::default(), |question, at| match question {
            Some(Message::Watch(_)) => act.clone(),
            question => takes(question, at),
        });
        let leased = false;
        assert_eq!(
            run.end,
            Ok(Published {
                generation: STORED,
                leased
            })
        );
        assert!(run.took <= Span::secs(5));
    }
}

#[test]
fn the_engines_own_work_takes_nothing_of_its_patience() {
    for options in [hasty(), patient()] {
        let work = Work {
            takes: Span::secs(1000),
            ..Work::default()
        };
        let run = drive(options, work, |question, at| match question {
            // It is back a second after the memory was filled.
            _ if at >= Span::secs(1000) && at < Span::secs(1001) => Act::Connect(ConnectFailure::Busy),
            question => takes(question, at),
        });
        let leased = true;
        assert_eq!(
            run.end,
            Ok(Published {
                generation: STORED,
                leased
            })
        );
    }
}

#[test]
fn a_draft_is_not_published_in_a_targets_place_before_anybody_is_asked() {
    let options = AttachOptions {
        role: weightd_core::content::Role::Draft,
        ..hasty()
    };
    let run = drive(options, Work::default(), takes);
    let fields = vec![Difference::new("role", "target", "draft")];
    assert_eq!(run.end, Err(PublishError::Misplaced { fields }));
    assert_eq!(run.connects, 0);
}

#[test]
fn what_fails_is_asked_before_it_is_filled() {
    let failed = Work {
        digest: Err("a file is gone".to_owned()),
        fills: Vec::new(),
        ..Work::default()
    };
    let run = drive(hasty(), failed, takes);
    assert!(matches!(
        run.end,
        Err(PublishError::Daemon(AttachError::DigestFailed { .. }))
    ));
    let fails = Cell::new(0);
    for code in [
        ErrorCode::UnknownCommand,
        ErrorCode::RefusedPeer,
        ErrorCode::Version,
    ] {
        let work = Work {
            fills: Vec::new(),
            ..Work::default()
        };
        let run = drive(hasty(), work, |_, _| {
            fails.set(fails.get() + 1);
            Act::Fails(code)
        });
        assert!(matches!(run.end, Err(PublishError::Daemon(_))), "{:?}", run.end);
    }
    assert_eq!(fails.get(), 6, "each at a connect and a request");
}
