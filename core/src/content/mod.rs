//! What a daemon serves: the *content* (key, manifest, regions) and the names it goes by.

mod difference;
mod dtype;
mod identity;
mod key;
pub mod manifest;

pub use difference::Difference;
pub use dtype::Dtype;
pub use identity::{DeviceUuid, Generation, HandleKind, Role};
pub use key::{CheckpointId, Comparison, Key, MAX_KEY};
pub use manifest::Manifest;
