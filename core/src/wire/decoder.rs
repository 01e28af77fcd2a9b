//! From a stream of bytes and descriptors to frames.

use super::frame::{FrameError, HEADER_BYTES, Header, MAX_DESCRIPTORS};
use crate::peer::Facts;
use std::collections::VecDeque;

/// One whole message: its header, its body, and the descriptors that it owns.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame<F> {
    /// The message kind.
    pub kind: u16,
    /// The request id.
    pub request: u32,
    /// The body.
    pub body: Vec<u8>,
    /// The descriptors, with what the kernel says of them.
    pub descriptors: Vec<(Facts, F)>,
}

/// Cuts a stream into frames.
///
/// Descriptors come with the first byte of their frame or earlier in the same read, never later;
/// the decoder queues them and each header takes its count. What does not fit that rule is the
/// peer's violation, after which the decoder must not be used again.
#[derive(Debug)]
pub struct Decoder<F> {
    bytes: Vec<u8>,
    start: usize,
    arrived: VecDeque<(Facts, F)>,
    /// A header whose body is not complete yet, with the descriptors that it took.
    open: Option<(Header, Vec<(Facts, F)>)>,
}

impl<F> Default for Decoder<F> {
    fn default() -> Self {
        Decoder {
            bytes: Vec::new(),
            start: 0,
            arrived: VecDeque::new(),
            open: None,
        }
    }
}

impl<F> Decoder<F> {
    /// Takes in what one read returned; `truncated` when the kernel dropped descriptors of it.
    pub fn push(
        &mut self,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = (Facts, F)>,
        truncated: bool,
    ) -> Result<(), FrameError> {
        self.bytes.drain(..self.start);
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
        self.arrived.extend(descriptors);
        if truncated {
            Err(FrameError::Truncated)
        } else {
            Ok(())
        }
    }

    /// The next whole frame; `None` when more bytes are needed.
    pub fn next_frame(&mut self) -> Result<Option<Frame<F>>, FrameError> {
        if self.open.is_none() {
            self.open_frame()?;
        }
        let rest = &self.bytes[self.start..];
        match &self.open {
            Some((header, _)) if rest.len() >= header.body => {}
            Some(_) => return self.nothing_stray(),
            // The first bytes of a header are here, and its descriptors with them.
            None if !rest.is_empty() && self.arrived.len() <= MAX_DESCRIPTORS => return Ok(None),
            None => return self.nothing_stray(),
        }
        let Some((header, descriptors)) = self.open.take() else {
            return Ok(None);
        };
        let body = rest[..header.body].to_vec();
        self.start += header.body;
        if self.start == self.bytes.len() {
            // A long frame does not keep its room for as long as the connection lasts.
            (self.bytes, self.start) = (Vec::new(), 0);
        }
        Ok(Some(Frame {
            kind: header.kind,
            request: header.request,
            body,
            descriptors,
        }))
    }

    /// Whether bytes wait that are no whole frame yet.
    pub fn is_mid_frame(&self) -> bool {
        self.open.is_some() || self.start < self.bytes.len()
    }

    /// Bytes that are kept, for the caller's bounds.
    pub fn buffered(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// Descriptors that no frame was returned for yet.
    pub fn held_descriptors(&self) -> usize {
        let open = self.open.as_ref().map_or(0, |(_, descriptors)| descriptors.len());
        open + self.arrived.len()
    }

    /// Forgets what was received, and gives up every descriptor that no frame was returned for.
    pub fn clear(&mut self) -> Vec<F> {
        (self.bytes, self.start) = (Vec::new(), 0);
        let open = self
            .open
            .take()
            .map(|(_, descriptors)| descriptors)
            .unwrap_or_default();
        open.into_iter()
            .chain(self.arrived.drain(..))
            .map(|(_, descriptor)| descriptor)
            .collect()
    }

    fn open_frame(&mut self) -> Result<(), FrameError> {
        let Some(header) = Header::decode(&self.bytes[self.start..])? else {
            return Ok(());
        };
        let arrived = self.arrived.len();
        if arrived < header.descriptors {
            return Err(FrameError::MissingDescriptors {
                announced: header.descriptors,
                arrived,
            });
        }
        self.start += HEADER_BYTES;
        self.open = Some((header, self.arrived.drain(..header.descriptors).collect()));
        Ok(())
    }

    fn nothing_stray(&self) -> Result<Option<Frame<F>>, FrameError> {
        match self.arrived.len() {
            0 => Ok(None),
            stray => Err(FrameError::StrayDescriptors(stray)),
        }
    }
}
