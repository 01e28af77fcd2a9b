//! The read plan: which bytes of which file go where, decided before anything is read.
//!
//! A plan serves all ranks of a node at once. It is a list of *sources*, byte ranges of files in
//! file order, each with the *parts* of it that ranks hold. A part is a rectangle of bytes that
//! goes into a rectangle of a rank's region: a copy where both are contiguous, a strided copy
//! where one is not, or a cast. What no source fills is zero-filled on request.
//!
//! [`ReadPlan::chunks`] cuts the plan into reads. Each needed byte is in exactly one of them, so
//! whoever executes the plan reads it once and gives it to every rank that wants it
//! ([`ReadPlan::copies`]).

mod blocks;
mod check;
mod chunks;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) mod meaning;
mod rect;
#[cfg(test)]
mod tests;

use super::cast::Cast;
pub use blocks::{Block, Blocks};
pub use check::ReadPlanError;
pub use chunks::{Chunk, Chunks};
pub use rect::Rect;

/// A checked plan: it stays inside its files and regions, and writes no byte twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadPlan {
    files: Vec<u64>,
    regions: Vec<u64>,
    sources: Vec<Source>,
    fills: Vec<Fill>,
    written: Vec<u64>,
}

/// A range of a file (usually one stored tensor), and what becomes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Which of the plan's files.
    pub file: u32,
    /// The first byte, from the start of the file.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
    /// The bytes of one element: reads never end inside one. 1 where that does not matter.
    pub element: u64,
    /// The parts of it that go somewhere. One byte may go to several ranks, or to none.
    pub parts: Vec<Part>,
}

/// A rectangle of a source that goes to a place in one rank's region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// What is read; its start counts from the start of the source.
    pub from: Rect,
    /// Whose region is written, by local rank.
    pub rank: u32,
    /// Where in the region the first row goes.
    pub to: u64,
    /// The distance between rows in the region, in bytes.
    pub to_pitch: u64,
    /// How elements change on the way; `None` copies them.
    pub cast: Option<Cast>,
}

/// A range of a rank's region that becomes zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Whose region, by local rank.
    pub rank: u32,
    /// The first byte, from the start of the region.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// What is to be done with a piece of a chunk once it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The bytes to take; the start counts from the start of the chunk.
    pub from: Rect,
    /// Whose region is written, by local rank.
    pub rank: u32,
    /// Where in the region the first row goes.
    pub to: u64,
    /// The distance between rows in the region, in bytes.
    pub to_pitch: u64,
    /// How elements change on the way; `None` copies them.
    pub cast: Option<Cast>,
}

impl Copy {
    /// The width of a row in the region, in bytes.
    pub fn to_width(&self) -> u64 {
        written(self.from.width, self.cast)
    }
}

impl ReadPlan {
    /// A plan over `files` (their lengths in bytes) for `regions` (their sizes in bytes, by local
    /// rank). Sources are put in file order.
    pub fn new(
        files: Vec<u64>,
        regions: Vec<u64>,
        mut sources: Vec<Source>,
        fills: Vec<Fill>,
    ) -> Result<ReadPlan, ReadPlanError> {
        sources.sort_by_key(|source| (source.file, source.offset, source.bytes));
        let written = check::check(&files, &regions, &sources, &fills)?;
        Ok(ReadPlan {
            files,
            regions,
            sources,
            fills,
            written,
        })
    }

    /// The lengths of the files, in bytes.
    pub fn files(&self) -> &[u64] {
        &self.files
    }

    /// The sizes of the regions in bytes, by local rank.
    pub fn regions(&self) -> &[u64] {
        &self.regions
    }

    /// The sources in file order.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// What becomes zero.
    pub fn fills(&self) -> &[Fill] {
        &self.fills
    }

    /// How many bytes the plan writes into each region, zeroes included, by local rank.
    pub fn written(&self) -> &[u64] {
        &self.written
    }

    /// The reads of the plan in file order, each of at most `max_bytes` (and at least one element).
    /// A hole of up to `max_gap` bytes that no rank needs is read along, a wider one is left out.
    pub fn chunks(&self, max_bytes: u64, max_gap: u64) -> Chunks<'_> {
        Chunks::new(self, max_bytes, max_gap)
    }

    /// Every byte of the files, in blocks of `block_bytes` from the start of each, the last one shorter:
    /// for whoever has to look at all of them, needed or not.
    pub fn blocks(&self, block_bytes: u64) -> Blocks<'_> {
        Blocks::new(self, block_bytes)
    }

    /// The largest element of any source, in bytes.
    pub fn largest_element(&self) -> u64 {
        self.sources
            .iter()
            .map(|source| source.element)
            .max()
            .unwrap_or(1)
    }

    /// What to do with the bytes of `chunk`, once it is read: a few copies for each part in it.
    pub fn copies(&self, chunk: &Chunk) -> impl Iterator<Item = Copy> {
        let (start, end) = (chunk.offset, chunk.offset + chunk.bytes);
        self.sources[chunk.sources.clone()]
            .iter()
            .flat_map(move |source| {
                // The chunk as the source sees it.
                let range = start.saturating_sub(source.offset)..end - source.offset;
                source.parts.iter().flat_map(move |part| {
                    part.clip(range.start, range.end).map(move |mut copy| {
                        copy.from.start = copy.from.start + source.offset - start;
                        copy
                    })
                })
            })
    }
}

impl Part {
    /// The bytes of the part that lie in `start..end` of its source, as up to three copies: a row
    /// cut short, whole rows, a row cut short. Starts count from the start of the source.
    fn clip(&self, start: u64, end: u64) -> impl Iterator<Item = Copy> {
        let part = *self;
        self.from.clip(start, end).map(move |(row, skip, from)| Copy {
            from,
            rank: part.rank,
            to: part.to + row * part.to_pitch + written(skip, part.cast),
            to_pitch: part.to_pitch,
            cast: part.cast,
        })
    }
}

/// The bytes that `bytes` of a source become. (A checked plan has no part where this overflows.)
fn written(bytes: u64, cast: Option<Cast>) -> u64 {
    match cast {
        Some(cast) => cast.scale(bytes).unwrap_or(u64::MAX),
        None => bytes,
    }
}
