//! Hostile clients at every socket of a directory, as long as they are let.

use super::plan::Dice;
use crate::floods::{frame, long_request, send};
use std::fs;
use std::io::Read;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;
use weightd_core::wire::message::{GetActivity, GetStatus, Watch};

/// How many connections they keep at most.
const KEPT: usize = 100;

/// It ends when this is dropped.
pub struct Flood {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    pub fn start(dir: PathBuf, mut dice: Dice) -> Flood {
        let over = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&over);
        let thread = spawn(move || {
            let mut kept = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                if kept.len() == KEPT {
                    end(kept.swap_remove(dice.below(KEPT as u64) as usize));
                }
                kept.extend(one_more(&dir, &mut dice));
                // What it takes of the two cores is not what is tried.
                sleep(Duration::from_millis(1));
            }
            kept.into_iter().for_each(end);
        });
        Flood {
            over,
            thread: Some(thread),
        }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Also for a server that holds our end of it: it would wait for its deadline, and what it holds until then is no trend.
fn end(stream: UnixStream) {
    let _ = stream.shutdown(Shutdown::Both);
}

/// A connection that does one thing too many, and stays; none where nobody listens.
fn one_more(dir: &Path, dice: &mut Dice) -> Option<UnixStream> {
    let sockets = fs::read_dir(dir)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()));
    let sockets: Vec<PathBuf> = sockets
        .filter(|path| path.extension().is_some_and(|end| end == "sock"))
        .collect();
    if sockets.is_empty() {
        return None;
    }
    let mut stream = UnixStream::connect(&sockets[dice.below(sockets.len() as u64) as usize]).ok()?;
    stream.set_nonblocking(true).ok()?;
    match dice.below(7) {
        // Silent.
        0 => {}
        // Half a request, with descriptors of the connection itself.
        1 => {
            send(&stream, &long_request(16), &[stream.as_fd(); 16]);
            send(&stream, &[0; 9000], &[]);
        }
        // More descriptors than a frame may own.
        2 => send(&stream, &long_request(16), &[stream.as_fd(); 253]),
        // Answers that nobody reads.
        3 => send(&stream, &frame(GetActivity {}).repeat(200), &[]),
        // A lease of whatever there is.
        4 => send(&stream, &frame(Watch { generation: None }), &[]),
        // Anything at all.
        5 => {
            let noise: Vec<u8> = (0..dice.below(5000)).map(|_| dice.below(256) as u8).collect();
            send(&stream, &noise, &[]);
        }
        // One that ends at once, in the middle of its answer.
        _ => {
            send(&stream, &frame(GetStatus {}), &[]);
            let _ = stream.read(&mut [0; 7]);
            return None;
        }
    }
    Some(stream)
}
