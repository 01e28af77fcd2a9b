//! Reads past the page cache.

use crate::{CheckpointError, SourceFile};
use rustix::fs::{AtFlags, OFlags, StatxFlags};
use rustix::io::Errno;
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use weightd_gpu::Lane;

/// A file opened with `O_DIRECT`, for reads of whole blocks from disk into the caller's memory.
#[derive(Debug)]
pub(super) struct Direct {
    file: File,
    /// Offsets and lengths are multiples of this; a power of two, and at least the buffers' alignment.
    align: u64,
    /// The file system took the flag and refused a read.
    refused: AtomicBool,
}

/// What a read brought, of the range that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Filled {
    /// Where in the buffer the range starts.
    pub at: usize,
    /// How many of its bytes went past the cache; the others went through it.
    pub direct: u64,
    /// Bytes read before and behind it, for the sake of alignment.
    pub slack: u64,
}

impl Direct {
    /// `None` where the file system or the device has no such reads, or none into a lane's buffers.
    pub fn open(source: &SourceFile) -> Option<Direct> {
        let file = source.reopen(OFlags::DIRECT)?;
        let align = alignment(&file)?;
        Some(Direct::with(file, align))
    }

    fn with(file: File, align: u64) -> Direct {
        let refused = AtomicBool::new(false);
        Direct { file, align, refused }
    }

    /// By how much a buffer must be larger than any range read into it, in bytes.
    pub fn slack(&self) -> u64 {
        2 * self.align
    }

    /// Whether a read was refused, so that no other was tried.
    pub fn refused(&self) -> bool {
        self.refused.load(Relaxed)
    }

    /// Reads `range` of `source`, the file that this was opened for, widened to whole blocks. The last
    /// block of a file is read through the page cache where it is not whole. `None`: not this way.
    pub fn read(
        &self,
        source: &SourceFile,
        range: Range<u64>,
        buffer: &mut [u8],
    ) -> Result<Option<Filled>, CheckpointError> {
        let start = range.start - range.start % self.align;
        let whole = source.bytes - source.bytes % self.align;
        let end = range.end.next_multiple_of(self.align).min(whole);
        if end <= range.start || self.refused() {
            return Ok(None);
        }
        let (at, wanted) = ((range.start - start) as usize, (range.end - start) as usize);
        let blocks = &mut buffer[..(end - start) as usize];
        let mut done = 0;
        while done < blocks.len() {
            let offset = start + done as u64;
            match rustix::io::retry_on_intr(|| rustix::io::pread(&self.file, &mut blocks[done..], offset)) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                    self.refused.store(true, Relaxed);
                    break;
                }
                Err(errno) => return Err(CheckpointError::io("read", &source.path, errno)),
            }
            // The file ends here now; reading on through the cache finds that out.
            if !(done as u64).is_multiple_of(self.align) {
                break;
            }
        }
        let reached = done.clamp(at, wanted);
        let direct = (reached - at) as u64;
        let slack = done as u64 - direct;
        source.read_exact_at(&mut buffer[reached..wanted], start + reached as u64)?;
        Ok(Some(Filled { at, direct, slack }))
    }
}

/// Larger blocks would read too much beside the range.
pub(super) const MOST_ALIGNMENT: u64 = 64 << 10;

/// What offsets, lengths and memory must be multiples of: what the kernel says (Linux 6.1), else a page.
fn alignment(file: &File) -> Option<u64> {
    let page = Lane::ALIGN as u64;
    let Ok(stat) = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Some(page);
    };
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Some(page);
    }
    let (memory, offset) = (
        u64::from(stat.stx_dio_mem_align),
        u64::from(stat.stx_dio_offset_align),
    );
    // Both are 0 for a file that has no such reads.
    let known = memory.is_power_of_two() && offset.is_power_of_two();
    (known && memory <= page && offset <= MOST_ALIGNMENT).then_some(offset.max(page))
}

#[cfg(test)]
mod tests;
