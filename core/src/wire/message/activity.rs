//! What a daemon was asked, and who leases.

use crate::content::Generation;
use speedy::{Readable, Writable};

/// Asks what the daemon was asked so far, and who leases.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct GetActivity {}

/// What a daemon was asked since this server has it, and who leases what. Content that was sent stands in
/// [`DaemonStatus`](super::DaemonStatus).
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Activity {
    /// How many requests for content were answered with [`NeedDigest`](super::NeedDigest).
    pub need_digest: u64,
    /// How many were answered with [`Mismatch`](super::Mismatch).
    pub mismatches: u64,
    /// In how many of those each field of the key differed, by name; every `extra.NAME` counts as `extra`.
    /// Fields that never differed are left out.
    #[speedy(length_type = u8)]
    pub mismatched: Vec<FieldCount>,
    /// How many failures were answered, by cause; causes that never came up are left out.
    #[speedy(length_type = u8)]
    pub refused: Vec<CodeCount>,
    /// The generations with open leases, at most [`MAX_GENERATIONS_LISTED`], the last of each epoch first.
    #[speedy(length_type = u16)]
    pub generations: Vec<Leased>,
    /// The open leases, at most [`MAX_LEASES_LISTED`].
    #[speedy(length_type = u16)]
    pub leases: Vec<Lease>,
    /// How many more generations have open leases than are listed.
    pub more_generations: u32,
    /// How many more leases are open than are listed.
    pub more_leases: u32,
}

/// The most generations that an [`Activity`] lists.
pub const MAX_GENERATIONS_LISTED: usize = 256;
/// The most leases that an [`Activity`] lists.
pub const MAX_LEASES_LISTED: usize = 2048;

/// How often a field of the key differed.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct FieldCount {
    /// The field's name.
    #[speedy(length_type = u8)]
    pub field: String,
    /// In how many requests.
    pub count: u64,
}

/// How often a cause of a [`Failure`](super::Failure) came up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Readable, Writable)]
pub struct CodeCount {
    /// The cause as an [`ErrorCode`](super::ErrorCode).
    pub code: u16,
    /// How many times.
    pub count: u64,
}

/// The leases of one generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Leased {
    /// The generation.
    pub generation: Generation,
    /// The bytes of its regions.
    pub bytes: u64,
    /// Open leases.
    pub leases: u32,
}

/// One open lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Lease {
    /// Who holds it; 0 for a process that the server does not see.
    pub pid: u32,
    /// What it holds.
    pub generation: Generation,
}
