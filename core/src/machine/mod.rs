//! The state machines: who says what, and when.
//!
//! [`Server`] and [`Vault`] have many connections and are driven through [`Machine`]. All others have
//! one, and speak on it through [`Exchange`]: an engine's [`Attach`], [`Renewal`], [`Query`] and
//! [`Publish`], a loader's [`Handover`], a launcher's [`Adopt`], and [`Ask`] for a single question.
//!
//! # The contract of a [`Machine`]
//!
//! After every input, call [`Machine::poll`] until it returns [`Output::Idle`]. `Idle` is the last
//! output and carries the only deadline: call [`Machine::tick`] when it has passed. Then, for every
//! connection that is interested in writing, send what [`Machine::outgoing`] offers and report it
//! with [`Machine::wrote`].
//!
//! There are three kinds of failure, and they are kept apart: a peer's violation closes that peer
//! ([`Output::Close`]), an error for the caller is a typed outcome, and a bug of this crate panics. A panic
//! while what one peer said is handled goes no further than a machine with many connections: it ends that
//! connection, and says so as an event. Any other panic reaches the caller, and the machine is of no use then.

mod ask;
mod attach;
mod client;
mod contain;
mod descriptors;
mod ends;
mod handover;
mod link;
mod patience;
mod publish;
mod query;
mod reap;
mod renewal;
mod server;
mod vault;

pub use ask::{Ask, AskError};
pub use attach::{
    Attach, AttachError, AttachOptions, AttachStep, ConnectFailure, Fault, Fetched, Mode, Outcome,
};
pub use client::{Client, Inquiry, Step};
#[cfg(feature = "faults")]
pub use contain::faults;
pub use descriptors::{DescriptorError, check as check_descriptors};
pub use ends::Ends;
pub use handover::{Handover, HandoverEvent};
pub use link::Outgoing;
pub use publish::{Filled, Publish, PublishError, PublishStep, Published};
pub use query::Query;
pub use reap::DiscardId;
pub use renewal::{RENEWS_WITHIN, Renewal, Renewed};
pub use server::{Limits, Server, ServerEvent};
pub use vault::{
    Adopt, Follower, Held, InheritError, Inheritance, Inherited, Inventory, MAX_DESCRIPTION, Vault,
    VaultEvent, inventory_names, is_end_name,
};

use crate::peer::{Facts, Peer};
use crate::time::{Now, Span};
use crate::wire::message::DaemonId;

/// How long a driver lets a send rest that the kernel refused because too many descriptors of this
/// user are in flight (`ETOOMANYREFS`); whoever they are for must read them first.
pub const IN_FLIGHT_PAUSE: Span = Span::millis(10);

/// A connection of one machine; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// Where a connection comes from, which decides what it may say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    /// A server's public socket of this daemon.
    Daemon(DaemonId),
    /// A server's control socket.
    Control,
    /// A vault's connection to its server.
    Server,
    /// A vault's channel to its loader.
    Loader,
}

/// What a machine wants done.
#[derive(Debug, PartialEq, Eq)]
pub enum Output<F, E> {
    /// From now on, wait for these on this connection.
    Interest {
        /// The connection.
        conn: ConnId,
        /// Whether to read.
        read: bool,
        /// Whether to write.
        write: bool,
    },
    /// Close this connection; the machine has forgotten it.
    Close {
        /// The connection.
        conn: ConnId,
    },
    /// Accept connections on this daemon's listener from now on, as [`Origin::Daemon`].
    Listen {
        /// The daemon whose socket it is.
        daemon: DaemonId,
        /// The listening socket, with its lock.
        ends: Ends<F>,
    },
    /// Close this descriptor where that may take its time, then report [`Machine::discarded`].
    Discard {
        /// Names it in the report.
        id: DiscardId,
        /// The descriptor.
        descriptor: F,
    },
    /// Something that a person or a launcher wants to know.
    Event(E),
    /// Nothing more until the next input.
    Idle {
        /// When to call [`Machine::tick`], whatever else happens.
        wake_at: Option<Now>,
        /// Whether new connections may be accepted meanwhile.
        accepting: bool,
    },
}

/// A machine with many connections. See the module for the order of calls.
pub trait Machine<F> {
    /// What it tells its owner.
    type Event;

    /// A connection was made. Ids are minted here and never reused.
    fn accept(&mut self, now: Now, origin: Origin, peer: Peer) -> ConnId;

    /// No descriptor was free to accept a connection with.
    fn accept_failed(&mut self, now: Now);

    /// One read returned these bytes and descriptors. `truncated`: the kernel dropped descriptors.
    fn receive(
        &mut self,
        now: Now,
        conn: ConnId,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = (Facts, F)>,
        truncated: bool,
    );

    /// What to send next; `None` when there is nothing.
    fn outgoing(&self, conn: ConnId) -> Option<Outgoing<'_, F>>;

    /// `bytes` of the last [`outgoing`](Machine::outgoing) are sent, and with the first of them
    /// its descriptors.
    fn wrote(&mut self, now: Now, conn: ConnId, bytes: usize);

    /// The peer is gone, or the connection failed.
    fn hangup(&mut self, now: Now, conn: ConnId);

    /// A discarded descriptor is closed.
    fn discarded(&mut self, now: Now, id: DiscardId);

    /// Time has passed.
    fn tick(&mut self, now: Now);

    /// The next thing to do.
    fn poll(&mut self) -> Output<F, Self::Event>;
}

/// A machine with one connection: what moves over it.
pub trait Exchange<F> {
    /// What to send next; `None` when there is nothing.
    fn outgoing(&self) -> Option<Outgoing<'_, F>>;

    /// `bytes` of the last [`outgoing`](Exchange::outgoing) are sent, and with the first of them
    /// its descriptors.
    fn wrote(&mut self, now: Now, bytes: usize);

    /// One read returned these bytes and descriptors. `truncated`: the kernel dropped descriptors.
    fn receive(
        &mut self,
        now: Now,
        bytes: &[u8],
        descriptors: impl IntoIterator<Item = (Facts, F)>,
        truncated: bool,
    );

    /// The connection ended or failed.
    fn hangup(&mut self, now: Now, why: &str);
}
