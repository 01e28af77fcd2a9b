//! The load pipeline: executes a node's plan.
//!
//! Workers take the plan's reads in file order. Each reads its chunk once, into a small buffer of
//! its own that stays in the processor's cache, hands it to every rank that needs a part of it,
//! and takes the next. Files are read, never mapped, so one that shrinks meanwhile is an error and
//! no signal.

use crate::{Checkpoint, CheckpointError, NodePlan, SourceFile};
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use weightd_core::content::Manifest;
use weightd_core::plan::placement::Placement;
use weightd_core::plan::read::{Chunk, Chunks, Copy, ReadPlan};
use weightd_gpu::{Device, Export, MemoryError, Region};

/// How to load. The defaults suit files in the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// How many threads read and write.
    pub workers: NonZero<usize>,
    /// The most that one read takes, in bytes; at least 4 KiB are taken.
    pub chunk_bytes: u64,
    /// Bytes that no rank needs are read along where there are at most this many in a row.
    pub gap_bytes: u64,
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions {
            workers: std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN),
            chunk_bytes: CHUNK_BYTES,
            gap_bytes: 16 << 10,
        }
    }
}

/// The size of a read that was fastest where it was measured; see `benches/load.rs`.
const CHUNK_BYTES: u64 = 1 << 20;

/// How far a load has come; another thread may ask at any time.
#[derive(Debug)]
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
    /// Bytes read from files, each needed byte once whatever the number of ranks.
    pub bytes_read: u64,
    /// Bytes written to regions.
    pub bytes_written: u64,
    /// From the first allocation to the last seal.
    pub duration: Duration,
    /// How the files were read.
    pub path: &'static str,
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
    /// The system gave no thread or no memory to read with.
    #[error("cannot start a loading thread with a buffer of {bytes} bytes: {reason}")]
    Worker {
        /// The size of its buffer.
        bytes: u64,
        /// What the system said.
        reason: String,
    },
}

/// Loads what `plan` says from `checkpoint`, the one it was made from, into new regions on
/// `devices` (by local rank).
///
/// # Panics
/// When there are fewer devices than ranks.
pub fn load(
    checkpoint: &Checkpoint,
    plan: &NodePlan,
    devices: &[Device],
    options: &LoadOptions,
    progress: &Progress,
) -> Result<Loaded, LoadError> {
    let start = Instant::now();
    checkpoint.unchanged()?;
    let (ranks, read) = (plan.ranks(), plan.read());
    let regions = ranks
        .iter()
        .enumerate()
        .map(|(local, rank)| {
            let failed = |source| LoadError::Device {
                rank: rank.placement.global_rank,
                source,
            };
            devices[local].allocate(rank.region_bytes).map_err(failed)
        })
        .collect::<Result<Vec<Region>, LoadError>>()?;
    let global_rank = |local: u32| ranks[local as usize].placement.global_rank;
    let pipeline = Pipeline {
        files: checkpoint.files(),
        read,
        regions: &regions,
        progress,
    };
    pipeline.run(options).map_err(|failure| failure.of(global_rank))?;
    checkpoint.unchanged()?;
    let ranks = ranks
        .iter()
        .zip(regions)
        .map(|(rank, region)| {
            let failed = |source| LoadError::Device {
                rank: rank.placement.global_rank,
                source,
            };
            let region = region.export().map_err(failed)?;
            Ok(LoadedRank {
                placement: rank.placement,
                manifest: rank.manifest.clone(),
                region,
            })
        })
        .collect::<Result<Vec<LoadedRank>, LoadError>>()?;
    let stats = LoadStats {
        bytes_read: progress.bytes_read(),
        bytes_written: read.written().iter().sum(),
        duration: start.elapsed(),
        path: "buffered reads",
    };
    Ok(Loaded { ranks, stats })
}

/// What the workers share.
struct Pipeline<'a> {
    files: &'a [SourceFile],
    read: &'a ReadPlan,
    regions: &'a [Region],
    progress: &'a Progress,
}

/// Why a worker stopped.
enum Failure {
    Read(CheckpointError),
    /// By local rank.
    Write(u32, MemoryError),
    Start(u64, String),
}

impl Failure {
    fn of(self, global_rank: impl Fn(u32) -> u32) -> LoadError {
        match self {
            Failure::Read(error) => error.into(),
            Failure::Write(local, source) => LoadError::Device {
                rank: global_rank(local),
                source,
            },
            Failure::Start(bytes, reason) => LoadError::Worker { bytes, reason },
        }
    }
}

impl Pipeline<'_> {
    /// Fills the regions. After the first failure no worker begins another chunk.
    fn run(&self, options: &LoadOptions) -> Result<(), Failure> {
        for fill in self.read.fills() {
            let written = self.regions[fill.rank as usize].zero(fill.offset, fill.bytes);
            written.map_err(|error| Failure::Write(fill.rank, error))?;
            self.progress.written[fill.rank as usize].fetch_add(fill.bytes, Relaxed);
        }
        let chunks = Mutex::new(
            self.read
                .chunks(options.chunk_bytes.max(4 << 10), options.gap_bytes),
        );
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let mut workers = Vec::new();
            let mut result = Ok(());
            for number in 0..options.workers.get() {
                let work = || {
                    let result = self.work(&chunks, options, &stop);
                    stop.fetch_or(result.is_err(), Relaxed);
                    result
                };
                match std::thread::Builder::new()
                    .name(format!("load-{number}"))
                    .spawn_scoped(scope, work)
                {
                    Ok(worker) => workers.push(worker),
                    // Fewer will do.
                    Err(_) if number > 0 => break,
                    Err(error) => result = Err(Failure::Start(options.chunk_bytes, error.to_string())),
                }
            }
            for worker in workers {
                let ended = worker
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                result = result.and(ended);
            }
            result
        })
    }

    fn work(
        &self,
        chunks: &Mutex<Chunks<'_>>,
        options: &LoadOptions,
        stop: &AtomicBool,
    ) -> Result<(), Failure> {
        let mut worker = Worker {
            pipeline: self,
            read: Vec::new(),
            cast: Vec::new(),
        };
        while !stop.load(Relaxed) {
            let chunk = chunks.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(chunk) = chunk else { break };
            worker.read(&chunk, options.chunk_bytes)?;
            for copy in self.read.copies(&chunk) {
                let bytes = worker
                    .write(&copy)
                    .map_err(|error| Failure::Write(copy.rank, error))?;
                self.progress.written[copy.rank as usize].fetch_add(bytes, Relaxed);
            }
        }
        Ok(())
    }
}

/// One thread's buffers, reused from chunk to chunk.
struct Worker<'a> {
    pipeline: &'a Pipeline<'a>,
    /// The chunk.
    read: Vec<u8>,
    /// A copy's rows, packed, after their cast.
    cast: Vec<u8>,
}

impl Worker<'_> {
    fn read(&mut self, chunk: &Chunk, expected: u64) -> Result<(), Failure> {
        let bytes = usize::try_from(chunk.bytes).expect("a chunk fits memory");
        let start = |reason| Failure::Start(expected, reason);
        let missing = bytes.saturating_sub(self.read.len());
        self.read
            .try_reserve_exact(missing)
            .map_err(|error| start(error.to_string()))?;
        // Grows once, then every chunk fits.
        self.read.resize(bytes.max(self.read.len()), 0);
        let file = &self.pipeline.files[chunk.file as usize];
        file.read_exact_at(&mut self.read[..bytes], chunk.offset)
            .map_err(Failure::Read)?;
        self.pipeline.progress.read.fetch_add(chunk.bytes, Relaxed);
        Ok(())
    }

    /// Gives a rank its part of the chunk, and says how many bytes that are.
    fn write(&mut self, copy: &Copy) -> Result<u64, MemoryError> {
        let region = &self.pipeline.regions[copy.rank as usize];
        let (from, rows) = (copy.from, copy.from.rows);
        let start = from.start as usize;
        let width = copy.to_width();
        let (source, pitch) = match copy.cast {
            None => (&self.read[start..], from.pitch),
            Some(cast) => {
                self.cast.resize((width * rows) as usize, 0);
                for (row, to) in self.cast.chunks_exact_mut(width as usize).enumerate() {
                    let at = start + row * from.pitch as usize;
                    cast.apply(&self.read[at..at + from.width as usize], to);
                }
                (&self.cast[..], width)
            }
        };
        if rows == 1 {
            region.write(copy.to, &source[..width as usize])?;
        } else {
            region.write_2d(
                copy.to,
                copy.to_pitch,
                source,
                pitch as usize,
                width as usize,
                rows as usize,
            )?;
        }
        Ok(width * rows)
    }
}

#[cfg(test)]
mod tests;
