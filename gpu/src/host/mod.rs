//! Host memory: regions are memfds, sealed when exported; memory of this process alone is anonymous.

mod anonymous;
mod lease;
mod mapped;
mod mapping;
mod memfd;
mod pages;
mod region;
mod resident;
mod room;

pub(crate) use anonymous::Anonymous;
pub use lease::is_open_for_writing;
pub(crate) use mapping::Mapping;
pub use memfd::{read_sealed, sealed};
pub(crate) use pages::Pages;
pub(crate) use region::Region;
pub use resident::resident;
pub use room::check_room;
pub(crate) use room::room_for;
