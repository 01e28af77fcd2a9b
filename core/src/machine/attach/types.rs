//! What goes into an attach and what comes out of it.

use crate::content::{DeviceUuid, Generation, Role};
use crate::time::{Now, Span};
use crate::wire::message::State;
use thiserror::Error;

/// How weights reach the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The daemon's memory is mapped, read-only.
    #[default]
    ZeroCopy,
    /// Everything is cloned into the engine's own memory, and the daemon is asked to let go.
    Copy,
}

/// What an engine wants of an attach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachOptions {
    /// Mapping or copy.
    pub mode: Mode,
    /// Whether the engine has a disk loader to fall back on.
    pub fallback: bool,
    /// How long a broken connection is retried, and a reply is waited for.
    pub connect_timeout: Span,
    /// Without fallback: how long absence and daemon errors are retried, over all.
    pub state_timeout: Span,
    /// The role that the engine loads for.
    pub role: Role,
    /// The device that the engine runs on; absent means unchecked.
    pub device: Option<DeviceUuid>,
    /// Whether this replaces weights that the engine has. Counted by the daemon, nothing else.
    pub is_reload: bool,
    /// The user that the engine runs as.
    pub uid: u32,
}

impl AttachOptions {
    /// Zero-copy, with fallback, 5 s to connect, 300 s for a state, for a target, any device.
    pub fn new(uid: u32) -> AttachOptions {
        AttachOptions {
            mode: Mode::ZeroCopy,
            fallback: true,
            connect_timeout: Span::secs(5),
            state_timeout: Span::secs(300),
            role: Role::Target,
            device: None,
            is_reload: false,
            uid,
        }
    }
}

/// Why no connection could be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectFailure {
    /// Nobody listens there.
    Absent(String),
    /// The listener's backlog is full.
    Busy,
    /// The socket, or whoever is behind it, is not ours.
    Refused(String),
    /// Anything else.
    Other(String),
}

/// Why an import or a copy failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The device has too little memory.
    OutOfMemory(String),
    /// The manifest or a region is not what it should be.
    Malformed(String),
    /// Anything else.
    Other(String),
}

/// Why the cache cannot serve, by cause. Each says what to do next.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum AttachError {
    #[error("no daemon serves here: {why}; start one with `weightd preload`")]
    Unavailable { why: String },
    #[error("the connection to the daemon broke: {why}; see the daemon's log")]
    Broken { why: String },
    #[error("the daemon serves something else: {} differ; start it and the engine with the same model and options", fields.join(", "))]
    Mismatch { fields: Vec<String> },
    #[error("the daemon holds no content yet: wait for its READY line")]
    Empty,
    #[error(
        "the daemon's content was released: end its launcher (`weightd stop`) and run `weightd preload` again"
    )]
    Released,
    #[error("the device lost the daemon's content: it is loaded afresh, try again")]
    Lost,
    #[error("refused: {why}")]
    RefusedPeer { why: String },
    #[error(
        "the daemon's weights are on device {theirs}, the engine runs on {ours}: give the engine the daemon's device"
    )]
    WrongDevice { theirs: DeviceUuid, ours: DeviceUuid },
    #[error("out of memory: {why}; free memory on the device, or map instead of copying")]
    OutOfMemory { why: String },
    #[error("malformed: {why}; use the same weightd release on both sides")]
    Malformed { why: String },
    #[error("the import failed: {why}")]
    ImportFailed { why: String },
    #[error("the checkpoint's digest could not be computed: {why}")]
    DigestFailed { why: String },
    #[error("no answer within {seconds} s: see the daemon's log")]
    Timeout { seconds: u64 },
    #[error("the daemon cannot serve: {why}")]
    Daemon { code: u16, why: String },
}

/// Content that was received and checked by its descriptors' facts, to be imported.
#[derive(Debug, PartialEq, Eq)]
pub struct Fetched<F> {
    /// What the daemon says of it.
    pub state: State,
    /// The descriptor of the manifest.
    pub manifest: F,
    /// The descriptors of the regions, in order, for those that have one.
    pub regions: Vec<F>,
}

/// How an attach ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The daemon's memory is mapped.
    Mapped {
        /// What is mapped.
        generation: Generation,
        /// Whether the connection is a lease now; keep it open for as long as the mapping.
        leased: bool,
    },
    /// Everything was cloned.
    Copied {
        /// What was cloned.
        generation: Generation,
        /// Whether the daemon said that it let go.
        released: bool,
    },
}

/// What the driver shall do next.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<F> {
    /// Drop the connection, if there is one, make a new one, and report
    /// [`connected`](super::Attach::connected).
    Connect,
    /// Wait until the connection is readable or, with `write`, writable, or until the moment.
    Io {
        /// Whether there is something to send.
        write: bool,
        /// When to call [`step`](super::Attach::step) again, whatever happens.
        until: Now,
    },
    /// Wait.
    Sleep {
        /// Until this moment.
        until: Now,
    },
    /// Compute the checkpoint's digest and report [`digested`](super::Attach::digested). It may take long.
    Digest,
    /// Import what was fetched and report [`imported`](super::Attach::imported).
    Import(Fetched<F>),
    /// Clone what was imported and report [`copied`](super::Attach::copied).
    Copy,
    /// The cache cannot serve: load from disk. The attach is over.
    LoadFromDisk {
        /// Why.
        because: AttachError,
    },
    /// The attach is over.
    Done(Result<Outcome, AttachError>),
}
