//! Children that have nothing more to do. One that is stuck in a driver ends late, and nobody waits for it for long.

use super::children::describe;
use crate::process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long the end of a child may hold up whoever asks how it ended, and that of its launcher.
const ENDS_WITHIN: Duration = Duration::from_secs(3);
/// How often it is looked for where the kernel cannot wait for a process (before 5.3).
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Those that were killed, and may not be gone yet.
#[derive(Debug, Default)]
pub struct Ending(Vec<Child>);

impl Ending {
    /// Lets a child end by itself, for a while, and kills it then; says how it ended.
    pub fn end(&mut self, mut child: Child) -> String {
        match ended(&mut child, Instant::now() + ENDS_WITHIN) {
            Some(how) => how,
            None => self.kill(child),
        }
    }

    /// Kills a child, unless it has ended; says how it ended.
    pub fn kill(&mut self, mut child: Child) -> String {
        let _ = child.kill();
        let how = ended(&mut child, Instant::now() + ENDS_WITHIN);
        how.unwrap_or_else(|| {
            self.0.push(child);
            format!("did not end within {} s of being killed", ENDS_WITHIN.as_secs())
        })
    }

    /// Kills a child, unless it has ended, and waits for nothing.
    pub fn leave(&mut self, mut child: Child) {
        let _ = child.kill();
        self.0.push(child);
    }

    /// Lets those go that are gone.
    pub fn reap(&mut self) {
        // One that cannot be waited for is not ours to wait for.
        self.0.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let until = Instant::now() + ENDS_WITHIN;
        for child in &mut self.0 {
            ended(child, until);
        }
    }
}

/// How a child ended, where it has by then.
fn ended(child: &mut Child, until: Instant) -> Option<String> {
    let process = process::open(child.id());
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(describe(status)),
            Ok(None) => {}
            Err(error) => return Some(error.to_string()),
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        match (&process, Timespec::try_from(left)) {
            (Ok(process), Ok(left)) => drop(poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&left))),
            _ => sleep(LOOK_EVERY.min(left)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn shell(script: &str) -> Child {
        Command::new("sh").args(["-c", script]).spawn().unwrap()
    }

    #[test]
    fn how_a_child_ended_is_known_and_none_is_left() {
        let mut ending = Ending::default();
        assert_eq!(ending.end(shell("exit 7")), "exited with code 7");
        let killed = shell("trap '' TERM; exec sleep 1000");
        assert_eq!(ending.kill(killed), "was killed by signal 9");
        ending.leave(shell("exec sleep 1000"));
        while !ending.0.is_empty() {
            ending.reap();
            sleep(LOOK_EVERY);
        }
    }
}
