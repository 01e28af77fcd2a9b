//! One connection, for those who say what a runtime never would.

use crate::stage::Given;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::MemfdFlags;
use std::os::fd::{AsFd, OwnedFd};
use weightd_core::wire::{Decoder, Frame};
use weightd_socket::message::{ReceiveError, receive, send};

pub struct Talk {
    pub socket: OwnedFd,
    decoder: Decoder<OwnedFd>,
    pub ended: bool,
}

impl Talk {
    pub fn new(socket: OwnedFd) -> Talk {
        Talk {
            socket,
            decoder: Decoder::default(),
            ended: false,
        }
    }

    /// Says as much of it as is taken.
    pub fn says(&mut self, mut bytes: &[u8], given: Vec<Given>) {
        let given: Vec<OwnedFd> = given.into_iter().map(make).collect();
        let mut descriptors: Vec<_> = given.iter().map(AsFd::as_fd).collect();
        while let Ok(sent) = send(&self.socket, bytes, &descriptors)
            && sent > 0
        {
            bytes = &bytes[sent..];
            descriptors.clear();
        }
    }

    /// What has arrived, without waiting.
    pub fn hears(&mut self) -> Vec<Frame<OwnedFd>> {
        let mut frames = Vec::new();
        let mut buffer = [0; 65536];
        let mut descriptors = Vec::new();
        loop {
            let received = match receive(&self.socket, &mut buffer, &mut descriptors) {
                Ok(received) if received.bytes > 0 => received,
                Err(ReceiveError::WouldBlock) => return frames,
                _ => {
                    self.ended = true;
                    return frames;
                }
            };
            let pushed = self
                .decoder
                .push(&buffer[..received.bytes], descriptors.drain(..), false);
            pushed.expect("it frames well");
            while let Some(frame) = self.decoder.next_frame().expect("it frames well") {
                frames.push(frame);
            }
        }
    }
}

/// Blocks until one of these is readable; says which are.
pub fn wait(descriptors: &[&dyn AsFd]) -> Vec<bool> {
    let waiting = descriptors.iter();
    let mut waiting: Vec<_> = waiting
        .map(|descriptor| PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::IN))
        .collect();
    rustix::io::retry_on_intr(|| poll(&mut waiting, None)).expect("to wait");
    waiting
        .iter()
        .map(|waited| !waited.revents().is_empty())
        .collect()
}

pub fn make(given: Given) -> OwnedFd {
    match given {
        Given::Sealed(bytes) => weightd_gpu::sealed(&bytes).expect("memory"),
        Given::Unsealed(bytes) => {
            let memory = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC).expect("memory");
            rustix::io::write(&memory, &bytes).expect("memory");
            memory
        }
        Given::Other => std::fs::File::open("/dev/null").expect("a device").into(),
    }
}
