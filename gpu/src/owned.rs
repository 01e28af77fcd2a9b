//! Memory of the engine's own, cloned from what it has mapped.

use crate::cuda::Place;
use crate::{Mapping, MemoryError, TensorView, Weights, cuda};
use weightd_core::content::DeviceUuid;

/// Memory that this process allocated on the device of its source, and may write; freed on drop.
#[derive(Debug)]
pub struct Owned(Memory);

#[derive(Debug)]
enum Memory {
    Host(Vec<u8>),
    Cuda(cuda::Allocation),
}

impl Owned {
    /// The address of its first byte: on the host, or for the device.
    pub fn address(&self) -> u64 {
        match &self.0 {
            Memory::Host(bytes) => bytes.as_ptr() as u64,
            Memory::Cuda(allocation) => allocation.address(),
        }
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        match &self.0 {
            Memory::Host(bytes) => bytes.len() as u64,
            Memory::Cuda(allocation) => allocation.bytes(),
        }
    }

    /// Byte `offset`, for a device to read; `None` where it is host memory, or outside.
    pub fn place(&self, offset: u64) -> Option<Place<'_>> {
        match &self.0 {
            Memory::Cuda(allocation) if offset < allocation.bytes() => {
                Some(Place::new(allocation.address() + offset))
            }
            _ => None,
        }
    }

    /// The memory, where the host can reach it.
    pub fn host_mut(&mut self) -> Option<&mut [u8]> {
        match &mut self.0 {
            Memory::Host(bytes) => Some(bytes),
            Memory::Cuda(_) => None,
        }
    }

    /// Copies from byte `offset` on to the host, and waits for it.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfBounds`], and [`MemoryError::Cuda`] when the device is lost.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        let (count, bytes) = (into.len() as u64, self.bytes());
        if offset.checked_add(count).is_none_or(|end| end > bytes) {
            return Err(MemoryError::OutOfBounds { offset, count, bytes });
        }
        match &self.0 {
            Memory::Host(memory) => into.copy_from_slice(&memory[offset as usize..][..into.len()]),
            Memory::Cuda(allocation) => allocation.read(offset, into)?,
        }
        Ok(())
    }
}

impl TensorView<'_> {
    /// Clones the memory from the first element to the end of the last: for a tensor that the engine
    /// must write. Strides stay as they are.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfMemory`], before anything is copied.
    pub fn duplicate(&self) -> Result<Owned, MemoryError> {
        duplicate(self.mapping(), self.offset, self.extent())
    }
}

impl Weights {
    /// Clones all regions, in their order, at the speed of the device: what copy mode is. A tensor
    /// lies at the same offset of the clone as of its region.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfMemory`] when all of them together do not fit, before the first byte is
    /// copied; nothing is kept then.
    pub fn duplicate(&self) -> Result<Vec<Owned>, MemoryError> {
        for device in self.manifest().regions().iter().map(|region| region.device) {
            self.check_room(device)?;
        }
        self.mappings()
            .iter()
            .map(|mapping| duplicate(mapping, 0, mapping.bytes()))
            .collect()
    }

    fn check_room(&self, device: DeviceUuid) -> Result<(), MemoryError> {
        let here = self
            .mappings()
            .iter()
            .filter(|mapping| mapping.device() == device && mapping.host().is_none());
        let bytes: u64 = here.map(Mapping::bytes).sum();
        if bytes == 0 {
            return Ok(());
        }
        let (free, _) = cuda::memory(device)?;
        if bytes > free {
            let why = format!("device {device} has {free} bytes free");
            return Err(MemoryError::OutOfMemory { bytes, why });
        }
        Ok(())
    }
}

fn duplicate(mapping: &Mapping, offset: u64, bytes: u64) -> Result<Owned, MemoryError> {
    if let Some(memory) = mapping.host() {
        let mut copy = Vec::new();
        let room = copy.try_reserve_exact(bytes as usize);
        room.map_err(|error| MemoryError::OutOfMemory {
            bytes,
            why: error.to_string(),
        })?;
        copy.extend_from_slice(&memory[offset as usize..][..bytes as usize]);
        return Ok(Owned(Memory::Host(copy)));
    }
    let device = mapping.device();
    let copy = cuda::Allocation::copy_of(device, mapping.address() + offset, bytes);
    Ok(Owned(Memory::Cuda(
        copy.map_err(|error| MemoryError::cuda(device, bytes, error))?,
    )))
}
