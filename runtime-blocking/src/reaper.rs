//! A thread that closes descriptors: the last close of a large region can take a second.

use crate::poller::Waker;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use weightd_core::machine::DiscardId;

#[derive(Debug)]
pub(crate) struct Reaper {
    discard: Sender<(DiscardId, OwnedFd)>,
    closed: Receiver<DiscardId>,
}

impl Reaper {
    /// Starts the thread. It wakes `waker` after each close, and ends when this is dropped.
    pub fn start(waker: Arc<Waker>) -> io::Result<Reaper> {
        let (discard, discards) = channel::<(DiscardId, OwnedFd)>();
        let (report, closed) = channel();
        thread::Builder::new().name("reaper".to_owned()).spawn(move || {
            for (id, descriptor) in discards {
                drop(descriptor);
                // Both fail only when the driver is gone, which then does not ask.
                if report.send(id).is_err() || waker.wake().is_err() {
                    return;
                }
            }
        })?;
        Ok(Reaper { discard, closed })
    }

    /// Hands over a descriptor. Where the thread is gone, it is closed here.
    pub fn discard(&self, id: DiscardId, descriptor: OwnedFd) {
        let _ = self.discard.send((id, descriptor));
    }

    /// The next descriptor that was closed.
    pub fn closed(&self) -> Option<DiscardId> {
        self.closed.try_recv().ok()
    }
}
