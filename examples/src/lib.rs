//! What the examples share: a model that is small enough to read, and the command line of an engine.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod bigram;
mod engine;

pub use bigram::{Bigram, ModelError, quantize};
pub use engine::{Engine, log_to_stderr};
