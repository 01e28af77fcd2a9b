//! A task that waits is not turned for nothing: what made it readable is noticed, or gone.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;
use std::time::Duration;
use weightd_blocking::testing::{Loading, Stop, Task, Turn};
use weightd_blocking::{Binding, Endpoint};
use weightd_core::machine::{AttachError, AttachOptions};
use weightd_core::testing::world::key;
use weightd_core::time::Span;
use weightd_core::wire::message::{ErrorCode, Failure, Message};

/// Says a failure to everybody who asks. Each connection stays open on this side, or is closed at once.
fn daemon(socket: &Path, code: ErrorCode, closes: bool) {
    let listener = UnixListener::bind(socket).unwrap();
    let failure = Message::from(Failure {
        code: code.number(),
        retryable: true,
        message: "because".into(),
    });
    let frame = failure.frame(1, 0).unwrap();
    thread::spawn(move || {
        let mut open = Vec::new();
        for connection in listener.incoming() {
            let mut connection = connection.unwrap();
            let _ = connection.read(&mut [0; 4096]);
            // Twice: the second is one that nobody waits for any more.
            let _ = connection.write_all(&[&frame[..], &frame].concat());
            if closes {
                // When the engine has its answer and sleeps.
                thread::sleep(Duration::from_millis(50));
            } else {
                open.push(connection);
            }
        }
    });
}

/// How many turns a load takes that waits for two seconds.
fn turns(binding: &Binding) -> usize {
    let mut loading = Loading::new(binding).unwrap();
    let mut turns = 0;
    loop {
        turns += 1;
        match loading.turn().unwrap() {
            Turn::Wait(timeout) => {
                let timeout = timeout.map(|timeout| Timespec::try_from(timeout).unwrap());
                let mut waiting = [PollFd::from_borrowed_fd(loading.as_fd(), PollFlags::IN)];
                poll(&mut waiting, timeout.as_ref()).unwrap();
            }
            Turn::Done(Stop::Over(Err(AttachError::Daemon { .. } | AttachError::Unavailable { .. }))) => {
                return turns;
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_load_that_waits_for_its_daemon_turns_a_few_times_a_second() {
    let temp = tempfile::tempdir().unwrap();
    let options = AttachOptions {
        fallback: false,
        state_timeout: Span::secs(2),
        ..AttachOptions::new(rustix::process::getuid().as_raw())
    };
    for (name, daemon_is) in [("absent", None), ("open", Some(false)), ("closed", Some(true))] {
        let socket = temp.path().join(name);
        if let Some(closes) = daemon_is {
            daemon(&socket, ErrorCode::Busy, closes);
        }
        let endpoint = Endpoint::socket(&socket).unwrap();
        let binding = Binding::with(endpoint, options.clone(), key(0), || Err("not asked for".into()));
        let turns = turns(&binding);
        // Four tries, each with a connect, an answer and a pause.
        assert!(turns <= 16, "{name}: {turns} turns");
    }
}
