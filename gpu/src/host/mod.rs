//! Host memory: regions are memfds, sealed when exported.

mod mapping;
mod memfd;
mod region;
mod room;

pub(crate) use mapping::Mapping;
pub use memfd::{read_sealed, sealed};
pub(crate) use region::Region;
