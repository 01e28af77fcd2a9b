//! weightd for synchronous engines, and what all runtimes share.
//!
//! An engine makes a [`Loader`] for each of its ranks, and gets its model out of the cache or from its own
//! disk loader, with the reason:
//!
//! ```no_run
//! use std::sync::Arc;
//! use weightd_blocking::{Checkpoint, Device, EngineRank, KeyOptions, Loaded, Loader, LoaderOptions};
//! use weightd_blocking::{Rank, ShardingOptions, Weights};
//!
//! # struct Model;
//! # impl Model {
//! #     fn over(_: Weights) -> Result<Model, String> { Ok(Model) }
//! #     fn read(_: &str) -> Result<Model, std::io::Error> { Ok(Model) }
//! # }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let options: LoaderOptions = r#"{"connect_timeout_s": 2}"#.parse()?;
//! let rank = EngineRank {
//!     device: Device::cuda()?[0],
//!     slot: None,
//!     rank: Rank { dp: 0, pp: 0, tp: 0 },
//!     checkpoint: Arc::new(Checkpoint::open("/models/llama".as_ref())?),
//!     keys: KeyOptions::new(ShardingOptions::default()),
//!     expert_load_balancing: false,
//! };
//! let loader = Loader::new(&options, &rank)?;
//! let loaded = loader.load(Model::over, |_because| Model::read("/models/llama"))?;
//! match &loaded {
//!     Loaded::Mapped { timing, .. } => println!("mapped in {:?}", timing.total()),
//!     Loaded::Copied { generation, .. } => println!("copied generation {generation}"),
//!     Loaded::LoadedFromDisk { because, .. } => eprintln!("not from the cache: {because}"),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! * [`Weights`] are the tensors by name: dtype, shape, strides, and the address on
//!   the device, or bytes where they are in host memory. They are freed when they are dropped.
//! * [`Loader::reload`] changes to what the daemon serves now; [`Loader::external_memory`] is for the budget
//!   of the KV-cache.
//! * A [`Publisher`] hands weights that the engine worked on itself (quantized, packed, fused) to a daemon,
//!   so that the next engine maps them.
//! * [`Lease`] says when a daemon is lost. The engine serves on: its mapping keeps the memory alive.
//! * [`asynchronous`] has the same for async engines, on whatever implements
//!   [`Runtime`](asynchronous::Runtime), as `weightd-tokio` and `weightd-smol` do.
//!
//! Mapped weights are read-only: a kernel that writes to them faults, in that process alone. Clone what you
//! write ([`make_writable`](weightd_gpu::Weights::make_writable)). Do not use sleep modes that free or move them.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod adopt;
mod asking;
pub mod asynchronous;
mod binding;
pub mod channel;
mod clock;
mod contents;
mod dial;
pub mod digest;
pub mod driver;
mod endpoint;
pub mod engine;
mod found;
mod import;
mod keeper;
mod line;
mod loaded;
mod loader;
mod loading;
mod options;
mod poller;
mod publisher;
mod publishing;
mod reaper;
pub mod request;
pub mod serve;
mod task;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing;

pub use clock::Clock;
pub use endpoint::SOCKET_DIR_VARIABLE;
pub use engine::*;
pub use import::map_regions;
pub use loader::Loader;
pub use publisher::Publisher;

/// The README's example, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
