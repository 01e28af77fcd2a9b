//! Device memory that outlives its process.
//!
//! The life of a model's memory, each step by whoever holds the value:
//!
//! 1. [`Device::allocate`] gives a [`Region`], which several threads fill.
//! 2. [`Region::export`] ends the filling and gives an [`Export`]: a descriptor that keeps the memory
//!    alive for as long as any process holds it or a mapping of it, and a kind that says what it is.
//! 3. [`Mapping::import`], in any process that was handed the descriptor, maps the memory read-only.
//! 4. [`Weights`] finds the tensors of a [`Manifest`](weightd_core::content::Manifest) in mappings, and
//!    clones into memory of the engine's own what the engine writes or keeps.
//!
//! A device is host memory, where regions are memfds that are sealed when exported, or an NVIDIA GPU,
//! where they are made by `cuMemCreate` ([`cuda`]). What differs is behind these types: a caller passes
//! on the [`HandleKind`](weightd_core::content::HandleKind) and the descriptor as it got them.
//!
//! All `unsafe` code of weightd is in this crate, in the modules that say so.

#![deny(missing_docs)]

pub mod cuda;
mod device;
mod error;
mod host;
mod lane;
mod mapping;
mod owned;
mod region;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing;
mod weights;

pub use device::{Device, DeviceKind, Opened};
pub use error::MemoryError;
pub use host::{check_room, is_open_for_writing, read_sealed, resident, sealed};
pub use lane::{Lane, LaneMemory};
pub use mapping::Mapping;
pub use owned::Owned;
pub use region::{Export, Region, Rows};
pub use weights::{
    Difference, Missing, Module, OverwriteError, Part, Runs, TensorForm, TensorView, Weights, WeightsError,
};
