//! Adopting a server whose launcher is gone.

use crate::clock::Clock;
use crate::line::Line;
use crate::request::RequestError;
use std::os::fd::OwnedFd;
use std::path::Path;
use weightd_core::machine::{Adopt, AskError, Inheritance};
use weightd_core::time::Span;
use weightd_socket::connect::connect;
use weightd_socket::credentials::our_uid;

/// Asks the server behind the control socket for all that it holds and for its lead, and waits `patience`
/// for that. The socket is the connection that it follows; closing it gives the lead up again.
pub fn adopt(control: &Path, patience: Span) -> Result<(Inheritance<OwnedFd>, OwnedFd), RequestError> {
    let clock = Clock::start();
    let (connection, peer) = connect(control)?;
    let mut line = Line::new()?;
    line.open(connection)?;
    let mut adopt = Adopt::new(clock.now(), std::process::id(), peer, our_uid()?, patience);
    while !adopt.is_over(clock.now()) {
        if !line.turn(clock.now(), &mut adopt) {
            line.wait(&clock, adopt.until())?;
        }
    }
    let failed = |error| RequestError::Ask {
        socket: control.display().to_string(),
        error,
    };
    let inheritance = adopt.finish().map_err(failed)?;
    let connection = line
        .take()
        .ok_or_else(|| failed(AskError::Broken("it was closed".to_owned())))?;
    Ok((inheritance, connection))
}
