//! The wire: fixed frames with [`frame`] headers, [`message`] bodies, and descriptors that ride
//! with the first byte of the frame that owns them. `PROTOCOL.md` is the specification.

pub mod decoder;
pub mod frame;
pub mod message;

pub use decoder::{Decoder, Frame};
pub use frame::{FrameError, HEADER_BYTES, Header};
pub use message::Message;
