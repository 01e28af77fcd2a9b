//! stderr, behind a bounded queue: whoever logs never waits for it.

use super::bars::Bars;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;

/// What waits for a stderr that takes nothing: lines, and their bytes.
const MAX_LINES: usize = 1024;
const MAX_BYTES: usize = 256 << 10;
/// How long the end of the process waits for stderr.
const FLUSHES_WITHIN: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(5);
const STACK_BYTES: usize = 256 << 10;

/// The queue. A thread of its own writes what is in it.
#[derive(Debug)]
pub struct Output {
    queue: SyncSender<Item>,
    state: Arc<State>,
}

#[derive(Debug)]
enum Item {
    Line(Vec<u8>),
    Progress { name: String, done: u64, total: u64 },
    NoProgress,
    Flush(SyncSender<()>),
}

#[derive(Debug, Default)]
struct State {
    queued_bytes: AtomicUsize,
    lost: AtomicU64,
}

impl Output {
    pub fn start() -> io::Result<Output> {
        // Its own, so that a write that never returns keeps no lock.
        let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
        let (queue, items) = sync_channel(MAX_LINES);
        let state = Arc::new(State::default());
        let writer = Writer {
            stderr,
            state: Arc::clone(&state),
            bars: Bars::default(),
            reported: 0,
        };
        thread::Builder::new()
            .name("logs".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || writer.run(&items))?;
        Ok(Output { queue, state })
    }

    /// Queues a whole line; it is lost where there is no room.
    pub fn line(&self, line: Vec<u8>) {
        let bytes = line.len();
        let queued = self.state.queued_bytes.fetch_add(bytes, Relaxed);
        if queued.saturating_add(bytes) > MAX_BYTES || self.queue.try_send(Item::Line(line)).is_err() {
            self.state.queued_bytes.fetch_sub(bytes, Relaxed);
            self.state.lost.fetch_add(1, Relaxed);
        }
    }

    /// Queues progress. Where there is no room, nobody sees it anyway.
    pub fn progress(&self, name: String, done: u64, total: u64) {
        let _ = self.queue.try_send(Item::Progress { name, done, total });
    }

    pub fn end_progress(&self) {
        let _ = self.queue.try_send(Item::NoProgress);
    }

    /// How many lines were lost.
    pub fn lost(&self) -> u64 {
        self.state.lost.load(Relaxed)
    }

    pub fn flush(&self) {
        let until = Instant::now() + FLUSHES_WITHIN;
        let (done, flushed) = sync_channel(1);
        let mut item = Item::Flush(done);
        while let Err(TrySendError::Full(back)) = self.queue.try_send(item) {
            if Instant::now() >= until {
                return;
            }
            item = back;
            thread::sleep(PAUSE);
        }
        // Late or gone: there is nothing more to be done.
        let _ = flushed.recv_timeout(until.saturating_duration_since(Instant::now()));
    }
}

/// One write is one line: the formatter collects it first.
impl Write for &Output {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.line(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Writer {
    stderr: File,
    state: Arc<State>,
    bars: Bars,
    /// How many of the lost lines were spoken of.
    reported: u64,
}

impl Writer {
    fn run(mut self, items: &Receiver<Item>) {
        while let Ok(item) = items.recv() {
            match item {
                Item::Line(line) => self.write(&line),
                Item::Progress { name, done, total } => self.bars.show(&name, done, total),
                Item::NoProgress => self.bars.clear(),
                Item::Flush(done) => {
                    self.bars.clear();
                    // Who asked may have stopped to wait.
                    let _ = done.try_send(());
                }
            }
        }
    }

    fn write(&mut self, line: &[u8]) {
        let written = self.bars.above(|| self.stderr.write_all(line));
        self.state.queued_bytes.fetch_sub(line.len(), Relaxed);
        match written {
            // Whether it comes back shows with the next line.
            Err(_) => drop(self.state.lost.fetch_add(1, Relaxed)),
            Ok(()) => {
                let lost = self.state.lost.load(Relaxed);
                if lost > self.reported {
                    self.reported = lost;
                    // Queued like any other; should it get lost, the next one counts it.
                    warn!("{lost} log lines were lost so far: stderr did not take them");
                }
            }
        }
    }
}
