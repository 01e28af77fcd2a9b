//! One file, and the way that each of its ranges is read.

use super::direct::{Direct, Filled};
use super::path::PathTaken;
use super::residency::Residency;
use crate::{CheckpointError, SourceFile};
use std::ops::Range;

/// Reads ranges of a file: what the page cache has from there, anything else from disk past it, so
/// that a load neither waits for the cache to be filled nor drives out what others keep in it.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    source: &'a SourceFile,
    residency: Residency,
    /// Not there when nothing may be read past the cache, or nothing can be.
    direct: Option<Direct>,
}

impl Reader<'_> {
    /// Of a file of which every read goes through the cache if it is `shared`.
    pub fn open(source: &SourceFile, shared: bool) -> Reader<'_> {
        let residency = match shared {
            true => Residency::Unknown,
            false => Residency::of(source),
        };
        let direct = match residency {
            Residency::Memory | Residency::Unknown => None,
            Residency::Counted | Residency::Probed(..) => Direct::open(source),
        };
        Reader {
            source,
            residency,
            direct,
        }
    }

    /// The size of the file, in bytes.
    pub fn bytes(&self) -> u64 {
        self.source.bytes
    }

    /// By how much a buffer must be larger than any range read into it, in bytes.
    pub fn slack(&self) -> u64 {
        self.direct.as_ref().map_or(0, Direct::slack)
    }

    /// Whether most of the file has to come from disk, going by a few places.
    pub fn is_cold(&self) -> bool {
        const PLACES: u64 = 8;
        const BYTES: u64 = 64 << 10;
        let place = |number: u64| {
            let start = self.source.bytes / PLACES * number;
            start..self.source.bytes.min(start + BYTES)
        };
        let cached = |number: &u64| self.residency.cached(self.source, place(*number));
        self.direct.is_some() && (0..PLACES).filter(cached).count() as u64 <= PLACES / 2
    }

    /// Reads a range, which lies inside the file, into a buffer, and says where in it and how.
    pub fn read(&self, range: Range<u64>, buffer: &mut [u8]) -> Result<(usize, PathTaken), CheckpointError> {
        let bytes = range.end - range.start;
        let cached = self.residency.cached(self.source, range.clone());
        if let Some(direct) = self.direct.as_ref().filter(|_| !cached)
            && let Some(Filled { at, direct, slack }) = direct.read(self.source, range.clone(), buffer)?
        {
            let taken = PathTaken {
                buffered: bytes - direct,
                direct,
                slack,
                refused: self.refuses(),
            };
            return Ok((at, taken));
        }
        self.source
            .read_exact_at(&mut buffer[..bytes as usize], range.start)?;
        let taken = PathTaken {
            buffered: bytes,
            refused: !cached && self.refuses(),
            ..PathTaken::default()
        };
        Ok((0, taken))
    }

    #[cfg(test)]
    pub fn residency(&self) -> &Residency {
        &self.residency
    }

    fn refuses(&self) -> bool {
        self.direct.as_ref().is_none_or(Direct::refused)
    }
}
