//! Host memory of this process alone.

#![allow(unsafe_code)] // Mapping memory, and lending it as a slice.

use crate::MemoryError;
use rustix::io::Errno;
use rustix::mm::{self, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Memory that starts on a page, so that a tensor is aligned here as it is in a region; freed on drop.
#[derive(Debug)]
pub(crate) struct Anonymous {
    /// Dangling when `len` is 0.
    start: NonNull<c_void>,
    len: usize,
}

impl Anonymous {
    /// `bytes` zero bytes. They take their pages when they are first written, so that a copy writes
    /// them once.
    pub fn allocate(bytes: u64) -> Result<Anonymous, MemoryError> {
        let out_of_memory = |why: String| MemoryError::OutOfMemory { bytes, why };
        let len = usize::try_from(bytes).map_err(|error| out_of_memory(error.to_string()))?;
        let start = match len {
            0 => NonNull::dangling(),
            _ => map(len).map_err(|error| out_of_memory(format!("mmap: {error}")))?,
        };
        Ok(Anonymous { start, len })
    }

    /// The memory.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `start` is non-null and maps `len` readable, zeroed bytes until `self` is dropped (or
        // is dangling with a `len` of 0), and mmap gives no more than `isize::MAX` bytes. Only
        // `bytes_mut` writes them, which borrows `self` alone.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast::<u8>(), self.len) }
    }

    /// The memory, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; it is mapped for writing too, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast::<u8>(), self.len) }
    }
}

impl Drop for Anonymous {
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

// SAFETY: the memory is bound to no thread, and no other value leads into it.
unsafe impl Send for Anonymous {}
// SAFETY: as above; all access through `&self` is reading.
unsafe impl Sync for Anonymous {}

fn map(len: usize) -> Result<NonNull<c_void>, Errno> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new private mapping at an address of the kernel's choice touches no memory of ours.
    let start = unsafe { mm::mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE)? };
    NonNull::new(start).ok_or(Errno::FAULT)
}
