//! Taking descriptors that a service manager gave this process when it started it, as in
//! sd_listen_fds(3).

use crate::connect::pair;
use crate::message::receive;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use weightd_core::peer::Facts;

/// The number of the first one (`SD_LISTEN_FDS_START`).
const FIRST: RawFd = 3;

/// Takes the next descriptor for each of these names, from number 3 on, each with what it is; where nothing
/// is open under its number, it is left out. All are close-on-exec, and the numbers themselves are closed.
///
/// Call it once, before anything else uses these numbers, and only where the manager said that they are
/// ours (`LISTEN_PID`).
pub fn take(names: impl IntoIterator<Item = String>) -> io::Result<Vec<(String, Facts, OwnedFd)>> {
    // What is known by its number alone is nobody's in Rust's eyes. Sent to ourselves, it comes back as an
    // owned descriptor of the same open file, looked at like any other that we receive.
    let (ours, theirs) = pair()?;
    let mut taken = Vec::new();
    for (number, name) in (FIRST..).zip(names) {
        if [ours.as_raw_fd(), theirs.as_raw_fd()].contains(&number) {
            continue;
        }
        let numbers = [number];
        let message = [ControlMessage::ScmRights(&numbers)];
        let sent = sendmsg::<()>(
            ours.as_raw_fd(),
            &[IoSlice::new(&[0])],
            &message,
            MsgFlags::empty(),
            None,
        );
        if sent.is_err() {
            continue;
        }
        let mut received = Vec::new();
        let got = receive(&theirs, &mut [0], &mut received).map_err(io::Error::other)?;
        if got.truncated {
            return Err(io::Error::other(
                "no descriptor is left: raise the limit of open files (ulimit -n)",
            ));
        }
        taken.extend(
            received
                .into_iter()
                .map(|(facts, descriptor)| (name.clone(), facts, descriptor)),
        );
        nix::unistd::close(number)?;
    }
    Ok(taken)
}
