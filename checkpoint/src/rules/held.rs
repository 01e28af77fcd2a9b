//! What one rank holds.

use super::layout::Slot;
use super::{Rank, Sharding};
use crate::{Shard, StoredTensor};
use std::ops::Range;
use weightd_core::content::Dtype;
use weightd_core::content::manifest::TensorKind;
use weightd_core::plan::cast::Cast;

/// A tensor that a rank holds: packed elements in row-major order, put together of parts of stored
/// tensors, or just one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held<'a> {
    /// Its name.
    pub name: &'a str,
    /// Parameter, or one of the buffers that are known by name.
    pub kind: TensorKind,
    /// The element type, maybe another than it is stored in.
    pub dtype: Dtype,
    /// The size of each dimension, outermost first.
    pub shape: Vec<u64>,
    /// What it is made of. No two share an element.
    pub parts: Vec<HeldPart<'a>>,
    /// The indices of dimension 0 that no part fills, and that are zero.
    pub zeros: Range<u64>,
    /// A further name, which means the same elements with the last two dimensions swapped.
    pub transposed: Option<&'a str>,
}

/// The part of a stored tensor that is a part of one that a rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldPart<'a> {
    /// The stored tensor's name.
    pub name: &'a str,
    /// Where it is stored.
    pub stored: &'a StoredTensor,
    /// What of it is held; its shape is the part's.
    pub shard: Shard,
    /// The index of the held tensor's dimension 0, where that counts experts and the part is one's.
    pub index: Option<u64>,
    /// The dimension along which parts are put together, of the dimensions that are left.
    pub dim: usize,
    /// The first index of that dimension.
    pub start: u64,
    /// How elements change; `None` where they do not.
    pub cast: Option<Cast>,
}

impl Held<'_> {
    /// For each dimension, the distance between neighbours, in elements.
    pub fn strides(&self) -> Vec<u64> {
        let mut strides = vec![1; self.shape.len()];
        for dim in (1..self.shape.len()).rev() {
            strides[dim - 1] = strides[dim] * self.shape[dim];
        }
        strides
    }

    /// The size of all elements, in bytes; `None` on overflow.
    pub fn bytes(&self) -> Option<u64> {
        let elements = self
            .shape
            .iter()
            .try_fold(1u64, |product, &size| product.checked_mul(size))?;
        self.dtype.bytes(elements)
    }
}

impl HeldPart<'_> {
    /// How many of the held tensor's outer dimensions the part does not have.
    pub fn indexed(&self) -> usize {
        usize::from(self.index.is_some())
    }

    /// The part's first element, of a held tensor with these strides.
    pub fn first_element(&self, strides: &[u64]) -> u64 {
        let along = strides.get(self.indexed() + self.dim).copied().unwrap_or(1);
        self.index.map_or(0, |index| index * strides[0]) + self.start * along
    }
}

impl Sharding<'_> {
    /// What a rank holds of a slot of its stage; none where that is another rank's expert.
    pub(super) fn hold<'s>(&'s self, slot: &'s Slot<'_>, rank: Rank) -> Option<Held<'s>> {
        let local = slot.experts.and_then(|experts| self.local_experts(experts, rank));
        let mut parts = Vec::with_capacity(slot.parts.len());
        let (mut expert, mut start, mut width) = (None, 0, 0);
        for part in &slot.parts {
            let index = match (part.expert, &local) {
                (Some(expert), Some(local)) => match local.slot_of(expert) {
                    Some(index) => Some(index),
                    None => continue,
                },
                (expert, _) => expert,
            };
            let tensor = &self.tensors[part.tensor];
            let shard = self.shard(tensor, rank);
            if expert != index {
                (expert, start) = (index, 0);
            }
            let shape = shard.shape();
            let size = shape.get(slot.dim).copied().unwrap_or(1);
            parts.push(HeldPart {
                name: tensor.name,
                stored: tensor.stored,
                shard,
                index: index.filter(|_| slot.stacked),
                dim: slot.dim,
                start,
                cast: Cast::new(tensor.stored.dtype, slot.dtype),
            });
            start += size;
            width = start;
        }
        let mut shape = parts.first()?.shard.shape();
        if let Some(size) = shape.get_mut(slot.dim) {
            *size = width;
        }
        if slot.stacked {
            let experts = local.map_or(slot.experts, |local| Some(local.count()));
            shape.insert(0, experts.unwrap_or(1));
        }
        let zeros = match (slot.padded, shape.first().copied()) {
            (Some(padded), Some(filled)) => {
                shape[0] = padded / u64::from(self.options.parallel.tensor);
                filled..shape[0]
            }
            (None, Some(rows)) if slot.on_first_rank && !self.has_slices_first(rank) => {
                parts.clear();
                0..rows
            }
            _ => 0..0,
        };
        Some(Held {
            name: &slot.name,
            kind: if is_buffer(&slot.name) {
                TensorKind::Buffer
            } else {
                TensorKind::Parameter
            },
            dtype: slot.dtype,
            shape,
            parts,
            zeros,
            transposed: slot.transposed.as_deref(),
        })
    }
}

/// Whether models register it as a buffer, by the end of its name.
pub(super) fn is_buffer(name: &str) -> bool {
    const BUFFERS: &[&str] = &[
        "rotary_emb.inv_freq",
        "rotary_emb.cos_cached",
        "rotary_emb.sin_cached",
        "embeddings.position_ids",
    ];
    let ends = |buffer: &&str| {
        let before = name.strip_suffix(*buffer);
        before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
    };
    BUFFERS.iter().any(ends)
}
