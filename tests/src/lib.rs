//! What tests and benchmarks across crates share: the checkpoints in `data/`, as Hugging Face
//! transformers wrote them, content that is served from the same process, and the runtimes.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod resident;
pub mod runtimes;
pub mod shapes;

pub use resident::{Residence, Resident, Serve, publication};

use std::path::{Path, PathBuf};
use weightd_blocking::{Binding, Endpoint, Loader};
use weightd_checkpoint::{Checkpoint, KeyOptions, Rank, ShardingOptions};
use weightd_core::content::{CheckpointId, Key};
use weightd_core::machine::AttachOptions;

/// The directory of a checkpoint: `llama` (several files) or `qwen3` (one file, tied embedding).
pub fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data").join(name)
}

/// The key of the checkpoint `qwen3` with one rank.
///
/// # Panics
/// When the checkpoint is not what it was.
pub fn key() -> Key {
    let checkpoint = Checkpoint::open(&checkpoint("qwen3")).expect("the checkpoint in data/");
    let rank = Rank { dp: 0, pp: 0, tp: 0 };
    let digest = checkpoint
        .digest(&Default::default(), &Default::default())
        .expect("the digest of the checkpoint in data/");
    // With the digest both sides agree also where the files are too young to be known by their times.
    let identity = CheckpointId {
        digest: Some(digest),
        ..checkpoint.identity()
    };
    let key = KeyOptions::new(ShardingOptions::default()).key(&checkpoint, identity, rank);
    key.expect("a key of the checkpoint in data/")
}

/// The binding of an engine to the daemon behind `socket`, both with the very same files.
///
/// # Panics
/// When the path is too long for a socket.
pub fn binding(socket: &Path, options: AttachOptions, key: &Key) -> Binding {
    let endpoint = Endpoint::socket(socket).expect("a short path");
    let same = || Err("both sides have the same files".to_owned());
    Binding::with(endpoint, options, key.clone(), same)
}

/// The loader of such an engine.
///
/// # Panics
/// When the path is too long for a socket.
pub fn loader(socket: &Path, options: AttachOptions, key: &Key) -> Loader {
    Loader::from(binding(socket, options, key))
}
