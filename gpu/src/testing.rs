//! What a faulty or hostile process of the same user can do to memory, for tests that it is noticed.

#![allow(unsafe_code)] // Mapping a file so that stores reach it.

use rustix::mm::{self, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ptr::NonNull;

pub use crate::cuda::overwrite;

/// A file, mapped for writing.
#[derive(Debug)]
pub struct MappedFile {
    start: NonNull<c_void>,
    len: usize,
}

impl MappedFile {
    /// Maps all of a file that is open for reading and writing.
    ///
    /// # Errors
    /// What the system says.
    pub fn map(file: &File) -> io::Result<MappedFile> {
        let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let start = unsafe { mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0)? };
        let start = NonNull::new(start).ok_or(io::ErrorKind::Other)?;
        Ok(MappedFile { start, len })
    }

    /// Stores a byte.
    ///
    /// # Panics
    /// When it is outside the file as it was mapped.
    pub fn store(&mut self, at: usize, byte: u8) {
        assert!(at < self.len, "byte {at} of {}", self.len);
        // SAFETY: it lies in the mapping, which is writable and this value's own; no slice of it is lent.
        unsafe { self.start.cast::<u8>().add(at).write_volatile(byte) };
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: `start` and `len` are those of a mapping that this value alone owns.
        let _ = unsafe { mm::munmap(self.start.as_ptr(), self.len) };
    }
}
