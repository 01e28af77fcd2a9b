//! How long an engine waits for the answer to a question, and for which.

use crate::ledger::Fd;
use crate::scripted::{self, Act};
use crate::world::UID;
use weightd_core::machine::{AttachError, AttachOptions, ConnectFailure, Query};
use weightd_core::time::Span;
use weightd_core::wire::message::{ErrorCode, GetMemory, Memory, Message};

type Run = scripted::Run<Result<Message, AttachError>>;

fn drive(options: &AttachOptions, daemon: impl Fn(Option<&Message>, Span) -> Act) -> Run {
    let query: Query<Fd> = Query::new(options, GetMemory {});
    scripted::drive(query, daemon, |_, _, answer, _| Some(answer))
}

fn hasty() -> AttachOptions {
    AttachOptions::new(UID)
}

fn patient() -> AttachOptions {
    AttachOptions {
        fallback: false,
        ..hasty()
    }
}

fn memory() -> Act {
    let (current, leased) = (10, 20);
    Act::Says(Memory { current, leased }.into())
}

fn absent() -> Act {
    Act::Connect(ConnectFailure::Absent("no such file".into()))
}

#[test]
fn an_answer_is_returned_as_it_is() {
    for options in [hasty(), patient()] {
        let run = drive(&options, |_, _| memory());
        let (current, leased) = (10, 20);
        assert_eq!(run.end, Ok(Memory { current, leased }.into()));
        assert_eq!((run.took, run.connects), (Span(0), 1));
    }
}

#[test]
fn with_something_to_fall_back_on_only_what_passes_is_asked_again() {
    for act in [
        absent(),
        Act::User(7),
        Act::Babbles,
        Act::Fails(ErrorCode::UnknownCommand),
    ] {
        let run = drive(&hasty(), |_, _| act.clone());
        assert!(run.end.is_err());
        assert_eq!((run.took, run.connects), (Span(0), 1));
    }
    for act in [Act::Breaks, Act::BreaksBefore, Act::Fails(ErrorCode::Busy)] {
        let run = drive(&hasty(), |_, _| act.clone());
        assert!(run.end.is_err());
        assert!(run.took > Span::millis(4_900) && run.took <= Span::secs(5));
        let back = drive(
            &hasty(),
            |_, at| {
                if at < Span::secs(3) { act.clone() } else { memory() }
            },
        );
        assert!(back.end.is_ok());
    }
    let silent = drive(&hasty(), |_, _| Act::Silent);
    assert_eq!(
        silent.end,
        Err(AttachError::Timeout {
            waited: Span::secs(5)
        })
    );
    assert_eq!((silent.took, silent.connects), (Span::secs(5), 1));
}

#[test]
fn without_one_the_daemon_is_waited_for_until_the_time_is_over() {
    for act in [
        absent(),
        Act::Breaks,
        Act::Silent,
        Act::Fails(ErrorCode::UnknownCommand),
    ] {
        let run = drive(&patient(), |_, _| act.clone());
        assert!(run.end.is_err());
        assert!(
            run.took > Span::secs(299) && run.took <= Span::secs(300),
            "{:?}",
            run.took
        );
        assert_eq!(run.shortest_pause, Some(Span::millis(500)));
        let back = drive(&patient(), |_, at| {
            if at < Span::secs(200) {
                act.clone()
            } else {
                memory()
            }
        });
        assert!(back.end.is_ok());
    }
    for act in [Act::User(7), Act::Babbles] {
        let run = drive(&patient(), |_, _| act.clone());
        assert!(run.end.is_err());
        assert_eq!((run.took, run.connects), (Span(0), 1), "it would not get better");
    }
}

#[test]
fn who_hears_nothing_says_how_long_it_listened() {
    let half = Span::millis(500);
    for options in [
        AttachOptions {
            connect_timeout: half,
            ..hasty()
        },
        AttachOptions {
            state_timeout: half,
            ..patient()
        },
        // The last try has a fifth of a second.
        AttachOptions {
            connect_timeout: half,
            state_timeout: Span::millis(1_200),
            ..patient()
        },
    ] {
        let error = drive(&options, |_, _| Act::Silent).end.unwrap_err();
        assert_eq!(error.to_string(), "no answer within 0.5 s; see the daemon's log");
    }
}
