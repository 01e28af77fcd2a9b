//! Host memory of this process alone.

#![allow(unsafe_code)] // Mapping memory, and lending it as a slice.

use super::mapped::Mapped;
use crate::MemoryError;
use rustix::mm::{self, MapFlags, ProtFlags};

/// Memory that starts on a page, so that a tensor is aligned here as it is in a region; freed on drop.
#[derive(Debug)]
pub(crate) struct Anonymous(Mapped);

impl Anonymous {
    /// `bytes` zero bytes. They take their pages when they are first written, so that a copy writes
    /// them once.
    pub fn allocate(bytes: u64) -> Result<Anonymous, MemoryError> {
        let out_of_memory = |why: String| MemoryError::OutOfMemory { bytes, why };
        let len = usize::try_from(bytes).map_err(|error| out_of_memory(error.to_string()))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping at an address of the kernel's choice touches no memory of ours.
        // It is zeroed and readable, and nobody else has its memory.
        let mapped = unsafe {
            Mapped::new(len, || {
                mm::mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE)
            })
        };
        let mapped = mapped.map_err(|error| out_of_memory(format!("mmap: {error}")))?;
        Ok(Anonymous(mapped))
    }

    /// The memory.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// The memory, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.0.bytes().len();
        // SAFETY: these are the bytes of `bytes`; they are mapped for writing too, and `self` is
        // borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr(), len) }
    }
}
