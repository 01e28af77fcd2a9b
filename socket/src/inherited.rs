//! Taking descriptors that a service manager gave this process when it started it, as in
//! sd_listen_fds(3).

use crate::connect::pair;
use crate::message::receive;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use rustix::fs::OFlags;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use weightd_core::peer::Facts;

/// The number of the first one (`SD_LISTEN_FDS_START`).
const FIRST: RawFd = 3;

/// Takes the next descriptor for each of these names, from number 3 on, each with what it is; where nothing
/// was open under its number when this process began, it is left out. All are close-on-exec, and the numbers
/// themselves are closed.
///
/// Call it once, before anything else uses these numbers, and only where the manager said that they are
/// ours (`LISTEN_PID`).
pub fn take(names: impl IntoIterator<Item = String>) -> io::Result<Vec<(String, Facts, OwnedFd)>> {
    // What is known by its number alone is nobody's in Rust's eyes. Sent to ourselves, it comes back as an
    // owned descriptor of the same open file, looked at like any other that we receive.
    let (ours, theirs) = pair()?;
    let mut taken = Vec::new();
    for (number, name) in (FIRST..).zip(names) {
        // The manager may have said more numbers than it opened, which are free, or of what we opened
        // ourselves.
        if !outlived_an_exec(number) {
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

/// Whether a number is open, and was when this process began: whatever it opens itself is close-on-exec.
fn outlived_an_exec(number: RawFd) -> bool {
    let Ok(info) = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")) else {
        return false;
    };
    // In octal: proc_pid_fdinfo(5).
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| !OFlags::from_bits_retain(flags).contains(OFlags::CLOEXEC))
}
