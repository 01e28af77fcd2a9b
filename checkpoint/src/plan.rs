//! Plans: what each rank of a node will hold, and the one read plan that fills all of them.
//!
//! Everything here follows from [`Sharding`]; how parts are put together was decided there.

use crate::{Held, HeldPart, Piece, Rank, Sharding, StoredTensor};
use std::collections::BTreeMap;
use weightd_core::content::manifest::{ManifestBuilder, ManifestError, Region, TensorSpec};
use weightd_core::content::{DeviceUuid, Dtype, HandleKind, Manifest};
use weightd_core::plan::placement::Placement;
use weightd_core::plan::read::{Fill, Part, ReadPlan, ReadPlanError, Rect, Source};
use weightd_core::plan::region::{RegionLayout, RegionTooLarge};

/// Everything that a node loads, decided before a weight is read. It depends on nothing but the
/// arguments of [`NodePlan::new`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePlan {
    ranks: Vec<RankPlan>,
    read: ReadPlan,
}

/// What one rank will hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPlan {
    /// Which rank.
    pub placement: Placement,
    /// Its tensors, in one region of its device.
    pub manifest: Manifest,
    /// The size of that region, in bytes.
    pub region_bytes: u64,
}

/// Why a node cannot hold a checkpoint as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A rank's tensors are more than a region can hold.
    #[error("rank {rank}: {source}")]
    Region {
        /// The global rank.
        rank: u32,
        /// What did not fit.
        source: RegionTooLarge,
    },
    /// A rank's tensors are no manifest.
    #[error("rank {rank}: {source}")]
    Manifest {
        /// The global rank.
        rank: u32,
        /// What is wrong with it.
        source: ManifestError,
    },
    /// The checkpoint's files are not what their headers say.
    #[error(transparent)]
    Read(#[from] ReadPlanError),
}

impl NodePlan {
    /// Plans the ranks of a node, each with the device that it is on, in the order of their local
    /// ranks. `handle` is how the regions will be handed over.
    ///
    /// # Errors
    /// More than a region or a manifest can hold, or files that are not what their headers say.
    ///
    /// # Panics
    /// When a rank is outside the world.
    pub fn new(
        sharding: &Sharding<'_>,
        ranks: &[(Placement, DeviceUuid)],
        handle: HandleKind,
    ) -> Result<NodePlan, PlanError> {
        let mut work = Work {
            sources: BTreeMap::new(),
            fills: Vec::new(),
        };
        let mut plans = Vec::with_capacity(ranks.len());
        for (local_rank, &(placement, device)) in (0..).zip(ranks) {
            plans.push(work.plan_rank(sharding, placement, device, handle, local_rank)?);
        }
        let files = sharding
            .checkpoint()
            .files()
            .iter()
            .map(|file| file.bytes)
            .collect();
        let regions = plans.iter().map(|plan| plan.region_bytes).collect();
        let sources = work.sources.into_values().collect();
        let read = ReadPlan::new(files, regions, sources, work.fills)?;
        Ok(NodePlan { ranks: plans, read })
    }

    /// The ranks, by local rank.
    pub fn ranks(&self) -> &[RankPlan] {
        &self.ranks
    }

    /// What is read for all of them, from the checkpoint's files in their order.
    pub fn read(&self) -> &ReadPlan {
        &self.read
    }
}

impl Rank {
    /// The rank that is placed.
    pub fn of(placement: &Placement) -> Rank {
        Rank {
            dp: placement.dp_rank,
            pp: placement.pp_rank,
            tp: placement.tp_rank,
        }
    }
}

/// The number of a rank's only region, in its manifest.
pub(crate) const REGION: usize = 0;

/// What is to be done for the ranks that were planned.
struct Work {
    /// By file and offset.
    sources: BTreeMap<(usize, u64), Source>,
    fills: Vec<Fill>,
}

impl Work {
    /// Lays out one rank's region, tensor by tensor in the order in which they are stored, so that
    /// reading and writing both go forward.
    fn plan_rank(
        &mut self,
        sharding: &Sharding<'_>,
        placement: Placement,
        device: DeviceUuid,
        handle: HandleKind,
        local_rank: u32,
    ) -> Result<RankPlan, PlanError> {
        let rank = placement.global_rank;
        let coordinates = Rank::of(&placement);
        let mut layout = RegionLayout::new();
        let mut manifest = ManifestBuilder::new();
        for held in sharding.held(coordinates) {
            let bytes = held.bytes().unwrap_or(u64::MAX);
            let offset = layout
                .place(bytes)
                .map_err(|source| PlanError::Region { rank, source })?;
            self.fill(&held, local_rank, offset);
            list(&mut manifest, &held, REGION, offset);
        }
        manifest.region(Region {
            handle,
            bytes: layout.bytes(),
            device,
            legacy: None,
        });
        for (alias, of) in sharding.aliases(coordinates) {
            manifest.alias(alias, of);
        }
        for (attr, value) in sharding.attrs() {
            manifest.attr(attr, value);
        }
        let manifest = manifest
            .finish()
            .map_err(|source| PlanError::Manifest { rank, source })?;
        Ok(RankPlan {
            placement,
            manifest,
            region_bytes: layout.bytes(),
        })
    }

    /// Plans the writes of a tensor that a rank holds at `offset` of its region.
    fn fill(&mut self, held: &Held<'_>, local_rank: u32, offset: u64) {
        let strides = held.strides();
        let bytes = |dtype: Dtype, elements: u64| dtype.bytes(elements).expect("the rules cut between bytes");
        for part in &held.parts {
            let stored = part.stored.dtype;
            let rows = DestinationRows::of(held, part, |elements| bytes(stored, elements));
            let first = offset + bytes(held.dtype, part.first_element(&strides));
            let cast = |bytes: u64| {
                part.cast
                    .map_or(Some(bytes), |cast| cast.scale(bytes))
                    .expect("it was counted")
            };
            for piece in part.shard.pieces(stored).expect("the rules cut between bytes") {
                let spread = rows.spread(&piece).into_iter().map(|piece| Part {
                    from: piece.from,
                    rank: local_rank,
                    to: first + cast(piece.to),
                    to_pitch: cast(piece.to_pitch),
                    cast: part.cast,
                });
                self.source(part.stored).parts.extend(spread);
            }
        }
        let row = strides.first().copied().unwrap_or(1);
        let zeros = bytes(held.dtype, held.zeros.start * row)..bytes(held.dtype, held.zeros.end * row);
        if !zeros.is_empty() {
            self.fills.push(Fill {
                rank: local_rank,
                offset: offset + zeros.start,
                bytes: zeros.end - zeros.start,
            });
        }
    }

    fn source(&mut self, stored: &StoredTensor) -> &mut Source {
        let new = || Source {
            file: u32::try_from(stored.file).expect("a checkpoint has fewer files"),
            offset: stored.offset,
            bytes: stored.bytes,
            element: (stored.dtype.bits() / 8).max(1),
            parts: Vec::new(),
        };
        self.sources
            .entry((stored.file, stored.offset))
            .or_insert_with(new)
    }
}

/// Lists a tensor at `offset` of a region, and its parts by their own names.
fn list(manifest: &mut ManifestBuilder, held: &Held<'_>, region: usize, offset: u64) {
    let strides = held.strides();
    let mut list = |name: &str, dtype: Dtype, shape: &[u64], strides: &[u64], offset: u64| {
        let spec = TensorSpec {
            kind: held.kind,
            persistent: true,
            dtype,
            shape,
            strides: Some(strides),
            region,
            offset,
        };
        manifest.tensor(name, spec);
    };
    list(held.name, held.dtype, &held.shape, &strides, offset);
    if let Some(name) = held.transposed {
        let swapped = |dims: &[u64]| swap_last_two(dims.to_vec());
        list(
            name,
            held.dtype,
            &swapped(&held.shape),
            &swapped(&strides),
            offset,
        );
    }
    for part in held.parts.iter().filter(|part| part.name != held.name) {
        let first = held.dtype.bytes(part.first_element(&strides));
        let first = first.expect("the rules cut between bytes");
        let strides = &strides[part.indexed()..];
        list(
            part.name,
            held.dtype,
            &part.shard.shape(),
            strides,
            offset + first,
        );
    }
}

fn swap_last_two(mut dims: Vec<u64>) -> Vec<u64> {
    let count = dims.len();
    if count >= 2 {
        dims.swap(count - 2, count - 1);
    }
    dims
}

/// How the packed rows of a part lie in a held tensor, in bytes of the stored type.
#[derive(Clone, Copy, Debug)]
struct DestinationRows {
    width: u64,
    pitch: u64,
}

impl DestinationRows {
    fn of(held: &Held<'_>, part: &HeldPart<'_>, bytes: impl Fn(u64) -> u64) -> DestinationRows {
        let shape = part.shard.shape();
        let inner: u64 = shape.iter().skip(part.dim + 1).product();
        let along = |shape: &[u64], dim: usize| bytes(inner * shape.get(dim).copied().unwrap_or(1));
        DestinationRows {
            width: along(&shape, part.dim),
            pitch: match shape.iter().take(part.dim).product::<u64>() {
                // One row has no distance to others.
                0 | 1 => along(&shape, part.dim),
                _ => along(&held.shape, part.indexed() + part.dim),
            },
        }
    }

    /// A piece of the packed part, where it lies in the held tensor.
    fn spread(&self, piece: &Piece) -> Vec<Piece> {
        let DestinationRows { width, pitch } = *self;
        if width == pitch {
            return vec![*piece];
        }
        let to = |at: u64| at / width * pitch + at % width;
        let Rect {
            start,
            width: bytes,
            rows,
            pitch: from_pitch,
        } = piece.from;
        if rows == 1 && piece.to.is_multiple_of(width) && bytes.is_multiple_of(width) {
            let from = Rect {
                start,
                pitch: width,
                width,
                rows: bytes / width,
            };
            return vec![Piece {
                from,
                to: to(piece.to),
                to_pitch: pitch,
            }];
        }
        if piece.to % width + bytes <= width && piece.to_pitch.is_multiple_of(width) {
            let to_pitch = piece.to_pitch / width * pitch;
            return vec![Piece {
                from: piece.from,
                to: to(piece.to),
                to_pitch,
            }];
        }
        // Rows of the two do not go together: every stretch that is contiguous in both.
        let mut pieces = Vec::new();
        for row in 0..rows {
            let mut done = 0;
            while done < bytes {
                let at = piece.to + row * piece.to_pitch + done;
                let now = (width - at % width).min(bytes - done);
                let from = Rect::range(start + row * from_pitch + done, now);
                pieces.push(Piece {
                    from,
                    to: to(at),
                    to_pitch: now,
                });
                done += now;
            }
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shard;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn spread_pieces_are_the_bytes_of_packed_rows(
            shape in prop::collection::vec(1u64..5, 3), cut in 0usize..3, bounds in prop::collection::vec(0u64..5, 4),
            width in 1u64..9, more in 0u64..5,
        ) {
            let size = shape[cut];
            let range = |a: u64, b: u64| a.min(b).min(size)..a.max(b).min(size);
            let shard = Shard::along(&shape, cut, vec![range(bounds[0], bounds[1]), range(bounds[2], bounds[3])]);
            let rows = DestinationRows { width, pitch: width + more };
            for piece in shard.pieces(Dtype::U8).unwrap() {
                let bytes = |piece: &Piece| {
                    let Piece { from, to, to_pitch } = *piece;
                    let row = move |row: u64| (0..from.width).map(move |byte| (from.start + row * from.pitch + byte, to + row * to_pitch + byte));
                    (0..from.rows).flat_map(row).collect::<Vec<_>>()
                };
                let mut expected: Vec<_> = bytes(&piece);
                for (_, to) in &mut expected {
                    *to = *to / width * (width + more) + *to % width;
                }
                let mut found: Vec<_> = rows.spread(&piece).iter().flat_map(bytes).collect();
                expected.sort();
                found.sort();
                prop_assert_eq!(found, expected);
            }
        }
    }
}
