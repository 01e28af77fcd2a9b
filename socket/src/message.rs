//! Bytes and descriptors over a connected socket.

use crate::facts::facts;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use weightd_core::peer::Facts;

/// The most descriptors that one [`send`] takes.
pub const MAX_DESCRIPTORS: usize = 16;

/// Room for more than a sender may send, so that only a peer that breaks the rule, or a full
/// descriptor table of ours, makes the kernel drop some. (Alignment leaves room for two more.)
const ROOM: usize = 2 * MAX_DESCRIPTORS;

/// Writes what fits of `bytes`, and with the first of them all of `descriptors`: after any success,
/// also one that wrote a single byte, they are on their way and must not be sent again.
///
/// Returns the number of bytes written, which may be less than all. Never waits, and raises no
/// SIGPIPE.
pub fn send(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<usize, SendError> {
    if descriptors.len() > MAX_DESCRIPTORS {
        return Err(SendError::TooManyDescriptors {
            count: descriptors.len(),
        });
    }
    if bytes.is_empty() {
        // The kernel would accept it and drop the descriptors without a word.
        return if descriptors.is_empty() {
            Ok(0)
        } else {
            Err(SendError::NothingToCarry)
        };
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(descriptors));
        assert!(fits, "the control buffer is made for MAX_DESCRIPTORS");
    }
    loop {
        match sendmsg(
            &socket,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        ) {
            Ok(written) => return Ok(written),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => return Err(SendError::WouldBlock),
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(SendError::Closed),
            Err(Errno::TOOMANYREFS) => return Err(SendError::TooManyInFlight),
            Err(errno) => return Err(SendError::Io(errno.into())),
        }
    }
}

/// Reads what is there, up to the size of `buffer`, which must not be empty.
///
/// Descriptors are close-on-exec and are appended to `descriptors`, each with what it is: those of
/// one message, and at most 34 per call. They arrive with the first byte that they were sent with,
/// at the latest. Never waits. A short read does not mean that no more is there.
pub fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    descriptors: &mut Vec<(Facts, OwnedFd)>,
) -> Result<Received, ReceiveError> {
    assert!(!buffer.is_empty(), "an empty read cannot be told from the end");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ROOM))];
    loop {
        // Dropping it closes what was received and not taken out.
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Ok(message) => {
                for item in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(received) = item {
                        descriptors.extend(received.map(|descriptor| (facts(&descriptor), descriptor)));
                    }
                }
                let truncated = message.flags.contains(ReturnFlags::CTRUNC);
                return Ok(Received {
                    bytes: message.bytes,
                    truncated,
                });
            }
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => return Err(ReceiveError::WouldBlock),
            Err(Errno::CONNRESET) => return Err(ReceiveError::Closed),
            Err(errno) => return Err(ReceiveError::Io(errno.into())),
        }
    }
}

/// What one [`receive`] read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes read into the buffer; 0 means that the peer has closed its end.
    pub bytes: usize,
    /// Whether the kernel dropped descriptors (MSG_CTRUNC): the peer sent more than there is room
    /// for, or our descriptor table is full. Which were dropped cannot be known, so the
    /// connection is of no use any more.
    pub truncated: bool,
}

/// Why nothing was sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The peer does not read fast enough: wait until the socket can be written.
    #[error("the peer's queue is full: wait until it has read")]
    WouldBlock,
    /// The peer is gone.
    #[error("the peer has closed the connection")]
    Closed,
    /// Our user has as many descriptors in flight as it may have open files (unix(7),
    /// ETOOMANYREFS), perhaps all of them other processes': try again later.
    #[error(
        "too many descriptors of this user wait to be received by other processes: try again in a moment"
    )]
    TooManyInFlight,
    /// More than one message may carry; nothing was tried.
    #[error("{count} descriptors in one message, and at most {MAX_DESCRIPTORS} may be")]
    TooManyDescriptors {
        /// How many there were.
        count: usize,
    },
    /// Descriptors without a byte to ride on; nothing was tried.
    #[error("descriptors cannot be sent without a byte")]
    NothingToCarry,
    /// A call failed.
    #[error("cannot send: {0}")]
    Io(#[source] io::Error),
}

/// Why nothing was received.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// Nothing is there: wait until the socket can be read.
    #[error("nothing has arrived yet: wait until the socket can be read")]
    WouldBlock,
    /// The peer is gone and left unread what we had sent.
    #[error("the peer has closed the connection without reading all")]
    Closed,
    /// A call failed.
    #[error("cannot receive: {0}")]
    Io(#[source] io::Error),
}
