//! What the driver knows about the other side of a socket, and about a descriptor that it sent.

/// The credentials of a connected peer, as the kernel states them (`SO_PEERCRED`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The peer's process id in our namespace; 0 where the kernel cannot name it.
    pub pid: u32,
    /// The peer's user id in our namespace.
    pub uid: u32,
}

/// The uid that the kernel shows for a user that our namespace does not map
/// (`/proc/sys/kernel/overflowuid`, 65534 unless an administrator changed it).
pub const OVERFLOW_UID: u32 = 65_534;

impl Peer {
    /// Whether this peer may speak with a process of user `ours`: the same uid, and not the
    /// overflow uid, behind which any unmapped user may stand.
    pub fn is_trusted_by(&self, ours: u32) -> bool {
        self.uid == ours && self.uid != OVERFLOW_UID
    }
}

/// What a received descriptor is, read from the kernel and not from the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The file behind the descriptor.
    pub file: FileKind,
    /// Its size in bytes; 0 for a device.
    pub size: u64,
}

/// The kind of file behind a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A memfd (or another shared-memory file that can be sealed).
    Memory {
        /// Sealed against write, shrink, grow and further seals: its bytes can never change.
        sealed: bool,
    },
    /// A character device, which is how the NVIDIA driver exports memory.
    CharDevice {
        /// The device's major number.
        major: u32,
    },
    /// A listening Unix stream socket.
    Listener,
    /// Anything else.
    Other,
}
