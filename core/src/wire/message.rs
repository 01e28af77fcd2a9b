//! The messages, as bodies of frames.
//!
//! Decoding reads from a complete, capped slice and must consume all of it. Numbers are
//! little-endian. The first group is public, on a daemon's socket; the second is private to
//! launcher, loader and server.

mod activity;
mod confinement;

pub use activity::{
    Activity, CodeCount, FieldCount, GetActivity, Lease, Leased, MAX_GENERATIONS_LISTED, MAX_LEASES_LISTED,
};
pub use confinement::Confinement;

use super::frame::{Header, MAX_BODY};
use crate::content::manifest::Region;
use crate::content::{DeviceUuid, Difference, Generation, HandleKind, Key, Manifest};
use crate::text::short;
use speedy::{Endianness, Readable, Writable};
use thiserror::Error;

/// Why a body is no message.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MessageError {
    /// A kind that this version does not know.
    #[error("unknown command {0}")]
    UnknownKind(u16),
    /// The message is too long for a frame.
    #[error("a {name} message is too long for a frame: the limit is 65536 bytes")]
    TooLong {
        /// The message's name.
        name: &'static str,
    },
    /// The body does not decode, or is longer than its message.
    #[error("the body of a {name} message is malformed ({bytes} bytes)")]
    Malformed {
        /// The message's name.
        name: &'static str,
        /// The length of the body that was refused.
        bytes: usize,
    },
}

impl MessageError {
    /// What whoever sent the body is told.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            MessageError::UnknownKind(_) => ErrorCode::UnknownCommand,
            MessageError::TooLong { .. } | MessageError::Malformed { .. } => ErrorCode::Malformed,
        }
    }
}

macro_rules! messages {
    ($($(#[$doc:meta])* $number:literal $name:ident),* $(,)?) => {
        /// Every message, by kind.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Message {
            $($(#[$doc])* $name($name),)*
        }

        impl Message {
            /// The kinds of all messages.
            pub const KINDS: &'static [u16] = &[$($number),*];

            /// The number in the frame header.
            pub fn kind(&self) -> u16 {
                match self { $(Message::$name(_) => $number,)* }
            }

            /// The message's name.
            pub fn name(&self) -> &'static str {
                match self { $(Message::$name(_) => stringify!($name),)* }
            }

            /// The body.
            pub fn encode(&self) -> Result<Vec<u8>, MessageError> {
                match self { $(Message::$name(body) => write(stringify!($name), body),)* }
            }

            /// The bytes of its frame, which owns so many descriptors.
            pub fn frame(&self, request: u32, descriptors: usize) -> Result<Vec<u8>, MessageError> {
                let body = self.encode()?;
                let header = Header {
                    kind: self.kind(),
                    request,
                    body: body.len(),
                    descriptors,
                };
                Ok([&header.encode()[..], &body].concat())
            }

            /// Reads the body of a message of this kind.
            pub fn decode(kind: u16, body: &[u8]) -> Result<Message, MessageError> {
                match kind {
                    $($number => read(stringify!($name), body).map(Message::$name),)*
                    unknown => Err(MessageError::UnknownKind(unknown)),
                }
            }
        }

        $(impl From<$name> for Message {
            fn from(body: $name) -> Message { Message::$name(body) }
        })*
    };
}

messages! {
    /// Asks for the content.
    1 GetState,
    /// Turns the connection into a lease or a watch.
    2 Watch,
    /// Asks how many bytes are held.
    3 GetMemory,
    /// Asks to let the content go.
    4 Release,
    /// Hands over content.
    5 Publish,
    /// Says that an import failed.
    6 Report,
    /// Asks what the daemon is and does.
    7 GetStatus,
    /// Asks what the daemon was asked so far, and who leases.
    8 GetActivity,

    /// Answers [`GetState`] with the content.
    33 State,
    /// Answers [`GetState`]: the key differs.
    34 Mismatch,
    /// Answers [`GetState`]: ask again with a digest.
    35 NeedDigest,
    /// Answers [`Watch`].
    36 Watching,
    /// Answers [`GetMemory`].
    37 Memory,
    /// Answers [`Release`].
    38 Released,
    /// Answers [`Publish`].
    39 Published,
    /// Answers [`Report`].
    40 Reported,
    /// Answers [`GetStatus`] on a daemon's socket.
    41 DaemonStatus,
    /// Answers anything that failed.
    42 Failure,
    /// Answers [`GetActivity`].
    43 Activity,

    /// Private: the vault takes the lead of a server.
    65 Lead,
    /// Private: answers [`Lead`].
    66 Leading,
    /// Private: the vault gives the server a daemon to run.
    67 Define,
    /// Private: answers [`Define`].
    68 Defined,
    /// Private: the digest of a daemon's checkpoint is known.
    69 Digest,
    /// Private: asks the server, and through it the launcher, to end.
    70 Stop,
    /// Private: answers [`Stop`].
    71 Stopping,
    /// Private: answers [`GetStatus`] on the control socket.
    72 ServerStatus,
    /// Private: how far the loader is.
    73 Progress,
    /// Private: the loader cannot go on.
    74 LoadFailed,
    /// Private: the vault says that the device lost a daemon's content.
    75 Lost,
    /// Private: a new launcher asks for what a server holds whose launcher is gone, and for its lead.
    76 Adopt,
    /// Private: ends the answer to [`Adopt`]; the server follows.
    77 Adopted,
    /// Private: the lock and the listener of the control socket.
    78 Control,
    /// Private: the loader has read a daemon's weights.
    79 Loaded,
}

fn write<T: Writable<Endianness>>(name: &'static str, body: &T) -> Result<Vec<u8>, MessageError> {
    // Writing to memory fails only when a length does not fit its prefix.
    body.write_to_vec_with_ctx(Endianness::LittleEndian)
        .ok()
        .filter(|bytes| bytes.len() <= MAX_BODY)
        .ok_or(MessageError::TooLong { name })
}

fn read<'a, T: Readable<'a, Endianness>>(name: &'static str, body: &'a [u8]) -> Result<T, MessageError> {
    match T::read_with_length_from_buffer_with_ctx(Endianness::LittleEndian, body) {
        (Ok(message), length) if length == body.len() => Ok(message),
        _ => Err(MessageError::Malformed {
            name,
            bytes: body.len(),
        }),
    }
}

/// Which daemon of a server; private messages carry it, on a public socket the socket says it.
pub type DaemonId = u32;

/// Asks for the content that belongs to this key.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct GetState {
    /// The engine's key. A digest in its checkpoint answers [`NeedDigest`].
    pub key: Key,
    /// Counted, nothing else.
    pub is_reload: bool,
}

/// Makes the connection a lease on a generation, or, without one, a watch of this daemon. It
/// stays silent from then on; its end means that this daemon instance is gone.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Watch {
    /// The generation to lease.
    pub generation: Option<Generation>,
}

/// Asks how many bytes are held.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct GetMemory {}

/// Asks vault and server to let the content go.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Release {
    /// The daemon; ignored on a public socket.
    pub daemon: DaemonId,
    /// The generation that is meant, or any.
    pub generation: Option<Generation>,
}

/// One region, as a frame's descriptor list carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Readable, Writable)]
pub struct RegionInfo {
    /// How it is handed over.
    pub handle: HandleKind,
    /// Its size in bytes.
    pub bytes: u64,
}

/// What a frame with content says of the descriptors behind it: the manifest first, then one for
/// each region.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct ContentInfo {
    /// The size of the manifest in bytes.
    pub manifest_bytes: u64,
    /// The regions, at most 15.
    #[speedy(length_type = u8)]
    pub regions: Vec<RegionInfo>,
    /// Tensors in the manifest, aliases not counted.
    pub tensors: u32,
    /// Aliases in the manifest.
    pub aliases: u32,
    /// Whether the manifest has checksums.
    pub checksums: bool,
}

impl ContentInfo {
    /// Of a manifest, which takes `bytes` bytes.
    pub fn of(manifest: &Manifest, bytes: usize) -> ContentInfo {
        let region = |region: &Region| RegionInfo {
            handle: region.handle,
            bytes: region.bytes,
        };
        ContentInfo {
            manifest_bytes: bytes as u64,
            regions: manifest.regions().iter().map(region).collect(),
            tensors: manifest.tensors().len() as u32,
            aliases: manifest.aliases().len() as u32,
            checksums: manifest.checksums().is_some(),
        }
    }

    /// Whether it lives no longer than its publisher: memory of a legacy CUDA IPC handle is that process's own.
    pub fn is_legacy(&self) -> bool {
        let legacy = |region: &RegionInfo| region.handle == HandleKind::CudaIpc;
        self.regions.iter().any(legacy)
    }

    /// The bytes of all regions.
    pub fn bytes(&self) -> u64 {
        self.regions
            .iter()
            .fold(0, |sum, region| sum.saturating_add(region.bytes))
    }
}

/// What must be there for a publish to replace it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Readable, Writable)]
#[speedy(tag_type = u8)]
pub enum Expects {
    /// Nothing: no content, or content that was released or lost.
    Empty,
    /// Exactly this generation.
    Generation(Generation),
}

/// Hands over content, with the descriptors of manifest and regions.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Publish {
    /// The daemon that it is for.
    pub daemon: DaemonId,
    /// Its generation: named by the vault when it arms a server, by nobody else.
    pub generation: Option<Generation>,
    /// What it replaces.
    pub expects: Expects,
    /// The key that the content was made for.
    pub key: Key,
    /// What the descriptors hold.
    pub content: ContentInfo,
}

/// Says that the engine could not import the content.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Report {
    /// The daemon; ignored on a public socket.
    pub daemon: DaemonId,
    /// The generation that could not be imported.
    pub generation: Generation,
    /// What the import said.
    #[speedy(length_type = u16)]
    pub import_failed: String,
}

/// Asks what the daemon (or, on the control socket, the server) is and does.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct GetStatus {}

/// The content: the descriptors of manifest and regions come with it.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct State {
    /// The content's generation.
    pub generation: Generation,
    /// The device that the regions are on.
    pub device_uuid: DeviceUuid,
    /// What the descriptors hold.
    pub content: ContentInfo,
}

/// The key differs.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Mismatch {
    /// All fields that differ, in the key's order.
    #[speedy(length_type = u16)]
    pub fields: Vec<Difference>,
}

/// Whether the checkpoints are equal takes a digest: compute it and ask again.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct NeedDigest {}

/// The connection is a lease or a watch now.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Watching {}

/// What is held, in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Memory {
    /// The current content.
    pub current: u64,
    /// All generations that have an open lease.
    pub leased: u64,
}

/// The content is let go, in vault and server.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Released {}

/// The content is held.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Published {
    /// The daemon that holds it.
    pub daemon: DaemonId,
    /// Its generation.
    pub generation: Generation,
}

/// The report was heard.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Reported {}

/// What a daemon holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Readable, Writable)]
#[speedy(tag_type = u8)]
pub enum Holds {
    /// Nothing yet.
    Empty,
    /// Content of this generation.
    Content(Generation),
    /// Nothing: this generation was released.
    Released(Generation),
    /// Nothing: the device lost this generation.
    Lost(Generation),
}

/// What a publisher does where the device cannot hold old and new content at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Readable, Writable)]
#[speedy(tag_type = u8)]
pub enum Replace {
    /// It keeps the old content, and fails.
    Keep,
    /// It has the old content released first, and then makes the new.
    DropFirst,
}

/// What a daemon is: the same for its whole life, but for the key where clients may publish.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct DaemonInfo {
    /// The path of its socket.
    #[speedy(length_type = u16)]
    pub socket: String,
    /// Its global rank.
    pub global_rank: u32,
    /// The device that its regions are on.
    pub device_uuid: DeviceUuid,
    /// Whether [`Release`] is refused.
    pub no_release: bool,
    /// Whether clients may [`Publish`], and what that does to the content before. Where they may not, the
    /// content comes from the launcher alone.
    pub publish: Option<Replace>,
    /// The key of the content that it serves. Role and ranks stand in it.
    pub key: Key,
}

/// What a daemon is and does.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct DaemonStatus {
    /// The version of weightd.
    #[speedy(length_type = u8)]
    pub version: String,
    /// The server's process.
    pub pid: u32,
    /// The launcher's process, 0 when there is none.
    pub launcher_pid: u32,
    /// What it is.
    pub info: DaemonInfo,
    /// What it holds.
    pub holds: Holds,
    /// Bytes of the current content.
    pub bytes: u64,
    /// Tensors of the current content, aliases not counted.
    pub tensors: u32,
    /// Aliases of the current content.
    pub aliases: u32,
    /// Whether the current content has checksums, by which it can be proved.
    pub checksums: bool,
    /// Open leases of all generations.
    pub leases: u32,
    /// How many times content was sent.
    pub served: u64,
    /// How many of those were reloads.
    pub reloads: u64,
    /// Seconds since this server started.
    pub uptime_s: u64,
    /// What its server gave up.
    pub confinement: Confinement,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Failure {
    /// The cause as an [`ErrorCode`]; codes that a later minor adds are kept as numbers.
    pub code: u16,
    /// Whether the same request may succeed later.
    pub retryable: bool,
    /// One line for a person.
    #[speedy(length_type = u16)]
    pub message: String,
}

/// The most that is said in words in a message, in bytes.
pub(crate) const MAX_WORDS: usize = 4096;

/// What somebody else says in words, for a person: it is not long, and steers no terminal.
pub(crate) fn words(text: &str) -> String {
    short(text, MAX_WORDS)
}

impl Failure {
    /// What went wrong, for a person: whoever said it, it is not long, and steers no terminal.
    pub fn why(&self) -> String {
        words(&self.message)
    }
}

macro_rules! codes {
    ($($(#[$doc:meta])* $number:literal $name:ident),* $(,)?) => {
        /// The causes of a [`Failure`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum ErrorCode {
            $($(#[$doc])* $name,)*
            /// A code of a later minor version: treated as a daemon error without a known cause.
            Unknown(u16),
        }

        impl ErrorCode {
            /// The number on the wire.
            pub fn number(self) -> u16 {
                match self { $(ErrorCode::$name => $number,)* ErrorCode::Unknown(number) => number }
            }

            /// The cause with this number.
            pub fn from_number(number: u16) -> ErrorCode {
                match number { $($number => ErrorCode::$name,)* unknown => ErrorCode::Unknown(unknown) }
            }
        }
    };
}

codes! {
    /// The peer broke the rules of framing or of a message's body.
    1 Malformed,
    /// A message kind that is not spoken here; the connection stays usable.
    2 UnknownCommand,
    /// A protocol version that is not spoken here.
    3 Version,
    /// A limit on connections or leases is reached.
    4 Busy,
    /// The peer's user may not speak here.
    5 RefusedPeer,
    /// The peer took too long.
    6 Timeout,
    /// Nothing was published yet.
    7 Empty,
    /// The content was released.
    8 Released,
    /// The device lost the content.
    9 Lost,
    /// The daemon's own digest is not ready yet.
    10 DigestPending,
    /// The generation is not the current one.
    11 StaleGeneration,
    /// The request is not allowed here.
    12 NotAllowed,
    /// The descriptors are not what the message says.
    13 BadDescriptors,
    /// Something else was published meanwhile, or the key is not the daemon's.
    14 Conflict,
    /// The launcher ended before it answered: whether it was done is not known.
    15 InDoubt,
    /// A bug in weightd, found while the request was handled.
    16 Internal,
}

/// The vault takes the lead of a server.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Lead {
    /// The launcher's process.
    pub pid: u32,
}

/// The server follows.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Leading {}

/// A daemon to run, with the descriptors of its lock and its listener.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Define {
    /// The number that later messages use for it.
    pub daemon: DaemonId,
    /// What it is.
    pub info: DaemonInfo,
    /// What it says until content is published. With [`Holds::Content`], content of this generation
    /// follows, and nobody is let in before.
    pub holds: Holds,
}

/// The daemon runs.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Defined {
    /// The daemon.
    pub daemon: DaemonId,
}

/// The digest of a daemon's checkpoint. It has no answer.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Digest {
    /// The daemon.
    pub daemon: DaemonId,
    /// BLAKE3 over the checkpoint's bytes.
    pub digest: [u8; 32],
}

/// Asks the server, and through it the launcher, to end.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Stop {}

/// The server, or its launcher, ends; the connection's end says when.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Stopping {}

/// What a server is and does.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct ServerStatus {
    /// The version of weightd.
    #[speedy(length_type = u8)]
    pub version: String,
    /// The server's process.
    pub pid: u32,
    /// The launcher's process, 0 when there is none.
    pub launcher_pid: u32,
    /// How many daemons it runs.
    pub daemons: u32,
    /// Seconds since it started.
    pub uptime_s: u64,
}

/// How far the loader is. It has no answer.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Progress {
    /// The daemon that is being filled.
    pub daemon: DaemonId,
    /// Bytes in place.
    pub done: u64,
    /// Bytes of the whole region.
    pub total: u64,
}

/// The loader has read a daemon's weights, and is about to publish them. It has no answer.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Loaded {
    /// The daemon that they are for.
    pub daemon: DaemonId,
    /// Where they were read.
    #[speedy(length_type = u16)]
    pub checkpoint: String,
    /// Tensors, aliases not counted.
    pub tensors: u32,
    /// Bytes of the region.
    pub bytes: u64,
    /// Bytes that were read from files through the page cache, for all daemons of this load together.
    pub buffered: u64,
    /// Bytes that were read past the page cache.
    pub direct: u64,
    /// How many daemons that are.
    pub daemons: u32,
    /// How long that took, in microseconds.
    pub micros: u64,
    /// How the files were read, for a person.
    #[speedy(length_type = u16)]
    pub path: String,
}

/// The loader cannot go on. It has no answer.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct LoadFailed {
    /// One line for a person.
    #[speedy(length_type = u16)]
    pub message: String,
}

/// The device lost the content: what a daemon holds of this generation is of no use. It has no answer.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Lost {
    /// The daemon.
    pub daemon: DaemonId,
    /// The generation that is lost; where the daemon holds another, nothing happens.
    pub generation: Generation,
}

/// A new launcher asks for what a server holds whose launcher is gone, and for its lead. The answer is
/// what arms a server, the other way: [`Control`], a [`Define`] for each daemon, a [`Publish`] for each
/// content, and [`Adopted`].
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Adopt {
    /// The launcher's process.
    pub pid: u32,
}

/// That was all, and the server follows.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Adopted {
    /// The server's process.
    pub pid: u32,
}

/// The lock and the listener of the control socket, held for whoever adopts. It has no answer.
#[derive(Clone, Debug, PartialEq, Eq, Readable, Writable)]
pub struct Control {
    /// Whether the names of the daemons stay when the server ends without a launcher: copies of their
    /// locks and listeners are kept for the next one.
    pub names_stay: bool,
}
