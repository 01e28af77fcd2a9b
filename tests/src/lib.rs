//! What tests across crates share: the checkpoints in `data/`, as Hugging Face transformers wrote
//! them.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

use std::path::{Path, PathBuf};

/// The directory of a checkpoint: `llama` (several files) or `qwen3` (one file, tied embedding).
pub fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data").join(name)
}
