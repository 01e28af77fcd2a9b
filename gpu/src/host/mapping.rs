//! A sealed memfd, mapped read-only.

#![allow(unsafe_code)] // Mapping memory.

use super::mapped::Mapped;
use super::memfd;
use crate::MemoryError;
use rustix::io::Errno;
use rustix::mm::{self, MapFlags, ProtFlags};
use std::os::fd::{AsFd, OwnedFd};

/// A whole memfd. It keeps the memory alive, also when the exporter and every descriptor are gone;
/// dropping it unmaps.
#[derive(Debug)]
pub(crate) struct Mapping(Mapped);

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
        // Private, since older kernels refuse a shared mapping of a memfd that is sealed against writing;
        // it still shares the pages.
        let (access, flags) = (ProtFlags::READ, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours. Its bytes
        // never change, whoever holds the memory: the file was found sealed against writing, which the
        // kernel grants only while no writable mapping exists and never takes back. They can all be
        // read: the size is sealed too, and was found to be `len`.
        let mapped =
            unsafe { Mapped::new(len, || mm::mmap(std::ptr::null_mut(), len, access, flags, &fd, 0)) };
        let mapped = mapped.map_err(|error| match error {
            Errno::NOMEM => out_of_memory(format!("mmap: {error}")),
            source => MemoryError::System {
                call: "mmap of a memfd",
                source,
            },
        })?;
        Ok(Mapping(mapped))
    }

    /// The memory.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }
}
