//! The load pipeline: executes a node's plan.
//!
//! Workers take the plan's reads in file order. Each reads its chunk once, into a small buffer of
//! its own that stays in the processor's cache, hands it to every rank that needs a part of it,
//! and takes the next. Files are read, never mapped, so one that shrinks meanwhile is an error and
//! no signal. What the page cache has is read from there, anything else from disk past it.

mod direct;
mod path;
mod pipeline;
mod reader;
mod residency;

use crate::checksum::Checksums;
use crate::digest::{CHUNK_BYTES, Hashes};
use crate::{Checkpoint, CheckpointError, NodePlan, RankPlan};
pub use path::PathTaken;
pub(crate) use pipeline::{Pipeline, Read};
use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use weightd_core::content::Manifest;
use weightd_core::content::manifest::ManifestError;
use weightd_core::plan::placement::Placement;
use weightd_core::plan::read::ReadPlan;
use weightd_gpu::{Device, DeviceKind, Export, LaneMemory, MemoryError, Region};

/// How to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// How many threads read and write.
    pub workers: NonZero<usize>,
    /// How many they are at least where most of it has to come from disk: a disk wants more reads in
    /// flight than there are cores, and is idle while all threads write.
    pub cold_workers: NonZero<usize>,
    /// The most that one read takes, in bytes; at least 4 KiB are taken.
    pub chunk_bytes: u64,
    /// Bytes that no rank needs are read along where there are at most this many in a row.
    pub gap_bytes: u64,
    /// Whether other loaders of this machine read the same files at about this time: then all of it
    /// goes through the page cache, so that the disk is read once for all of them.
    pub shared: bool,
    /// Whether the digest is computed from the very bytes that are loaded.
    pub digest: DigestAlong,
    /// Whether the manifests get a checksum for each tensor, taken from the bytes that are loaded.
    pub checksums: bool,
}

/// Whether a load computes the digest along the way. Then every byte is read, also what no rank of this node
/// needs, in chunks of [`CHUNK_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DigestAlong {
    /// It does not.
    Never,
    /// It does where that should cost no time: most of the checkpoint comes from disk, and is read anyway.
    /// (It is taken for granted that a disk is slower than the hash, which makes 2 GB/s or more on a core.)
    WhereFree,
    /// It does.
    Always,
}

impl Default for LoadOptions {
    /// Those of host memory.
    fn default() -> LoadOptions {
        LoadOptions::of(DeviceKind::Cpu)
    }
}

impl LoadOptions {
    /// What was fastest for a kind of device, with one worker for each core.
    ///
    /// Host memory: a chunk is written while it is still in the cache of the core that read it. On 2
    /// cores with files in the page cache, 256 KiB to 4 MiB were equally fast, 128 KiB and 16 MiB 5 %
    /// slower; a second worker saved 15 %, four gained nothing more (`benches/load.rs`).
    ///
    /// CUDA: on an H200 with 16 cores, chunks of 4 MiB reached 97 % of the bus, 1 MiB 75 %, and
    /// 8 MiB 94 %.
    ///
    /// From disk, on 2 cores with a disk of 1.3 GB/s and chunks of 1 MiB: 16 threads were as fast as
    /// reads past the page cache that go nowhere, 8 reached 93 % of that and 2 reached 87 %. From the
    /// page cache 8 threads were a tenth slower than 2 (`benches/cold_load.sh`).
    pub fn of(kind: DeviceKind) -> LoadOptions {
        LoadOptions {
            workers: std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN),
            cold_workers: NonZero::new(16).expect("16 is not 0"),
            chunk_bytes: match kind {
                DeviceKind::Cpu => 1 << 20,
                DeviceKind::Cuda => 4 << 20,
            },
            gap_bytes: 16 << 10,
            shared: false,
            digest: DigestAlong::Never,
            checksums: false,
        }
    }

    /// Memory for the reads of a load with these options, on devices of this kind.
    ///
    /// # Errors
    /// What the system says when there is none.
    pub fn prepare(&self, kind: DeviceKind) -> Result<LaneMemory, MemoryError> {
        let workers = self.workers.max(self.cold_workers).get();
        // Elements that lie across blocks are few bytes.
        let slack = 2 * direct::MOST_ALIGNMENT + 64;
        LaneMemory::prepare(kind, workers, (self.chunk() + slack) as usize)
    }

    fn chunk(&self) -> u64 {
        match self.digest {
            DigestAlong::Always => CHUNK_BYTES,
            _ => self.chunk_bytes.max(4 << 10),
        }
    }
}

/// How far a load has come, or a digest, which has no ranks; another thread may ask at any time.
#[derive(Debug, Default)]
pub struct Progress {
    read: AtomicU64,
    written: Vec<AtomicU64>,
    totals: Vec<u64>,
}

impl Progress {
    /// Of a load of `plan` that has not begun.
    pub fn new(plan: &NodePlan) -> Progress {
        Progress::of(plan.read())
    }

    fn of(plan: &ReadPlan) -> Progress {
        let totals = plan.written().to_vec();
        Progress {
            read: AtomicU64::new(0),
            written: totals.iter().map(|_| AtomicU64::new(0)).collect(),
            totals,
        }
    }

    /// The bytes that a rank has and those that it will have, by local rank.
    pub fn ranks(&self) -> impl Iterator<Item = (u64, u64)> {
        self.written
            .iter()
            .map(|written| written.load(Relaxed))
            .zip(self.totals.iter().copied())
    }

    pub(crate) fn add_read(&self, bytes: u64) {
        self.read.fetch_add(bytes, Relaxed);
    }

    /// The bytes read from files so far.
    pub fn bytes_read(&self) -> u64 {
        self.read.load(Relaxed)
    }
}

/// What a load leaves: nothing of the loader is in it.
#[derive(Debug)]
pub struct Loaded {
    /// The ranks, by local rank.
    pub ranks: Vec<LoadedRank>,
    /// The digest of the checkpoint, where it was computed along the way.
    pub digest: Option<[u8; 32]>,
    /// What it took.
    pub stats: LoadStats,
}

/// The weights of one rank, ready to be published.
#[derive(Debug)]
pub struct LoadedRank {
    /// Which rank.
    pub placement: Placement,
    /// Its tensors.
    pub manifest: Manifest,
    /// The region that they lie in, filled and sealed.
    pub region: Export,
}

/// What a load took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadStats {
    /// Bytes read from files, each byte once whatever the number of ranks.
    pub bytes_read: u64,
    /// Bytes written to regions.
    pub bytes_written: u64,
    /// From the first allocation to the last seal.
    pub duration: Duration,
    /// How the files were read.
    pub path: PathTaken,
}

/// Why a load failed. Nothing of it remains.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file could not be read, or changed meanwhile.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A device did not give or take memory.
    #[error("rank {rank}: {source}")]
    Device {
        /// The global rank.
        rank: u32,
        /// What the device said.
        source: MemoryError,
    },
    /// The regions of all ranks do not fit into the host's memory together.
    #[error("{ranks} ranks together: {source}")]
    Room {
        /// How many ranks this node has.
        ranks: usize,
        /// What they need and what there is.
        source: MemoryError,
    },
    /// A manifest has no room for checksums.
    #[error("with checksums: {0}")]
    Manifest(#[from] ManifestError),
    /// The system gave no thread.
    #[error(
        "cannot start a thread to load with: {source}; raise the limit of processes (ulimit -u, or the container's)"
    )]
    Thread {
        /// What the system said.
        source: io::Error,
    },
    /// There is no memory to read into, or a device did not take it.
    #[error("reading buffers: {source}")]
    Staging {
        /// What the system or the device said.
        source: MemoryError,
    },
}

/// Loads what `plan` says from `checkpoint`, the one it was made from, into new regions on
/// `devices` (by local rank). `memory` is what [`LoadOptions::prepare`] made, where there was time
/// for that before the devices were ready.
///
/// # Panics
/// When there are fewer devices than ranks, or the plan is that of another checkpoint.
pub fn load(
    checkpoint: &Checkpoint,
    plan: &NodePlan,
    devices: &[Device],
    options: &LoadOptions,
    memory: Option<LaneMemory>,
    progress: &Progress,
) -> Result<Loaded, LoadError> {
    let start = Instant::now();
    checkpoint.unchanged()?;
    let (ranks, read) = (plan.ranks(), plan.read());
    let regions = allocate(ranks, devices)?;
    let global_rank = |local: u32| ranks[local as usize].placement.global_rank;
    let summed = ranks.iter().filter(|_| options.checksums);
    let checksums: Vec<Checksums> = summed.map(|plan| Checksums::new(&plan.manifest)).collect();
    let hashes = Hashes::new(checkpoint);
    let pipeline = Pipeline {
        files: checkpoint.files(),
        read,
        devices,
        regions: &regions,
        progress,
        hashes: &hashes,
        checksums: &checksums,
    };
    let Read { path, hashed } = pipeline
        .run(options, memory)
        .map_err(|failure| failure.of(global_rank))?;
    checkpoint.unchanged()?;
    let mut checksums = checksums.into_iter();
    let loaded = |(plan, region): (&RankPlan, Region)| {
        let rank = plan.placement.global_rank;
        let manifest = match checksums.next() {
            None => plan.manifest.clone(),
            Some(sums) => plan.manifest.clone().with_checksums(sums.finish())?,
        };
        let region = region
            .export()
            .map_err(|source| LoadError::Device { rank, source })?;
        Ok(LoadedRank {
            placement: plan.placement,
            manifest,
            region,
        })
    };
    let ranks = ranks
        .iter()
        .zip(regions)
        .map(loaded)
        .collect::<Result<Vec<_>, LoadError>>()?;
    let stats = LoadStats {
        bytes_read: progress.bytes_read(),
        bytes_written: read.written().iter().sum(),
        duration: start.elapsed(),
        path,
    };
    let digest = hashed.then(|| hashes.digest());
    Ok(Loaded { ranks, digest, stats })
}

/// The region of every rank, in the order of the ranks, once there is room for all of them together:
/// running out is an error here and not the kernel's to solve.
fn allocate(ranks: &[RankPlan], devices: &[Device]) -> Result<Vec<Region>, LoadError> {
    assert!(
        devices.len() >= ranks.len(),
        "{} devices for {} ranks",
        devices.len(),
        ranks.len()
    );
    let regions = ranks.iter().map(|plan| plan.region_bytes);
    weightd_gpu::check_room(devices.iter().copied().zip(regions)).map_err(|source| LoadError::Room {
        ranks: ranks.len(),
        source,
    })?;
    let allocate = |(plan, device): (&RankPlan, &Device)| {
        let rank = plan.placement.global_rank;
        device
            .allocate(plan.region_bytes)
            .map_err(|source| LoadError::Device { rank, source })
    };
    ranks.iter().zip(devices).map(allocate).collect()
}

#[cfg(test)]
mod tests;
