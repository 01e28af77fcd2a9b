//! A machine with one connection, against a daemon that does what a test says.

use crate::ledger::{Fd, Ledger};
use crate::world::{EPOCH, UID, content, device, frame};
use weightd_core::content::Generation;
use weightd_core::machine::{Client, ConnectFailure, Exchange, Step};
use weightd_core::peer::Peer;
use weightd_core::time::{Now, Span};
use weightd_core::wire::message::{ErrorCode, Failure, Message, State};
use weightd_core::wire::{Header, frame::HEADER_BYTES};

pub const GENERATION: Generation = Generation {
    epoch: EPOCH,
    number: 3,
};

/// What the daemon does with a connection or a request.
#[derive(Clone)]
#[allow(clippy::large_enum_variant)]
pub enum Act {
    Connect(ConnectFailure),
    User(u32),
    Breaks,
    /// When all of the request but its last byte has left.
    BreaksBefore,
    Silent,
    Fails(ErrorCode),
    Says(Message),
    Babbles,
    Serves,
    /// Serves a manifest that is not what the message says.
    Lies,
}

/// How it went.
pub struct Run<E> {
    pub end: E,
    /// How long it took.
    pub took: Span,
    pub connects: usize,
    /// Everything that was asked.
    pub asked: Vec<Message>,
    pub shortest_pause: Option<Span>,
}

/// Drives a machine against `daemon`, which is asked at every connect and request: with what is asked (nothing yet at
/// a connect) and since when. What the machine wants beyond that is done by `work`, which may take its time, until it
/// says what the end is.
pub fn drive<M: Client<Fd>, E>(
    mut machine: M,
    daemon: impl Fn(Option<&Message>, Span) -> Act,
    mut work: impl FnMut(&mut M, &mut Now, M::Next, &Ledger) -> Option<E>,
) -> Run<E> {
    let (ledger, start) = (Ledger::default(), Now(50));
    let mut now = start;
    let (mut connects, mut asked, mut shortest_pause) = (0, Vec::new(), None);
    let end = loop {
        match machine.step(now) {
            Step::Connect => {
                connects += 1;
                let peer = |uid| Ok(Peer { pid: 1, uid });
                let result = match daemon(None, now - start) {
                    Act::Connect(failure) => Err(failure),
                    Act::User(uid) => peer(uid),
                    _ => peer(UID),
                };
                machine.connected(now, result);
            }
            Step::Io { until } => {
                let mut pending = None;
                while let Some(out) = machine.exchange().outgoing() {
                    let header = Header::decode(out.bytes)
                        .expect("a frame")
                        .expect("a whole header");
                    assert_eq!(header.descriptors, out.descriptors.len());
                    let question =
                        Message::decode(header.kind, &out.bytes[HEADER_BYTES..]).expect("a message");
                    let length = out.bytes.len();
                    let act = daemon(Some(&question), now - start);
                    let breaks = matches!(act, Act::BreaksBefore);
                    machine.exchange().wrote(now, length - usize::from(breaks));
                    asked.push(question);
                    pending = Some((header.request, act));
                    if breaks {
                        break;
                    }
                }
                match pending {
                    Some((request, act)) => react(&mut machine, now, until, request, act, &ledger)
                        .into_iter()
                        .for_each(|later| now = later),
                    None => now = until,
                }
            }
            Step::Sleep { until } => {
                let pause = until - now;
                shortest_pause = Some(shortest_pause.map_or(pause, |shortest: Span| shortest.min(pause)));
                now = until;
            }
            Step::Next(next) => {
                if let Some(end) = work(&mut machine, &mut now, next, &ledger) {
                    break end;
                }
            }
        }
    };
    drop(machine);
    assert_eq!(
        ledger.open_in_all(),
        0,
        "a machine that is over keeps no descriptor"
    );
    Run {
        end,
        took: now - start,
        connects,
        asked,
        shortest_pause,
    }
}

/// Does what the daemon does; returns a later moment where it does nothing.
fn react<M: Client<Fd>>(
    machine: &mut M,
    now: Now,
    until: Now,
    request: u32,
    act: Act,
    ledger: &Ledger,
) -> Option<Now> {
    let lies = matches!(act, Act::Lies);
    let reply = match act {
        Act::Breaks | Act::BreaksBefore => {
            machine.exchange().hangup(now, "reset");
            return None;
        }
        Act::Babbles => {
            machine.exchange().receive(now, b"220 ready\r\n", None, false);
            return None;
        }
        Act::Fails(code) => {
            let message = String::from("because");
            Failure {
                code: code.number(),
                retryable: false,
                message,
            }
            .into()
        }
        Act::Says(message) => message,
        Act::Serves | Act::Lies => State {
            generation: GENERATION,
            device_uuid: device(0),
            content: content(64, &[10]),
        }
        .into(),
        Act::Silent | Act::Connect(_) | Act::User(_) => return Some(until),
    };
    let descriptors = match reply {
        Message::State(_) => vec![ledger.memory(64 - u64::from(lies)), ledger.memory(10)],
        _ => vec![],
    };
    let bytes = frame(&reply, request, descriptors.len());
    let descriptors = descriptors.into_iter().map(|fd| (fd.facts, fd));
    machine.exchange().receive(now, &bytes, descriptors, false);
    None
}
