//! Checking mapped weights against the checkpoint.
//!
//! This shares the sharding rules with the loader and nothing else: no read plan, no region
//! layout, no pipeline. Every row of every shard is read anew and compared.

use crate::{
    Checkpoint, CheckpointError, Held, HeldPart, Rank, RuleError, Sharding, ShardingOptions, SourceFile,
};
use std::collections::BTreeMap;
use weightd_core::content::Dtype;
use weightd_core::content::manifest::TensorKind;
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
    #[error("{tensor} is mapped as {}, this rank's is {}", .mapped.name(), .expected.name())]
    Dtype {
        tensor: String,
        mapped: Dtype,
        expected: Dtype,
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
        "{tensor} differs from {of} in {file} at byte {at} of the part: mapped {mapped:#04x}, stored {stored:#04x}"
    )]
    Differs {
        tensor: String,
        of: String,
        file: String,
        at: u64,
        mapped: u8,
        stored: u8,
    },
    /// Padding that is not zero.
    #[error("{tensor} is padded with zeros, and byte {at} of those is mapped as {mapped:#04x}")]
    NotZero { tensor: String, at: u64, mapped: u8 },
    /// Other attributes.
    #[error("the mapped attributes (has_own_embed_tokens, has_own_lm_head) are not those of the checkpoint")]
    Attributes,
    /// A part of a fused tensor that lies elsewhere.
    #[error("{part} is not mapped as the part of {of} that it is")]
    NotAPart { part: String, of: String },
    /// An alias that does not share its tensor's memory.
    #[error("{alias} is not mapped at the address of {of}, which it stands for")]
    NotAliased { alias: String, of: String },
}

/// Compares everything that is mapped for `rank` with what `checkpoint` holds for it: names, types,
/// shapes, every byte, and that aliases and parts share their tensor's memory.
pub fn verify(
    checkpoint: &Checkpoint,
    options: &ShardingOptions,
    rank: Rank,
    weights: &Weights,
) -> Result<Verified, VerifyError> {
    checkpoint.unchanged()?;
    let sharding = Sharding::new(checkpoint, options)?;
    let mut mapped = Names::of(weights);
    let mut verified = Verified {
        tensors: 0,
        aliases: 0,
        bytes: 0,
    };
    for held in sharding.held(rank) {
        let Some(view) = mapped.take(held.name) else {
            continue;
        };
        verified.bytes += compare_held(checkpoint, &held, &view)?;
        verified.tensors += 1;
        if let Some(name) = held.transposed
            && let Some(own) = mapped.take(name)
        {
            check_transposed(&own, name, &held, &view)?;
            match own.name == name {
                true => verified.tensors += 1,
                false => verified.aliases += 1,
            }
        }
        for part in held.parts.iter().filter(|part| part.name != held.name) {
            let Some(own) = mapped.take(part.name) else {
                continue;
            };
            with_part(&view, part, |place| check_part(&own, part.name, &held, place))?;
            match own.name == part.name {
                true => verified.tensors += 1,
                false => verified.aliases += 1,
            }
        }
    }
    for (alias, of) in sharding.aliases(rank) {
        let Some(view) = mapped.take(alias) else { continue };
        let same = weights.get(of).is_some_and(|of| is_same(&view, &of));
        if !same {
            return Err(VerifyError::NotAliased {
                alias: alias.to_owned(),
                of: of.to_owned(),
            });
        }
        verified.aliases += 1;
    }
    mapped.nothing_else()?;
    let found: Vec<(&str, bool)> = weights.manifest().attrs().collect();
    let expected: Vec<(&str, bool)> = sharding.attrs().collect();
    if found != expected {
        return Err(VerifyError::Attributes);
    }
    checkpoint.unchanged()?;
    Ok(verified)
}

/// The names of what is mapped, and which of them were asked for.
struct Names<'a> {
    left: BTreeMap<&'a str, TensorView<'a>>,
    missing: Vec<String>,
}

impl<'a> Names<'a> {
    fn of(weights: &'a Weights) -> Names<'a> {
        let tensors = weights.tensors().map(|view| (view.name, view));
        let left = tensors.chain(weights.aliases()).collect();
        Names {
            left,
            missing: Vec::new(),
        }
    }

    fn take(&mut self, name: &str) -> Option<TensorView<'a>> {
        let found = self.left.remove(name);
        if found.is_none() {
            self.missing.push(name.to_owned());
        }
        found
    }

    fn nothing_else(self) -> Result<(), VerifyError> {
        if !self.missing.is_empty() {
            return Err(VerifyError::Missing { names: self.missing });
        }
        let names: Vec<String> = self.left.into_keys().map(str::to_owned).collect();
        match names.is_empty() {
            true => Ok(()),
            false => Err(VerifyError::Unexpected { names }),
        }
    }
}

/// Compares what is mapped as a tensor with the stored tensors that it is made of, and says how many
/// bytes it has.
fn compare_held(checkpoint: &Checkpoint, held: &Held<'_>, view: &TensorView<'_>) -> Result<u64, VerifyError> {
    let tensor = || held.name.to_owned();
    if view.kind != held.kind {
        let (mapped, expected) = (view.kind, held.kind);
        return Err(VerifyError::Kind {
            tensor: tensor(),
            mapped,
            expected,
        });
    }
    if view.dtype != held.dtype {
        let (mapped, expected) = (view.dtype, held.dtype);
        return Err(VerifyError::Dtype {
            tensor: tensor(),
            mapped,
            expected,
        });
    }
    if view.shape != held.shape {
        let (mapped, expected) = (view.shape.to_vec(), held.shape.clone());
        return Err(VerifyError::Shape {
            tensor: tensor(),
            mapped,
            expected,
        });
    }
    let mut bytes = 0;
    for part in &held.parts {
        let file = &checkpoint.files()[part.stored.file];
        bytes += with_part(view, part, |view| compare(held.name, part, file, view))?;
    }
    if !held.zeros.is_empty() {
        bytes += check_zeros(held.name, &view.narrow(0, held.zeros.clone()).view())?;
    }
    Ok(bytes)
}

/// Gives the view of a part of a tensor to `look`.
fn with_part<T>(view: &TensorView<'_>, part: &HeldPart<'_>, look: impl FnOnce(&TensorView<'_>) -> T) -> T {
    let whole = match part.index {
        Some(index) => view.index(index),
        None => *view,
    };
    match part.shard.shape().get(part.dim) {
        Some(size) => look(&whole.narrow(part.dim, part.start..part.start + size).view()),
        None => look(&whole),
    }
}

/// Checks that a part's own name means its place in the tensor.
fn check_part(
    own: &TensorView<'_>,
    name: &str,
    held: &Held<'_>,
    place: &TensorView<'_>,
) -> Result<(), VerifyError> {
    match is_same(own, place) {
        true => Ok(()),
        false => Err(VerifyError::NotAPart {
            part: name.to_owned(),
            of: held.name.to_owned(),
        }),
    }
}

fn is_same(a: &TensorView<'_>, b: &TensorView<'_>) -> bool {
    let listed = (a.kind, a.dtype, a.shape, a.strides) == (b.kind, b.dtype, b.shape, b.strides);
    listed && a.address() == b.address()
}

/// Checks that a further name means the tensor with its last two dimensions swapped.
fn check_transposed(
    own: &TensorView<'_>,
    name: &str,
    held: &Held<'_>,
    view: &TensorView<'_>,
) -> Result<(), VerifyError> {
    let swapped = |a: &[u64], b: &[u64]| match (a.split_last_chunk::<2>(), b.split_last_chunk::<2>()) {
        (Some((outer, [x, y])), Some((of, [u, v]))) => outer == of && (x, y) == (v, u),
        _ => a == b,
    };
    let same = own.kind == view.kind
        && own.dtype == view.dtype
        && swapped(own.shape, view.shape)
        && swapped(own.strides, view.strides)
        && own.address() == view.address();
    match same {
        true => Ok(()),
        false => Err(VerifyError::NotAPart {
            part: name.to_owned(),
            of: held.name.to_owned(),
        }),
    }
}

fn check_zeros(name: &str, view: &TensorView<'_>) -> Result<u64, VerifyError> {
    let memory = view.fetch()?;
    let mut bytes = 0;
    for run in view.runs(&memory) {
        if let Some(at) = run.iter().position(|&byte| byte != 0) {
            let (tensor, at, mapped) = (name.to_owned(), bytes + at as u64, run[at]);
            return Err(VerifyError::NotZero { tensor, at, mapped });
        }
        bytes += run.len() as u64;
    }
    Ok(bytes)
}

/// The most that is read at once, in bytes.
const BLOCK: u64 = 1 << 20;

/// Compares a part with what is stored, and says how many bytes it has.
fn compare(
    name: &str,
    part: &HeldPart<'_>,
    file: &SourceFile,
    view: &TensorView<'_>,
) -> Result<u64, VerifyError> {
    // Both in row-major order of the part; so they have equally many elements.
    let memory = view.fetch()?;
    let mut mapped = Mapped {
        runs: view.runs(&memory),
        rest: &[],
    };
    let stored = part.stored;
    let (mut block, mut cast) = (Vec::new(), Vec::new());
    let mut done = 0;
    for row in part.shard.rows() {
        // The rules cut between bytes, also where an element takes less than one.
        let byte = |element: u64| stored.offset + element * stored.dtype.bits() / 8;
        let (mut at, end) = (byte(row.start), byte(row.end));
        while at < end {
            let bytes = BLOCK.min(end - at);
            block.resize(bytes as usize, 0);
            file.read_exact_at(&mut block, at)?;
            let expected = match part.cast {
                None => &block,
                Some(how) => {
                    cast.resize(how.scale(bytes).expect("a block is small") as usize, 0);
                    how.apply(&block, &mut cast);
                    &cast
                }
            };
            if let Some((offset, mapped, stored)) = mapped.differs(expected) {
                return Err(VerifyError::Differs {
                    tensor: name.to_owned(),
                    of: part.name.to_owned(),
                    file: file.path.display().to_string(),
                    at: done + offset,
                    mapped,
                    stored,
                });
            }
            at += bytes;
            done += expected.len() as u64;
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
