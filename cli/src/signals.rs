//! The signals that ask a process to end, as a descriptor to wait on.

use crate::error::CliError;
use rustix::io::Errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::signal_name;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Catches SIGINT, SIGTERM and, unless it was ignored from the start (`nohup`), SIGHUP.
#[derive(Debug)]
pub struct Signals {
    wake: UnixStream,
    last: Arc<AtomicUsize>,
}

impl Signals {
    pub fn catch() -> io::Result<Signals> {
        let (wake, write) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        let last = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            if signal == SIGHUP && is_ignored(signal) {
                continue;
            }
            // The number first: it must be there when the descriptor wakes.
            signal_hook::flag::register_usize(signal, Arc::clone(&last), signal as usize)?;
            signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
        }
        Ok(Signals { wake, last })
    }

    /// How many signals came since the last call.
    pub fn take(&self) -> usize {
        let mut buffer = [0; 64];
        let mut count = 0;
        loop {
            match rustix::io::read(&self.wake, &mut buffer) {
                Ok(0) => return count,
                Ok(read) => count += read,
                Err(Errno::INTR) => {}
                Err(_) => return count,
            }
        }
    }

    /// What a process exits with that ends in order: 128 and the number of the last signal, or
    /// success where none came.
    pub fn exit_code(&self) -> ExitCode {
        match self.last.load(Ordering::Relaxed) {
            0 => ExitCode::SUCCESS,
            signal => ExitCode::from(128 + signal as u8),
        }
    }

    /// For who waits before anything was started: the error where a signal has come.
    pub fn check(&self) -> Result<(), CliError> {
        match self.take() {
            0 => Ok(()),
            _ => Err(CliError::Signal(self.last(), self.exit_code())),
        }
    }

    /// What ended a process that ends in order: the name of the last signal.
    pub fn last(&self) -> &'static str {
        signal_name(self.last.load(Ordering::Relaxed) as i32).unwrap_or("a signal")
    }
}

impl AsFd for Signals {
    /// Readable when a signal has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// Whether the signal's disposition was inherited as ignored: proc(5), `SigIgn`.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}
