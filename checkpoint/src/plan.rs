//! Plans: what each rank of a node will hold, and the one read plan that fills all of them.

use crate::{Checkpoint, RuleError, Sharding};
use weightd_core::content::manifest::{ManifestBuilder, ManifestError, Region, TensorSpec};
use weightd_core::content::{DeviceUuid, HandleKind, Manifest};
use weightd_core::plan::placement::{Parallel, Placement};
use weightd_core::plan::read::{Part, ReadPlan, ReadPlanError, Source};
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
    /// The checkpoint cannot be split like this.
    #[error(transparent)]
    Rule(#[from] RuleError),
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
    pub fn new(
        checkpoint: &Checkpoint,
        parallel: &Parallel,
        ranks: &[(Placement, DeviceUuid)],
        handle: HandleKind,
    ) -> Result<NodePlan, PlanError> {
        let sharding = Sharding::new(checkpoint, parallel)?;
        let mut sources: Vec<Source> = sharding
            .tensors()
            .iter()
            .map(|tensor| source(tensor.stored))
            .collect();
        let mut plans = Vec::with_capacity(ranks.len());
        for (local_rank, &(placement, device)) in (0..).zip(ranks) {
            plans.push(plan_rank(
                &sharding,
                placement,
                device,
                handle,
                local_rank,
                &mut sources,
            )?);
        }
        sources.retain(|source| source.bytes > 0);
        let files = checkpoint.files().iter().map(|file| file.bytes).collect();
        let regions = plans.iter().map(|plan| plan.region_bytes).collect();
        let read = ReadPlan::new(files, regions, sources, Vec::new())?;
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

fn source(stored: &crate::StoredTensor) -> Source {
    Source {
        file: u32::try_from(stored.file).expect("a checkpoint has fewer files"),
        offset: stored.offset,
        bytes: stored.bytes,
        element: (stored.dtype.bits() / 8).max(1),
        parts: Vec::new(),
    }
}

/// Lays out one rank's region, tensor by tensor in the order in which they are stored, so that
/// reading and writing both go forward.
fn plan_rank(
    sharding: &Sharding<'_>,
    placement: Placement,
    device: DeviceUuid,
    handle: HandleKind,
    local_rank: u32,
    sources: &mut [Source],
) -> Result<RankPlan, PlanError> {
    let rank = placement.global_rank;
    let mut layout = RegionLayout::new();
    let mut placed = Vec::with_capacity(sources.len());
    for (tensor, source) in sharding.tensors().iter().zip(sources) {
        let shard = tensor.shard(placement.tp_rank);
        let shape = shard.shape();
        let pieces = shard
            .pieces(tensor.stored.dtype)
            .expect("the rules cut between bytes");
        let bytes = pieces
            .iter()
            .map(|piece| piece.from.width * piece.from.rows)
            .sum();
        let offset = layout
            .place(bytes)
            .map_err(|source| PlanError::Region { rank, source })?;
        source.parts.extend(pieces.iter().map(|piece| Part {
            from: piece.from,
            rank: local_rank,
            to: offset + piece.to,
            to_pitch: piece.to_pitch,
            cast: None,
        }));
        placed.push((shape, offset));
    }

    let mut manifest = ManifestBuilder::new();
    let region = manifest.region(Region {
        handle,
        bytes: layout.bytes(),
        device,
        legacy: None,
    });
    for (tensor, (shape, offset)) in sharding.tensors().iter().zip(&placed) {
        manifest.tensor(
            tensor.name,
            TensorSpec {
                kind: tensor.kind,
                persistent: true,
                dtype: tensor.stored.dtype,
                shape,
                strides: None,
                region,
                offset: *offset,
            },
        );
    }
    for (alias, of) in sharding.aliases() {
        manifest.alias(alias, of);
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
