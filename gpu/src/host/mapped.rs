//! Memory that is mapped into this process.

#![allow(unsafe_code)] // Lending memory as a slice, and unmapping it.

use rustix::io::Errno;
use rustix::mm;
use std::ffi::c_void;
use std::ptr::NonNull;

/// A whole mapping, or none of no bytes; dropping it unmaps.
#[derive(Debug)]
pub(super) struct Mapped {
    /// Dangling when `len` is 0.
    start: NonNull<c_void>,
    len: usize,
}

impl Mapped {
    /// `len` bytes, which `map` maps unless there are none.
    ///
    /// # Safety
    ///
    /// What `map` returns is where a mapping of `len` bytes starts that is nobody else's. They can all be read, and do
    /// not change, whoever else has the memory, but through [`as_mut_ptr`](Mapped::as_mut_ptr).
    pub unsafe fn new(len: usize, map: impl FnOnce() -> Result<*mut c_void, Errno>) -> Result<Mapped, Errno> {
        let start = match len {
            0 => NonNull::dangling(),
            _ => NonNull::new(map()?).ok_or(Errno::FAULT)?,
        };
        Ok(Mapped { start, len })
    }

    /// The memory.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `start` is non-null and maps `len` readable bytes until `self` is dropped (or is
        // dangling with a `len` of 0), and mmap gives no more than `isize::MAX` bytes. They do not
        // change while `self` is borrowed: `new` asks for that.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast::<u8>(), self.len) }
    }

    /// Its start, for who knows that it was mapped for writing.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr().cast()
    }
}

impl Drop for Mapped {
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

// SAFETY: the memory is bound to no thread, and nobody changes it from elsewhere (see `new`).
unsafe impl Send for Mapped {}
// SAFETY: as above; all access through `&self` is reading.
unsafe impl Sync for Mapped {}
