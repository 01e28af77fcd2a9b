//! The workers of a load.

use super::path::Counters;
use super::reader::Reader;
use super::{DigestAlong, LoadError, LoadOptions, PathTaken, Progress};
use crate::checksum::Checksums;
use crate::digest::{CHUNK_BYTES, Hashes};
use crate::plan::REGION;
use crate::{CheckpointError, SourceFile};
use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use weightd_core::plan::read::{Block, Copy, ReadPlan};
use weightd_gpu::{Device, Lane, LaneMemory, MemoryError, Region, Rows};

/// What the workers share.
pub(crate) struct Pipeline<'a> {
    pub files: &'a [SourceFile],
    pub read: &'a ReadPlan,
    pub devices: &'a [Device],
    pub regions: &'a [Region],
    pub progress: &'a Progress,
    /// For where every byte of the files is looked at.
    pub hashes: &'a Hashes<'a>,
    /// By local rank, where what is written is to be summed.
    pub checksums: &'a [Checksums],
}

/// What was done.
pub(crate) struct Read {
    pub path: PathTaken,
    /// Whether every block was hashed.
    pub hashed: bool,
}

/// Why a worker stopped.
pub(crate) enum Failure {
    Read(CheckpointError),
    /// By local rank.
    Write(u32, MemoryError),
    Thread(io::Error),
    Lanes(MemoryError),
}

impl Failure {
    pub fn of(self, global_rank: impl Fn(u32) -> u32) -> LoadError {
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
    pub fn run(&self, options: &LoadOptions, memory: Option<LaneMemory>) -> Result<Read, Failure> {
        for fill in self.read.fills() {
            let written = self.regions[fill.rank as usize].zero(fill.offset, fill.bytes);
            written.map_err(|error| Failure::Write(fill.rank, error))?;
            self.progress.written[fill.rank as usize].fetch_add(fill.bytes, Relaxed);
        }
        let readers = self.files.iter().map(|file| Reader::open(file, options.shared));
        let readers: Vec<Reader<'_>> = readers.collect();
        let cold = readers.iter().filter(|reader| reader.is_cold());
        let cold: u64 = cold.map(Reader::bytes).sum();
        let is_cold = cold > self.files.iter().map(|file| file.bytes).sum::<u64>() / 2;
        let hashed = match options.digest {
            DigestAlong::Never => false,
            DigestAlong::WhereFree => is_cold && self.reads_most(options.chunk(), options.gap_bytes),
            DigestAlong::Always => true,
        };
        let chunk_bytes = if hashed { CHUNK_BYTES } else { options.chunk() };
        let reads = Mutex::new(self.reads(hashed, chunk_bytes, options.gap_bytes));
        let workers = match is_cold {
            true => options.workers.max(options.cold_workers),
            false => options.workers,
        };
        // None is started for nothing.
        let most = NonZero::new(
            self.files
                .iter()
                .map(|file| file.bytes / chunk_bytes + 1)
                .sum::<u64>() as usize,
        );
        let workers = most.map_or(workers, |most| workers.min(most));
        let slack = readers.iter().map(Reader::slack).max().unwrap_or(0);
        let buffer = (chunk_bytes + self.read.largest_element() + slack) as usize;
        let lanes = Lane::open(self.devices, workers.get(), buffer, memory);
        let taken = Counters::default();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let mut workers = Vec::new();
            let mut result = Ok(());
            for (number, lane) in lanes.map_err(Failure::Lanes)?.into_iter().enumerate() {
                let (reads, stop) = (&reads, &stop);
                let mut worker = Worker {
                    pipeline: self,
                    hashes: hashed.then_some(self.hashes),
                    readers: &readers,
                    taken: &taken,
                    lane,
                    at: 0,
                    cast: Vec::new(),
                };
                let work = move || {
                    let result = worker.work(reads, stop);
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
        })?;
        let path = taken.sum();
        Ok(Read { path, hashed })
    }

    /// Whether at least 19 of 20 bytes are read anyway, so that reading the others too takes no time worth
    /// saving.
    fn reads_most(&self, chunk_bytes: u64, gap_bytes: u64) -> bool {
        let chunks = self.read.chunks(chunk_bytes, gap_bytes);
        let needed: u64 = chunks.map(|chunk| chunk.bytes).sum();
        needed / 19 >= self.read.files().iter().sum::<u64>() / 20
    }

    /// What is read: all there is, or what some rank needs.
    fn reads(&self, all: bool, chunk_bytes: u64, gap_bytes: u64) -> Reads<'_> {
        if all {
            return Box::new(self.read.blocks(chunk_bytes));
        }
        let chunks = self.read.chunks(chunk_bytes, gap_bytes);
        Box::new(chunks.map(|chunk| Block {
            range: chunk.offset..chunk.offset + chunk.bytes,
            chunk,
        }))
    }
}

/// In file order.
type Reads<'a> = Box<dyn Iterator<Item = Block> + Send + 'a>;

/// One thread's way from files to regions.
struct Worker<'a> {
    pipeline: &'a Pipeline<'a>,
    hashes: Option<&'a Hashes<'a>>,
    /// By file.
    readers: &'a [Reader<'a>],
    taken: &'a Counters,
    /// Holds the chunk.
    lane: Lane,
    /// Where in the lane's buffer the chunk starts.
    at: usize,
    /// A copy's rows, packed, after their cast.
    cast: Vec<u8>,
}

impl Worker<'_> {
    fn work(&mut self, reads: &Mutex<Reads<'_>>, stop: &AtomicBool) -> Result<(), Failure> {
        let Pipeline { read, progress, .. } = self.pipeline;
        while !stop.load(Relaxed) {
            let block = reads.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(block) = block else { break };
            self.read(&block)?;
            for copy in read.copies(&block.chunk) {
                let bytes = self
                    .write(&copy)
                    .map_err(|error| Failure::Write(copy.rank, error))?;
                progress.written[copy.rank as usize].fetch_add(bytes, Relaxed);
            }
        }
        self.lane.finish().map_err(Failure::Lanes)
    }

    fn read(&mut self, block: &Block) -> Result<(), Failure> {
        let buffer = self.lane.next_buffer().map_err(Failure::Lanes)?;
        // No block is larger than the plan was asked for, and the buffer holds as much, an element of the
        // block before it and the slack.
        let range = block.read();
        let bytes = (range.end - range.start) as usize;
        let (at, taken) = self.readers[block.chunk.file as usize]
            .read(range, buffer)
            .map_err(Failure::Read)?;
        self.at = at;
        self.taken.add(taken);
        self.pipeline
            .progress
            .add_read(block.range.end - block.range.start);
        match self.hashes {
            None => Ok(()),
            Some(hashes) => hashes.add(block, &buffer[at..at + bytes]).map_err(Failure::Read),
        }
    }

    /// Gives a rank its part of the chunk, and says how many bytes that are.
    fn write(&mut self, copy: &Copy) -> Result<u64, MemoryError> {
        let region = &self.pipeline.regions[copy.rank as usize];
        let (from, start) = (copy.from, self.at + copy.from.start as usize);
        let width = copy.to_width();
        let rows = |src_pitch: u64| Rows {
            offset: copy.to,
            dst_pitch: copy.to_pitch,
            src_pitch: src_pitch as usize,
            width: width as usize,
            rows: from.rows as usize,
        };
        let sum = |source: &[u8], rows: &Rows| {
            if let Some(checksums) = self.pipeline.checksums.get(copy.rank as usize) {
                checksums.add(REGION, source, rows);
            }
        };
        match copy.cast {
            None => {
                let rows = rows(from.pitch);
                sum(&self.lane.buffer()[start..], &rows);
                match from.rows {
                    1 => self.lane.write(region, copy.to, start..start + width as usize)?,
                    _ => self.lane.write_2d(region, start, rows)?,
                }
            }
            Some(cast) => {
                self.cast.resize((width * from.rows) as usize, 0);
                let read = self.lane.buffer();
                for (row, to) in self.cast.chunks_exact_mut(width as usize).enumerate() {
                    let at = start + row * from.pitch as usize;
                    cast.apply(&read[at..at + from.width as usize], to);
                }
                let rows = rows(width);
                sum(&self.cast, &rows);
                region.write_2d(&self.cast, rows)?;
            }
        }
        Ok(width * from.rows)
    }
}
