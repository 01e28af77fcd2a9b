//! Checking mapped weights against the checkpoint.
//!
//! This shares the sharding rules with the loader and nothing else: no read plan, no region
//! layout, no pipeline. Every row of every shard is read anew and compared.

use crate::{Checkpoint, CheckpointError, RuleError, Shard, Sharding, SourceFile, StoredTensor};
use std::collections::BTreeMap;
use weightd_core::content::Dtype;
use weightd_core::content::manifest::TensorKind;
use weightd_core::plan::placement::Parallel;
use weightd_gpu::{MemoryError, Runs, TensorView, Weights};

/// What was compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Tensors.
    pub tensors: usize,
    /// Further names of them.
    pub aliases: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
}

/// In what mapped weights differ from the checkpoint, or why that cannot be said.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum VerifyError {
    /// The checkpoint cannot be split like this.
    #[error(transparent)]
    Rule(#[from] RuleError),
    /// A file could not be read, or changed meanwhile.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// What is mapped could not be read.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Tensors of the checkpoint are not mapped.
    #[error("{} of the checkpoint's tensors are not mapped, first {:?}", .names.len(), .names[0])]
    Missing { names: Vec<String> },
    /// What is mapped is not all from the checkpoint.
    #[error("{} mapped tensors are not in the checkpoint, first {:?}", .names.len(), .names[0])]
    Unexpected { names: Vec<String> },
    /// Another element type.
    #[error("{tensor} is mapped as {}, the checkpoint has {}", .mapped.name(), .stored.name())]
    Dtype {
        tensor: String,
        mapped: Dtype,
        stored: Dtype,
    },
    /// Another shape than this rank's.
    #[error("{tensor} is mapped with shape {mapped:?}, this rank's is {expected:?}")]
    Shape {
        tensor: String,
        mapped: Vec<u64>,
        expected: Vec<u64>,
    },
    /// A parameter mapped as a buffer, or the reverse.
    #[error("{tensor} is mapped as a {mapped:?} and is a {expected:?}")]
    Kind {
        tensor: String,
        mapped: TensorKind,
        expected: TensorKind,
    },
    /// Other bytes.
    #[error(
        "{tensor} differs from {file} at byte {at} of the shard: mapped {mapped:#04x}, stored {stored:#04x}"
    )]
    Differs {
        tensor: String,
        file: String,
        at: u64,
        mapped: u8,
        stored: u8,
    },
    /// An alias that does not share its tensor's memory.
    #[error("{alias} is not mapped at the address of {of}, which it stands for")]
    NotAliased { alias: String, of: String },
}

/// Compares everything that is mapped for tensor parallel rank `tp_rank` with what `checkpoint`
/// holds for it: names, types, shapes, every byte, and that aliases share their tensor's memory.
pub fn verify(
    checkpoint: &Checkpoint,
    parallel: &Parallel,
    tp_rank: u32,
    weights: &Weights,
) -> Result<Verified, VerifyError> {
    checkpoint.unchanged()?;
    let sharding = Sharding::new(checkpoint, parallel)?;
    let mut mapped: BTreeMap<&str, TensorView<'_>> =
        weights.tensors().map(|view| (view.name, view)).collect();
    let mut missing = Vec::new();
    let mut verified = Verified {
        tensors: 0,
        aliases: 0,
        bytes: 0,
    };
    for tensor in sharding.tensors() {
        let Some(view) = mapped.remove(tensor.name) else {
            missing.push(tensor.name.to_owned());
            continue;
        };
        if view.kind != tensor.kind {
            let (mapped, expected) = (view.kind, tensor.kind);
            return Err(VerifyError::Kind {
                tensor: tensor.name.to_owned(),
                mapped,
                expected,
            });
        }
        let file = &checkpoint.files()[tensor.stored.file];
        verified.bytes += compare(tensor.name, &view, tensor.stored, file, &tensor.shard(tp_rank))?;
        verified.tensors += 1;
    }
    let mut aliases: BTreeMap<&str, TensorView<'_>> = weights.aliases().collect();
    for (alias, of) in sharding.aliases() {
        let Some(view) = aliases.remove(alias) else {
            missing.push((*alias).to_owned());
            continue;
        };
        let same = weights.get(of).is_some_and(|of| of.address() == view.address());
        if !same {
            return Err(VerifyError::NotAliased {
                alias: (*alias).to_owned(),
                of: (*of).to_owned(),
            });
        }
        verified.aliases += 1;
    }
    if !missing.is_empty() {
        return Err(VerifyError::Missing { names: missing });
    }
    let unexpected: Vec<String> = mapped
        .into_keys()
        .chain(aliases.into_keys())
        .map(str::to_owned)
        .collect();
    if !unexpected.is_empty() {
        return Err(VerifyError::Unexpected { names: unexpected });
    }
    checkpoint.unchanged()?;
    Ok(verified)
}

/// The most that is read at once, in bytes.
const BLOCK: u64 = 1 << 20;

/// Compares one tensor, and says how many bytes it has.
fn compare(
    name: &str,
    view: &TensorView<'_>,
    stored: &StoredTensor,
    file: &SourceFile,
    shard: &Shard,
) -> Result<u64, VerifyError> {
    let tensor = || name.to_owned();
    if view.dtype != stored.dtype {
        return Err(VerifyError::Dtype {
            tensor: tensor(),
            mapped: view.dtype,
            stored: stored.dtype,
        });
    }
    let expected = shard.shape();
    if view.shape != expected {
        return Err(VerifyError::Shape {
            tensor: tensor(),
            mapped: view.shape.to_vec(),
            expected,
        });
    }
    // Both in row-major order of the shard; so they have equally many bytes.
    let memory = view.fetch()?;
    let mut mapped = Mapped {
        runs: view.runs(&memory),
        rest: &[],
    };
    let mut block = Vec::new();
    let mut done = 0;
    for row in shard.rows() {
        // The rules cut between bytes, also where an element takes less than one.
        let byte = |element: u64| stored.offset + element * stored.dtype.bits() / 8;
        let (mut at, end) = (byte(row.start), byte(row.end));
        while at < end {
            let bytes = BLOCK.min(end - at);
            block.resize(bytes as usize, 0);
            file.read_exact_at(&mut block, at)?;
            if let Some((offset, mapped, stored)) = mapped.differs(&block) {
                let (at, file) = (done + offset, file.path.display().to_string());
                return Err(VerifyError::Differs {
                    tensor: tensor(),
                    file,
                    at,
                    mapped,
                    stored,
                });
            }
            at += bytes;
            done += bytes;
        }
    }
    Ok(done)
}

/// A tensor's bytes in row-major order, wherever they lie.
struct Mapped<'a> {
    runs: Runs<'a>,
    rest: &'a [u8],
}

impl Mapped<'_> {
    /// Takes as many bytes as there are in `stored`; the first that differs with its position.
    fn differs(&mut self, stored: &[u8]) -> Option<(u64, u8, u8)> {
        let mut done = 0;
        while done < stored.len() {
            if self.rest.is_empty() {
                self.rest = self.runs.next().expect("the shape was compared");
            }
            let (now, later) = self.rest.split_at(self.rest.len().min(stored.len() - done));
            let expected = &stored[done..done + now.len()];
            if now != expected {
                let at = now.iter().zip(expected).position(|(a, b)| a != b)?;
                return Some(((done + at) as u64, now[at], expected[at]));
            }
            self.rest = later;
            done += now.len();
        }
        None
    }
}
