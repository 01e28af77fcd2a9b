//! Memory to read into.

use crate::{Lane, MemoryError};

/// Zeroed memory that starts where a read past the page cache may put its bytes.
#[derive(Debug)]
pub(crate) struct Pages {
    /// Never grows, so it stays where it is.
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Pages {
    /// `bytes` bytes at a multiple of [`Lane::ALIGN`].
    pub fn new(bytes: usize) -> Result<Pages, MemoryError> {
        let mut memory = Vec::new();
        let room = memory.try_reserve_exact(bytes.saturating_add(Lane::ALIGN));
        room.map_err(|error| MemoryError::OutOfMemory {
            bytes: bytes as u64,
            why: error.to_string(),
        })?;
        memory.resize(bytes + Lane::ALIGN, 0);
        let start = memory.as_ptr().align_offset(Lane::ALIGN);
        Ok(Pages { memory, start, bytes })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.bytes]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.bytes]
    }
}
