//! Cutting whole files into blocks, for a load that looks at every byte.

use super::{Chunk, ReadPlan, Source};
use std::ops::Range;

/// One read of a load that looks at every byte of its files: a block of a file, and what is copied out
/// of it.
///
/// Where a block ends inside an element, that element belongs to the next block, which is read from
/// there on: up to an element's bytes are read twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// What is copied. It begins where the read does.
    pub chunk: Chunk,
    /// The block, as a range of the file. It ends where the read does.
    pub range: Range<u64>,
}

impl Block {
    /// What is read, as a range of the file.
    pub fn read(&self) -> Range<u64> {
        self.chunk.offset..self.range.end
    }

    /// The bytes of the block before it that are read once more.
    pub fn before(&self) -> Range<u64> {
        self.chunk.offset..self.range.start
    }

    /// The bytes at its end that the next block reads once more.
    pub fn after(&self) -> Range<u64> {
        self.chunk.offset + self.chunk.bytes..self.range.end
    }
}

/// The blocks of a plan's files, in file order; see [`ReadPlan::blocks`].
#[derive(Debug)]
pub struct Blocks<'a> {
    files: &'a [u64],
    sources: &'a [Source],
    block_bytes: u64,
    /// The file of the next block, and where that starts.
    file: u32,
    start: u64,
    /// The first source that ends after that.
    at: usize,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(plan: &'a ReadPlan, block_bytes: u64) -> Blocks<'a> {
        Blocks {
            files: &plan.files,
            sources: &plan.sources,
            block_bytes: block_bytes.max(1),
            file: 0,
            start: 0,
            at: 0,
        }
    }

    /// Where an element starts that lies across `boundary`; else there.
    fn element_across(&self, boundary: u64) -> u64 {
        let across = |source: &&Source| source.offset < boundary && boundary < end_of(source);
        let here = self.sources[self.at..].iter();
        let mut here = here.take_while(|source| (source.file, source.offset) < (self.file, boundary));
        let source = here.find(|source| source.file == self.file && across(source));
        source.map_or(boundary, |source| {
            boundary - (boundary - source.offset) % source.element.max(1)
        })
    }
}

impl Iterator for Blocks<'_> {
    type Item = Block;

    fn next(&mut self) -> Option<Block> {
        let length = loop {
            let length = *self.files.get(self.file as usize)?;
            if self.start < length {
                break length;
            }
            (self.file, self.start) = (self.file + 1, 0);
        };
        let (file, start) = (self.file, self.start);
        let end = start.saturating_add(self.block_bytes).min(length);
        let passed = |source: &Source| source.file < file || (source.file == file && end_of(source) <= start);
        self.at += self.sources[self.at..]
            .iter()
            .take_while(|source| passed(source))
            .count();
        let copied = self.element_across(start)..self.element_across(end);
        let count = self.sources[self.at..]
            .iter()
            .take_while(|source| source.file == file && source.offset < copied.end)
            .count();
        self.start = end;
        Some(Block {
            chunk: Chunk {
                file,
                offset: copied.start,
                bytes: copied.end - copied.start,
                sources: self.at..self.at + count,
            },
            range: start..end,
        })
    }
}

/// A checked plan's sources end inside their files.
fn end_of(source: &Source) -> u64 {
    source.offset + source.bytes
}
