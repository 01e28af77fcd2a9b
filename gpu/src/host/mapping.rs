//! A sealed memfd, mapped read-only.

#![allow(unsafe_code)] // Mapping memory, and lending it as a slice.

use super::memfd;
use crate::MemoryError;
use rustix::io::Errno;
use rustix::mm::{self, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

/// A whole memfd. It keeps the memory alive, also when the exporter and every descriptor are gone;
/// dropping it unmaps.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// Dangling when `len` is 0.
    start: NonNull<c_void>,
    len: usize,
}

impl Mapping {
    /// Maps a memfd that is sealed and has exactly `bytes` bytes; the descriptor is closed.
    pub fn import(fd: OwnedFd, bytes: u64) -> Result<Mapping, MemoryError> {
        memfd::check_sealed(fd.as_fd())?;
        let actual = memfd::size(fd.as_fd())?;
        if actual != bytes {
            return Err(MemoryError::Size {
                stated: bytes,
                actual,
            });
        }
        let out_of_memory = |why: String| MemoryError::OutOfMemory { bytes, why };
        let len = usize::try_from(bytes).map_err(|error| out_of_memory(error.to_string()))?;
        let start = match len {
            0 => NonNull::dangling(),
            _ => map(&fd, len).map_err(|error| match error {
                Errno::NOMEM => out_of_memory(format!("mmap: {error}")),
                source => MemoryError::System {
                    call: "mmap of a memfd",
                    source,
                },
            })?,
        };
        Ok(Mapping { start, len })
    }

    /// The memory.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `start` is non-null and maps `len` readable bytes until `self` is dropped (or is
        // dangling with a `len` of 0), and mmap gives no more than `isize::MAX` bytes. They never
        // change, whoever holds the memory: `import` found the file sealed against writing, which the
        // kernel grants only while no writable mapping exists and never takes back. They can all be
        // read: the size is sealed too, and `import` found it to be `len`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast::<u8>(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        // SAFETY: `start` and `len` are those of a mapping that this value alone owns, and every
        // borrow of its bytes has ended.
        let unmapped = unsafe { mm::munmap(self.start.as_ptr(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of a whole mapping: {unmapped:?}");
    }
}

// SAFETY: the memory is bound to no thread, and nobody can change it (see `bytes`).
unsafe impl Send for Mapping {}
// SAFETY: as above; all access through `&self` is reading.
unsafe impl Sync for Mapping {}

/// Private, since older kernels refuse a shared mapping of a memfd that is sealed against writing;
/// it still shares the pages.
fn map(fd: &OwnedFd, len: usize) -> Result<NonNull<c_void>, Errno> {
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
    let start = unsafe {
        mm::mmap(
            std::ptr::null_mut(),
            len,
            ProtFlags::READ,
            MapFlags::PRIVATE,
            fd,
            0,
        )?
    };
    NonNull::new(start).ok_or(Errno::FAULT)
}
