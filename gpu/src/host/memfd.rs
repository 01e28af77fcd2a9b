//! Anonymous files whose bytes can be fixed for ever.

use super::room;
use crate::MemoryError;
use rustix::fs::{self, FallocateFlags, MemfdFlags, SealFlags, SeekFrom};
use rustix::io::{self, Errno};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// With all of these a memfd never changes its bytes or its size again, whoever holds it.
const SEALS: SealFlags = SealFlags::SEAL
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::WRITE);

/// A sealed memfd that holds `bytes`.
///
/// # Errors
///
/// [`MemoryError::OutOfMemory`], and [`MemoryError::System`] when the descriptors run out.
pub fn sealed(bytes: &[u8]) -> Result<OwnedFd, MemoryError> {
    let fd = create(bytes.len() as u64)?;
    write_at(fd.as_fd(), 0, bytes)?;
    seal(fd.as_fd())?;
    Ok(fd)
}

/// The bytes of a memfd that [`sealed`] made, in this or another process.
///
/// # Errors
///
/// [`MemoryError::NotSealed`], or [`MemoryError::TooLarge`] when it holds more than `cap` bytes,
/// which is checked before anything is allocated.
pub fn read_sealed(fd: impl AsFd, cap: u64) -> Result<Vec<u8>, MemoryError> {
    let fd = fd.as_fd();
    check_sealed(fd)?;
    let actual = size(fd)?;
    let size = usize::try_from(actual).ok().filter(|_| actual <= cap);
    let mut bytes = vec![0; size.ok_or(MemoryError::TooLarge { actual, cap })?];
    let mut filled = 0;
    while filled < bytes.len() {
        match io::retry_on_intr(|| io::pread(fd, &mut bytes[filled..], filled as u64)) {
            Ok(0) => {
                return Err(MemoryError::Size {
                    stated: actual,
                    actual: filled as u64,
                });
            }
            Ok(count) => filled += count,
            Err(source) => {
                return Err(MemoryError::System {
                    call: "pread of a memfd",
                    source,
                });
            }
        }
    }
    Ok(bytes)
}

/// A memfd of `bytes` zero bytes. It takes its pages when they are written: taking them before means
/// to write all of the memory twice, the first time by one thread. It can be sealed, is closed on exec and, where
/// the kernel knows how to say so (Linux 6.3), can never be executed.
pub(crate) fn create(bytes: u64) -> Result<OwnedFd, MemoryError> {
    let out_of_memory = |why| MemoryError::OutOfMemory { bytes, why };
    room::check(bytes).map_err(out_of_memory)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = match fs::memfd_create("weightd", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => fs::memfd_create("weightd", flags),
        created => created,
    }
    .map_err(MemoryError::system("memfd_create"))?;
    fs::ftruncate(&fd, bytes).map_err(lacking("ftruncate of a memfd", bytes))?;
    Ok(fd)
}

/// Takes the pages that were never written, which read as zero: a reader's first touch would take
/// them otherwise, and where there are none left a signal would end it.
pub(crate) fn fill_holes(fd: BorrowedFd<'_>) -> Result<(), MemoryError> {
    // In steps, since a signal undoes the step that it interrupts.
    const STEP: u64 = 256 << 20;
    let bytes = size(fd)?;
    let seek = MemoryError::system("lseek in a memfd");
    let mut done = 0;
    while done < bytes {
        let hole = fs::seek(fd, SeekFrom::Hole(done)).map_err(&seek)?;
        if hole >= bytes {
            break;
        }
        let end = match fs::seek(fd, SeekFrom::Data(hole)) {
            Err(Errno::NXIO) => bytes,
            end => end.map_err(&seek)?,
        };
        let step = STEP.min(end - hole);
        io::retry_on_intr(|| fs::fallocate(fd, FallocateFlags::empty(), hole, step))
            .map_err(lacking("fallocate of a memfd", step))?;
        done = hole + step;
    }
    Ok(())
}

/// For `map_err`: which call failed for want of how many bytes.
fn lacking(call: &'static str, bytes: u64) -> impl Fn(Errno) -> MemoryError {
    move |source| match source {
        Errno::NOSPC | Errno::NOMEM | Errno::FBIG | Errno::DQUOT => MemoryError::OutOfMemory {
            bytes,
            why: format!("{call}: {source}"),
        },
        source => MemoryError::System { call, source },
    }
}

/// Fixes the bytes. Fails while a writable mapping exists.
pub(crate) fn seal(fd: BorrowedFd<'_>) -> Result<(), MemoryError> {
    fs::fcntl_add_seals(fd, SEALS).map_err(MemoryError::system("sealing a memfd"))
}

/// Whether the bytes are fixed.
pub(crate) fn check_sealed(fd: BorrowedFd<'_>) -> Result<(), MemoryError> {
    // Fails for anything that is no memfd, which then has no seals.
    let seals = fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
    if !seals.contains(SEALS) {
        return Err(MemoryError::NotSealed { seals: seals.bits() });
    }
    Ok(())
}

pub(crate) fn size(fd: BorrowedFd<'_>) -> Result<u64, MemoryError> {
    let stat = fs::fstat(fd).map_err(MemoryError::system("fstat of a memfd"))?;
    Ok(stat.st_size as u64)
}

pub(crate) fn write_at(fd: BorrowedFd<'_>, mut offset: u64, mut bytes: &[u8]) -> Result<(), MemoryError> {
    while !bytes.is_empty() {
        let written = io::retry_on_intr(|| io::pwrite(fd, bytes, offset))
            .map_err(lacking("pwrite to a memfd", bytes.len() as u64))?;
        offset += written as u64;
        bytes = &bytes[written..];
    }
    Ok(())
}
