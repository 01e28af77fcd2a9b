//! The blocking runtime of weightd: drivers of the core's machines on mio, and what a synchronous
//! engine or daemon needs on top of them.
//!
//! * [`driver`]: drives a machine with many connections (a server, a vault); never blocks.
//! * [`client`]: drives one attach, and the blocking [`client::attach`] on it.
//! * [`renewal`]: drives the leasing of a generation once more, when its daemon is gone.
//! * [`request`]: one question to a daemon, and its answer.
//! * [`adopt`]: adopting a server whose launcher is gone.
//! * [`channel`]: a loader's side of its channel to the launcher.
//! * [`serve`]: the blocking loop of a server.
//!
//! A driver moves bytes and descriptors, and waits. It decides nothing: every time-out, retry and
//! limit is a machine's.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod adopt;
pub mod channel;
pub mod client;
mod clock;
pub mod driver;
mod line;
mod reaper;
pub mod renewal;
pub mod request;
pub mod serve;

pub use clock::Clock;

/// The README's example, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
