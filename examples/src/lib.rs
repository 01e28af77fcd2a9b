//! What the examples share: a model that is small enough to read, and the command line of an engine.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod bigram;
mod engine;

use std::error::Error;
use std::process::ExitCode;

pub use bigram::{Bigram, ModelError, Quantized, quantize};
pub use engine::{Engine, log_to_stderr};

/// How an example ends: what went wrong is said as its author wrote it, with what to do about it.
pub fn end(result: Result<(), Box<dyn Error>>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
