//! Safetensors checkpoints: what a directory written by Hugging Face transformers holds, which
//! bytes it consists of, and whose key they get.
//!
//! [`Checkpoint::open`] reads `config.json`, the index and the headers, and nothing else; it
//! checks all of them, so that whoever plans or reads afterwards can trust every offset.
//! [`Checkpoint::identity`] and [`Checkpoint::digest`] say which bytes these are, and
//! [`KeyOptions::key`] makes the key from it, by the same code for launcher and engine.

#![deny(missing_docs)]

mod checksum;
mod config;
mod digest;
mod error;
mod files;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod header;
mod hub;
mod identity;
mod index;
mod json;
mod key;
mod load;
mod open;
mod plan;
mod rules;
mod save;
mod scrub;
mod shard;
mod verify;

pub use config::ModelConfig;
pub use digest::{CHUNK_BYTES, DigestCache, DigestCacheError, digest_from_hex, digest_hex};
pub use error::{CheckpointError, ConfigFault, HeaderFault, IndexFault, TooMuch};
pub use files::{FileStat, FileTime, SourceFile};
pub use header::StoredTensor;
pub use hub::{FoundModel, HubCache, HubError};
pub use key::KeyOptions;
pub use load::{
    DigestAlong, LoadError, LoadOptions, LoadStats, Loaded, LoadedRank, PathTaken, Progress, load,
};
pub use open::Checkpoint;
pub use plan::{NodePlan, PlanError, RankPlan};
pub use rules::{
    Draft, FloatDtype, Held, HeldPart, Layout, ModelPart, Rank, RuleError, Sharding, ShardingOptions, TpPlan,
    TpPlanError, TpPlanFault, UnknownName,
};
pub use save::{SaveError, save};
pub use scrub::{ScrubError, Scrubbed, scrub};
pub use shard::{Piece, Shard};
pub use verify::{Verified, VerifyError, verify};

#[cfg(test)]
mod tests {
    //! Checkpoints for the tests of this crate's modules.

    use crate::files::SourceFile;
    use std::fs::{self, File};
    use std::path::{Path, PathBuf};
    use weightd_core::content::Dtype;

    /// A checkpoint that transformers wrote.
    pub(crate) fn data(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../tests/data")
            .join(name)
    }

    /// A copy of one, to be changed.
    pub(crate) fn copy_of(name: &str) -> tempfile::TempDir {
        let copy = tempfile::tempdir().unwrap();
        for file in open_all(&data(name)) {
            fs::copy(&file.path, copy.path().join(&file.name)).unwrap();
        }
        copy
    }

    /// Writes a safetensors file whose data begins at an odd place.
    pub(crate) fn write_safetensors(path: &Path, tensors: &[(&str, Dtype, &[u64], &[u8])]) {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, dtype, shape, bytes) in tensors {
            let offsets = [data.len(), data.len() + bytes.len()];
            let entry = serde_json::json!({"dtype": dtype.name(), "shape": shape, "data_offsets": offsets});
            header.insert((*name).to_owned(), entry);
            data.extend_from_slice(bytes);
        }
        let mut header = serde_json::Value::from(header).to_string();
        while header.len() % 4 != 1 {
            header.push(' ');
        }
        let length = (header.len() as u64).to_le_bytes();
        fs::write(path, [&length, header.as_bytes(), &data].concat()).unwrap();
    }

    /// All files of a directory, in the order of their names.
    pub(crate) fn open_all(dir: &Path) -> Vec<SourceFile> {
        let fd = File::open(dir).unwrap().into();
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        names
            .iter()
            .map(|name| {
                SourceFile::open(&fd, dir, name.to_str().unwrap())
                    .unwrap()
                    .unwrap()
            })
            .collect()
    }
}
