//! The pure core of weightd: everything that can be decided without touching the machine.
//!
//! This crate does no I/O, reads no clock, no environment and no randomness, and starts no
//! thread. What it needs from outside is handed in ([`time::Now`], descriptors of a generic type
//! `F`, their [`peer::Facts`]); what it wants done is handed out ([`machine::Output`],
//! [`machine::Step`]). So every behaviour of weightd can be tested in virtual time, with integers
//! for descriptors.
//!
//! * [`plan`]: which ranks a node serves, where tensors lie in a region, and which bytes of a
//!   checkpoint go where.
//! * [`content`]: what a daemon serves: key, manifest, regions, generation.
//! * [`wire`]: how it is said: frames and messages (`PROTOCOL.md` is the specification).
//! * [`machine`]: who says what when: `Server`, `Vault`, `Attach`, `Publish`, `Ask`.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod content;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
pub mod machine;
pub mod peer;
pub mod plan;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing;
pub mod text;
pub mod time;
pub mod wire;
