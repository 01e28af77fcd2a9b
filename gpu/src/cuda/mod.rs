//! NVIDIA devices, through the CUDA driver, which is looked for when it is first needed.
//!
//! Regions are made by `cuMemCreate` and handed over as POSIX descriptors (CUDA driver API, "Virtual
//! Memory Management"): such memory lives for as long as any process holds the descriptor or a
//! mapping of it.

#![allow(unsafe_code)] // Every call of the driver is one.

mod allocation;
mod context;
mod copy;
mod driver;
mod lane;
pub mod legacy;
mod range;
mod region;
mod touch;

pub use allocation::Allocation;
pub(crate) use context::{Context, memory};
pub(crate) use copy::Span;
pub(crate) use driver::devices;
pub use driver::{CudaError, available};
pub(crate) use lane::{Lane, Staging};
pub(crate) use range::{Range, read};
#[cfg(feature = "testing")]
pub use region::overwrite;
pub(crate) use region::{Region, import};
pub use touch::{Place, Touch};
