//! The fixed header in front of every message.

use thiserror::Error;

/// The first four bytes of every frame.
pub const MAGIC: [u8; 4] = *b"wgtd";
/// The protocol version that this crate speaks. A message's body never changes within a major.
pub const MAJOR: u8 = 1;
/// A minor version only adds message kinds and error codes.
pub const MINOR: u8 = 0;
/// The length of a header in bytes.
pub const HEADER_BYTES: usize = 20;
/// The longest body in bytes.
pub const MAX_BODY: usize = 64 * 1024;
/// The most descriptors that one frame may own.
pub const MAX_DESCRIPTORS: usize = 16;

/// A decoded header. All numbers on the wire are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The message kind; it may be one that we do not know.
    pub kind: u16,
    /// Chosen by the asking side and repeated in the reply.
    pub request: u32,
    /// The length of the body in bytes.
    pub body: usize,
    /// How many descriptors the frame owns.
    pub descriptors: usize,
}

/// What a peer did that no conforming peer does. Each ends its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// The stream does not start with [`MAGIC`].
    #[error(
        "these bytes are no weightd frame: expected it to start with \"wgtd\"; speak the protocol of PROTOCOL.md"
    )]
    Magic,
    /// The peer speaks another major version.
    #[error(
        "protocol version {0} is not spoken here, only {MAJOR}: use the same weightd release on both sides"
    )]
    Version(u8),
    /// The reserved bytes are not zero.
    #[error("the reserved bytes of a frame header are not zero")]
    Reserved,
    /// The body is longer than [`MAX_BODY`].
    #[error("a body of {0} bytes was announced; the limit is {MAX_BODY}")]
    BodyTooLong(u32),
    /// The frame claims more descriptors than [`MAX_DESCRIPTORS`].
    #[error("{0} descriptors were announced for one frame; the limit is {MAX_DESCRIPTORS}")]
    TooManyDescriptors(u16),
    /// Fewer descriptors came than the header claims.
    #[error("a frame announced {announced} descriptors and {arrived} came with it")]
    MissingDescriptors {
        /// What the header says.
        announced: usize,
        /// What came with the frame's first byte.
        arrived: usize,
    },
    /// Descriptors came that no frame owns.
    #[error("{0} descriptors came that no frame announced")]
    StrayDescriptors(usize),
    /// The kernel had to drop descriptors.
    #[error(
        "the kernel dropped descriptors of a message (MSG_CTRUNC): too many were sent, or this process has no room for more: raise the limit of open files (ulimit -n)"
    )]
    Truncated,
}

impl Header {
    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4] = MAJOR;
        bytes[5] = MINOR;
        bytes[6..8].copy_from_slice(&self.kind.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.request.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.body as u32).to_le_bytes());
        bytes[16..18].copy_from_slice(&(self.descriptors as u16).to_le_bytes());
        bytes
    }

    /// Decodes the start of `bytes`; `None` while a header is incomplete.
    ///
    /// A violation is found at the first byte that shows it, so that garbage is refused before
    /// anything is kept of it.
    pub fn decode(bytes: &[u8]) -> Result<Option<Header>, FrameError> {
        let magic = bytes.len().min(MAGIC.len());
        if bytes[..magic] != MAGIC[..magic] {
            return Err(FrameError::Magic);
        }
        if let Some(&major) = bytes.get(4)
            && major != MAJOR
        {
            return Err(FrameError::Version(major));
        }
        let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let u16_at = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let u32_at =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let body = u32_at(12);
        if body as usize > MAX_BODY {
            return Err(FrameError::BodyTooLong(body));
        }
        let descriptors = u16_at(16);
        if usize::from(descriptors) > MAX_DESCRIPTORS {
            return Err(FrameError::TooManyDescriptors(descriptors));
        }
        if u16_at(18) != 0 {
            return Err(FrameError::Reserved);
        }
        Ok(Some(Header {
            kind: u16_at(6),
            request: u32_at(8),
            body: body as usize,
            descriptors: usize::from(descriptors),
        }))
    }
}
