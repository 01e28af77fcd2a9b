//! One connection's two directions: frames in, frames out.

#[cfg(any(test, feature = "faults"))]
use super::contain::faults;
use super::reap::Bundle;
use crate::peer::Facts;
use crate::text::cut;
use crate::wire::message::{ErrorCode, Failure, MAX_WORDS, Message, MessageError};
use crate::wire::{Decoder, Frame, FrameError};
use std::collections::VecDeque;

/// What to send next on a connection.
#[derive(Debug, PartialEq, Eq)]
pub struct Outgoing<'a, F> {
    /// The bytes.
    pub bytes: &'a [u8],
    /// The descriptors to send with the first of them.
    pub descriptors: &'a [F],
}

/// What a received descriptor counts for, in bytes, where what a peer has us hold is bounded.
const DESCRIPTOR_COUNTS: usize = 4096;

#[derive(Debug)]
struct Queued<F> {
    bytes: Vec<u8>,
    sent: usize,
    descriptors: Option<Bundle<F>>,
}

/// Framing in both directions over one connection.
#[derive(Debug)]
pub(super) struct Link<F> {
    incoming: Decoder<F>,
    outgoing: VecDeque<Queued<F>>,
    next_request: u32,
}

impl<F> Default for Link<F> {
    fn default() -> Self {
        Link {
            incoming: Decoder::default(),
            outgoing: VecDeque::new(),
            next_request: 0,
        }
    }
}

impl<F> Link<F> {
    pub fn receive(
        &mut self,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = (Facts, F)>,
        truncated: bool,
    ) -> Result<(), FrameError> {
        self.incoming.push(bytes, descriptors, truncated)
    }

    pub fn next_frame(&mut self) -> Result<Option<Frame<F>>, FrameError> {
        self.incoming.next_frame()
    }

    /// Whether the start of a frame has arrived, and not the rest.
    pub fn is_mid_frame(&self) -> bool {
        self.incoming.is_mid_frame()
    }

    /// Queues a request under an id of our own, which is returned. One that does not fit a frame is
    /// not sent.
    pub fn ask(
        &mut self,
        message: impl Into<Message>,
        descriptors: Option<Bundle<F>>,
    ) -> Result<u32, MessageError> {
        // 0 stands for the connection as a whole.
        let request = self.next_request.checked_add(1).unwrap_or(1);
        self.queue(request, &message.into(), descriptors)?;
        self.next_request = request;
        Ok(request)
    }

    /// Queues the answer to `request`.
    ///
    /// A message that does not fit a frame becomes a failure that says so: what makes it long came
    /// from the peer.
    pub fn send(&mut self, request: u32, message: &Message, descriptors: Option<Bundle<F>>) {
        #[cfg(any(test, feature = "faults"))]
        faults::point(faults::WHEN_ANSWERED, request);
        if let Err(error) = self.queue(request, message, descriptors) {
            self.fail(request, ErrorCode::Malformed, false, error.to_string());
        }
    }

    fn queue(
        &mut self,
        request: u32,
        message: &Message,
        descriptors: Option<Bundle<F>>,
    ) -> Result<(), MessageError> {
        let count = descriptors.as_ref().map_or(0, |bundle| bundle.len());
        self.outgoing.push_back(Queued {
            bytes: message.frame(request, count)?,
            sent: 0,
            descriptors,
        });
        Ok(())
    }

    /// Queues a failure as the answer to `request`.
    pub fn fail(&mut self, request: u32, code: ErrorCode, retryable: bool, message: impl Into<String>) {
        let failure = Message::from(Failure {
            code: code.number(),
            retryable,
            // It may quote what came from a peer.
            message: cut(&message.into(), MAX_WORDS).to_owned(),
        });
        self.queue(request, &failure, None)
            .expect("a failure of this length fits a frame");
    }

    pub fn outgoing(&self) -> Option<Outgoing<'_, F>> {
        let first = self.outgoing.front()?;
        let descriptors = match &first.descriptors {
            Some(bundle) if first.sent == 0 => bundle.as_slice(),
            _ => &[],
        };
        Some(Outgoing {
            bytes: &first.bytes[first.sent..],
            descriptors,
        })
    }

    /// Takes note of sent bytes; true when a whole message has left.
    ///
    /// # Panics
    /// When more is reported than [`outgoing`](Link::outgoing) offered: a bug in the driver.
    pub fn wrote(&mut self, bytes: usize) -> bool {
        if bytes == 0 {
            return false;
        }
        let first = self
            .outgoing
            .front_mut()
            .expect("a driver reports only what was offered");
        first.sent += bytes;
        assert!(
            first.sent <= first.bytes.len(),
            "a driver reports no more than was offered"
        );
        first.descriptors = None;
        let whole = first.sent == first.bytes.len();
        if whole {
            self.outgoing.pop_front();
        }
        whole
    }

    /// Messages that are not sent yet.
    pub fn queued(&self) -> usize {
        self.outgoing.len()
    }

    /// Whether everything queued is sent.
    pub fn is_flushed(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Drops what is queued and gives up every received descriptor that no frame was taken for.
    pub fn close(&mut self) -> Vec<F> {
        self.outgoing.clear();
        self.forget_incoming()
    }

    /// Drops what was received and gives up every descriptor of it that no frame was taken for.
    pub fn forget_incoming(&mut self) -> Vec<F> {
        self.incoming.clear()
    }

    /// What was received and no frame was taken for, in bytes.
    pub fn held(&self) -> usize {
        self.incoming.buffered() + DESCRIPTOR_COUNTS * self.incoming.held_descriptors()
    }
}
