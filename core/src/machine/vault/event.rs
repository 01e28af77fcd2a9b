//! What a vault tells its launcher.

use crate::content::Generation;
use crate::wire::message::{DaemonId, Loaded};

/// What a vault tells its launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VaultEvent {
    /// The server holds all that the vault holds.
    Armed {
        /// Whether nothing is left to load: every daemon has content, or had it until it was released, or
        /// takes it from whoever publishes.
        complete: bool,
    },
    /// The server is gone, or was given up.
    ServerGone {
        /// What was wrong; empty for a plain end of the connection.
        why: String,
    },
    /// The loader's channel has ended.
    LoaderGone,
    /// How far the loader is with a daemon, in bytes.
    Progress {
        /// The daemon.
        daemon: DaemonId,
        /// Bytes in place.
        done: u64,
        /// Bytes of the whole region.
        total: u64,
    },
    /// The loader has read a daemon's weights; they are stored next.
    Loaded(Loaded),
    /// The loader handed over a daemon's content.
    Stored {
        /// The daemon.
        daemon: DaemonId,
        /// The generation that it got.
        generation: Generation,
    },
    /// A client published a daemon's content.
    Published {
        /// The daemon.
        daemon: DaemonId,
        /// The generation that it got.
        generation: Generation,
        /// What it replaced.
        replaced: Option<Generation>,
        /// Tensors, aliases not counted.
        tensors: u32,
        /// Bytes of all regions.
        bytes: u64,
    },
    /// The loader cannot go on.
    LoadFailed {
        /// One line for a person.
        why: String,
    },
    /// A daemon's content was let go, at an engine's or an operator's wish.
    Released {
        /// The daemon.
        daemon: DaemonId,
        /// The generation that was released.
        generation: Generation,
    },
    /// The device lost a daemon's content, or its publisher took it along.
    Lost {
        /// The daemon.
        daemon: DaemonId,
        /// The generation that is lost.
        generation: Generation,
    },
    /// An engine could not import a daemon's content.
    ImportFailed {
        /// The daemon.
        daemon: DaemonId,
        /// The generation that could not be imported.
        generation: Generation,
        /// What the import said.
        why: String,
    },
    /// An operator asked for the end.
    StopRequested,
}
