//! One question to a daemon or a server, and its answer.

use crate::clock::Clock;
use crate::line::{Line, advised};
use std::io;
use std::path::Path;
use thiserror::Error;
use weightd_core::machine::{Ask, AskError};
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_socket::connect::{ConnectError, connect};
use weightd_socket::credentials::{OverflowUid, our_uid};

/// Why there is no answer.
#[derive(Debug, Error)]
pub enum RequestError {
    /// Nobody was reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// This process has no usable user.
    #[error(transparent)]
    Uid(#[from] OverflowUid),
    /// Somebody was reached and did not answer well.
    #[error("{socket}: {error}")]
    Ask {
        /// The socket that was asked.
        socket: String,
        /// What went wrong.
        error: AskError,
    },
    /// A call failed.
    #[error("cannot wait for an answer: {}", advised(.0))]
    Io(#[from] io::Error),
}

/// Asks what listens on `socket`, and waits `patience` for the answer.
pub fn request(socket: &Path, question: impl Into<Message>, patience: Span) -> Result<Message, RequestError> {
    let clock = Clock::start();
    let (connection, peer) = connect(socket)?;
    let mut line = Line::new()?;
    line.open(connection)?;
    let mut ask = Ask::new(clock.now(), question, peer, our_uid()?, patience);
    loop {
        let now = clock.now();
        let moved = line.turn(now, &mut ask);
        if let Some(answer) = ask.answer(now) {
            return answer.map_err(|error| RequestError::Ask {
                socket: socket.display().to_string(),
                error,
            });
        }
        if !moved {
            line.wait(&clock, ask.until())?;
        }
    }
}
