//! The load pipeline: executes a node's plan.
//!
//! Workers take the plan's reads in file order. Each reads its chunk once, into a small buffer of
//! its own that stays in the processor's cache, hands it to every rank that needs a part of it,
//! and takes the next. Files are read, never mapped, so one that shrinks meanwhile is an error and
//! no signal.

use crate::{Checkpoint, CheckpointError, NodePlan, RankPlan, SourceFile};
use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use weightd_core::content::Manifest;
use weightd_core::plan::placement::Placement;
use weightd_core::plan::read::{Chunk, Chunks, Copy, ReadPlan};
use weightd_gpu::{Device, DeviceKind, Export, Lane, MemoryError, Region, Rows};

/// How to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// How many threads read and write.
    pub workers: NonZero<usize>,
    /// The most that one read takes, in bytes; at least 4 KiB are taken.
    pub chunk_bytes: u64,
    /// Bytes that no rank needs are read along where there are at most this many in a row.
    pub gap_bytes: u64,
}

impl LoadOptions {
    /// What was fastest for a kind of device, with one worker for each core.
    ///
    /// Host memory: a chunk is written while it is still in the cache of the core that read it. On 2
    /// cores with files in the page cache, 256 KiB to 4 MiB were equally fast, 128 KiB and 16 MiB 5 %
    /// slower; a second worker saved 15 %, four gained nothing more (`benches/load.rs`).
    ///
    /// CUDA: on an H200 with 16 cores, chunks of 4 MiB reached 97 % of the bus, 1 MiB 75 %, since each
    /// copy costs a call of the driver; with 8 MiB the buffers no longer stay in the cache.
    pub fn of(kind: DeviceKind) -> LoadOptions {
        LoadOptions {
            workers: std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN),
            chunk_bytes: match kind {
                DeviceKind::Cpu => 1 << 20,
                DeviceKind::Cuda => 4 << 20,
            },
            gap_bytes: 16 << 10,
        }
    }
}

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
    /// The system gave no thread.
    #[error("cannot start a thread to load with: {source}")]
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
/// `devices` (by local rank).
///
/// # Panics
/// When there are fewer devices than ranks, or the plan is that of another checkpoint.
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
    let regions = allocate(ranks, devices)?;
    let global_rank = |local: u32| ranks[local as usize].placement.global_rank;
    let pipeline = Pipeline {
        files: checkpoint.files(),
        read,
        devices,
        regions: &regions,
        progress,
    };
    pipeline.run(options).map_err(|failure| failure.of(global_rank))?;
    checkpoint.unchanged()?;
    let loaded = |(plan, region): (&RankPlan, Region)| {
        let rank = plan.placement.global_rank;
        let region = region
            .export()
            .map_err(|source| LoadError::Device { rank, source })?;
        Ok(LoadedRank {
            placement: plan.placement,
            manifest: plan.manifest.clone(),
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
        path: "buffered reads",
    };
    Ok(Loaded { ranks, stats })
}

/// The region of every rank, in the order of the ranks. One after another, so that each is checked
/// against what the others left, and running out is an error here and not the kernel's to solve.
fn allocate(ranks: &[RankPlan], devices: &[Device]) -> Result<Vec<Region>, LoadError> {
    assert!(
        devices.len() >= ranks.len(),
        "{} devices for {} ranks",
        devices.len(),
        ranks.len()
    );
    let allocate = |(plan, device): (&RankPlan, &Device)| {
        let rank = plan.placement.global_rank;
        device
            .allocate(plan.region_bytes)
            .map_err(|source| LoadError::Device { rank, source })
    };
    ranks.iter().zip(devices).map(allocate).collect()
}

/// What the workers share.
struct Pipeline<'a> {
    files: &'a [SourceFile],
    read: &'a ReadPlan,
    devices: &'a [Device],
    regions: &'a [Region],
    progress: &'a Progress,
}

/// Why a worker stopped.
enum Failure {
    Read(CheckpointError),
    /// By local rank.
    Write(u32, MemoryError),
    Thread(io::Error),
    Lanes(MemoryError),
}

impl Failure {
    fn of(self, global_rank: impl Fn(u32) -> u32) -> LoadError {
        match self {
            Failure::Read(error) => error.into(),
            Failure::Write(local, source) => LoadError::Device {
                rank: global_rank(local),
                source,
            },
            Failure::Thread(source) => LoadError::Thread { source },
            Failure::Lanes(source) => LoadError::Staging { source },
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
        let chunk_bytes = options.chunk_bytes.max(4 << 10);
        let chunks = Mutex::new(self.read.chunks(chunk_bytes, options.gap_bytes));
        let lanes = Lane::open(self.devices, options.workers.get(), chunk_bytes as usize);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let mut workers = Vec::new();
            let mut result = Ok(());
            for (number, lane) in lanes.map_err(Failure::Lanes)?.into_iter().enumerate() {
                let (chunks, stop) = (&chunks, &stop);
                let work = move || {
                    let result = self.work(chunks, lane, stop);
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
                    Err(error) => result = Err(Failure::Thread(error)),
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

    fn work(&self, chunks: &Mutex<Chunks<'_>>, lane: Lane, stop: &AtomicBool) -> Result<(), Failure> {
        let mut worker = Worker {
            pipeline: self,
            lane,
            cast: Vec::new(),
        };
        while !stop.load(Relaxed) {
            let chunk = chunks.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(chunk) = chunk else { break };
            worker.read(&chunk)?;
            for copy in self.read.copies(&chunk) {
                let bytes = worker
                    .write(&copy)
                    .map_err(|error| Failure::Write(copy.rank, error))?;
                self.progress.written[copy.rank as usize].fetch_add(bytes, Relaxed);
            }
        }
        worker.lane.finish().map_err(Failure::Lanes)
    }
}

/// One thread's way from files to regions.
struct Worker<'a> {
    pipeline: &'a Pipeline<'a>,
    /// Holds the chunk.
    lane: Lane,
    /// A copy's rows, packed, after their cast.
    cast: Vec<u8>,
}

impl Worker<'_> {
    fn read(&mut self, chunk: &Chunk) -> Result<(), Failure> {
        let buffer = self.lane.next_buffer().map_err(Failure::Lanes)?;
        let file = &self.pipeline.files[chunk.file as usize];
        // No chunk is larger than the plan was asked for, which is the size of the buffer.
        file.read_exact_at(&mut buffer[..chunk.bytes as usize], chunk.offset)
            .map_err(Failure::Read)?;
        self.pipeline.progress.read.fetch_add(chunk.bytes, Relaxed);
        Ok(())
    }

    /// Gives a rank its part of the chunk, and says how many bytes that are.
    fn write(&mut self, copy: &Copy) -> Result<u64, MemoryError> {
        let region = &self.pipeline.regions[copy.rank as usize];
        let (from, start) = (copy.from, copy.from.start as usize);
        let width = copy.to_width();
        let rows = |src_pitch: u64| Rows {
            offset: copy.to,
            dst_pitch: copy.to_pitch,
            src_pitch: src_pitch as usize,
            width: width as usize,
            rows: from.rows as usize,
        };
        match copy.cast {
            None if from.rows == 1 => {
                self.lane.write(region, copy.to, start..start + width as usize)?;
            }
            None => self.lane.write_2d(region, start, rows(from.pitch))?,
            Some(cast) => {
                self.cast.resize((width * from.rows) as usize, 0);
                let read = self.lane.buffer();
                for (row, to) in self.cast.chunks_exact_mut(width as usize).enumerate() {
                    let at = start + row * from.pitch as usize;
                    cast.apply(&read[at..at + from.width as usize], to);
                }
                region.write_2d(&self.cast, rows(width))?;
            }
        }
        Ok(width * from.rows)
    }
}

#[cfg(test)]
mod tests;
