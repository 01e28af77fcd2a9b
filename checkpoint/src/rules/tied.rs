//! An output head that is the embedding.

use super::{RuleError, tables::Table};
use crate::{Checkpoint, StoredTensor};

/// A name that is only an alias because embedding and head are tied, and what it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tied {
    pub alias: &'static str,
    pub of: &'static str,
}

/// The names by which transformers ties the output head to the embedding.
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// What the configuration ties. Where the checkpoint has both, their bytes have yet to decide.
pub(super) fn by_config(checkpoint: &Checkpoint, table: Option<&Table>) -> Option<Tied> {
    let has = |name: &str| checkpoint.tensors().contains_key(name);
    let (embedding, head) = (has(EMBEDDING), has(HEAD));
    // A model for classification, reward or embedding has no such head at all, whatever its
    // configuration inherits.
    let generates = checkpoint
        .config()
        .architectures
        .iter()
        .any(|name| name.ends_with("ForCausalLM"));
    // An architecture whose default is not known is taken to be tied if it has no head of its own.
    let default = table.map_or(!head, |table| table.tied_by_default);
    let tied = checkpoint.config().tie_word_embeddings.unwrap_or(default);
    match (embedding, head) {
        _ if !tied || !(head || generates) => None,
        (true, _) => Some(Tied {
            alias: HEAD,
            of: EMBEDDING,
        }),
        (false, true) => Some(Tied {
            alias: EMBEDDING,
            of: HEAD,
        }),
        (false, false) => None,
    }
}

/// Whether the two are one tensor: the alias is not stored, or stored with the same bytes. transformers 5
/// and vLLM use a head of its own that is really another, and it is common that a tool leaves a copy.
pub(super) fn is_one(checkpoint: &Checkpoint, tied: &Tied) -> Result<bool, RuleError> {
    let stored = |name: &str| checkpoint.tensors().get(name);
    match (stored(tied.of), stored(tied.alias)) {
        (Some(of), Some(alias)) => same_bytes(checkpoint, of, alias),
        _ => Ok(true),
    }
}

fn same_bytes(checkpoint: &Checkpoint, a: &StoredTensor, b: &StoredTensor) -> Result<bool, RuleError> {
    const BLOCK: u64 = 1 << 20;
    if (a.dtype, &a.shape) != (b.dtype, &b.shape) {
        return Ok(false);
    }
    let read = |of: &StoredTensor, at: u64, block: &mut Vec<u8>| {
        block.resize(BLOCK.min(of.bytes - at) as usize, 0);
        let read = checkpoint.files()[of.file].read_exact_at(block, of.offset + at);
        read.map_err(|error| RuleError::Unreadable {
            what: HEAD,
            why: error.to_string(),
        })
    };
    let (mut left, mut right) = (Vec::new(), Vec::new());
    for at in (0..a.bytes).step_by(BLOCK as usize) {
        read(a, at, &mut left)?;
        read(b, at, &mut right)?;
        if left != right {
            return Ok(false);
        }
    }
    Ok(true)
}
