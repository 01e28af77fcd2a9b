//! Other processes, by their ids.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::OwnedFd;

/// A descriptor that means the process which has this id now, and no later one, and becomes readable when that ends.
/// (Kernels before 5.3 have none.)
pub fn open(pid: u32) -> Result<OwnedFd, Errno> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pidfd_open(pid.ok_or(Errno::SRCH)?, PidfdFlags::empty())
}

/// Whether no process has this id here, or one that has ended and that nobody has waited for. One of another pid namespace
/// is not here.
pub fn has_ended(pid: u32) -> bool {
    match open(pid) {
        Ok(process) => {
            let mut ended = [PollFd::new(&process, PollFlags::IN)];
            poll(&mut ended, Some(&Timespec::default())) == Ok(1)
        }
        Err(error) => error == Errno::SRCH,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_has_ended_also_before_somebody_waits_for_it() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        assert!(!has_ended(child.id()));
        child.kill().unwrap();
        let process = open(child.id()).unwrap();
        poll(&mut [PollFd::new(&process, PollFlags::IN)], None).unwrap();
        assert!(has_ended(child.id()));
        child.wait().unwrap();
        assert!(has_ended(child.id()) && has_ended(0));
        assert!(!has_ended(std::process::id()));
    }
}
