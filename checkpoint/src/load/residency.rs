//! Whether a range of a file is in the page cache.

use crate::SourceFile;
use rustix::fs::{Advice, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::IoSliceMut;
use std::ops::Range;

/// How to ask about a file. Not by `mincore`, which calls everything resident for a file that is
/// another user's.
#[derive(Debug)]
pub(super) enum Residency {
    /// Its bytes are in memory and nowhere else.
    Memory,
    /// The kernel counts its pages.
    Counted,
    /// One byte of a range stands for all, read through this descriptor if that takes no waiting.
    Probed(File, RandomState),
    /// Nobody can tell.
    Unknown,
}

impl Residency {
    /// The best way for a file.
    pub fn of(source: &SourceFile) -> Residency {
        // `f_type` in linux/magic.h.
        const MEMORY: [u32; 3] = [0x0102_1994, 0x8584_58f6, 0x9584_58f6];
        const OVERLAY: u32 = 0x794c_7630;
        let kind = rustix::fs::fstatfs(&source.file).map_or(0, |system| system.f_type as u32);
        if MEMORY.contains(&kind) {
            return Residency::Memory;
        }
        // An overlay's pages belong to the files below it, which the kernel does not count for it.
        if kind != OVERLAY && weightd_gpu::resident(&source.file, 0, 1).is_some() {
            return Residency::Counted;
        }
        Residency::probed(source).unwrap_or(Residency::Unknown)
    }

    /// By reads that do not wait, where the file system can do them.
    pub fn probed(source: &SourceFile) -> Option<Residency> {
        let file = source.reopen(OFlags::empty())?;
        // Without this, a probe of what is not cached would start reading ahead, and fill the cache.
        rustix::fs::fadvise(&file, 0, None, Advice::Random).ok()?;
        // The header was just read, but may be gone again.
        probe(&file, 0).ok()?;
        Some(Residency::Probed(file, RandomState::new()))
    }

    /// Whether a range is in the page cache, or at least half of it, so that reading the rest around
    /// the cache would not pay. `true` where that cannot be known: reading through the cache is never
    /// wrong, only slow.
    pub fn cached(&self, source: &SourceFile, range: Range<u64>) -> bool {
        let bytes = range.end - range.start;
        match self {
            Residency::Memory | Residency::Unknown => true,
            Residency::Counted => weightd_gpu::resident(&source.file, range.start, bytes)
                .is_none_or(|resident| resident >= bytes.div_ceil(2)),
            // A probe brings its page into the cache, so another one of the range must not ask the same.
            Residency::Probed(file, random) => {
                let at = range.start + random.hash_one(range.start) % bytes.max(1);
                probe(file, at).unwrap_or(true)
            }
        }
    }
}

/// Whether the byte at `offset` could be read without waiting; an error where such reads are none.
fn probe(file: &File, offset: u64) -> Result<bool, Errno> {
    let mut byte = [0];
    let mut buffers = [IoSliceMut::new(&mut byte)];
    match rustix::io::preadv2(file, &mut buffers, offset, ReadWriteFlags::NOWAIT) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN) => Ok(false),
        Err(errno) => Err(errno),
    }
}
