//! Memory that others filled, mapped read-only.

use crate::cuda::{Place, Span};
use crate::region::check_bounds;
use crate::{MemoryError, cuda, host};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use weightd_core::content::manifest::LegacyHandle;
use weightd_core::content::{DeviceUuid, HandleKind};

/// A whole region, read-only. It keeps the memory alive, also when the exporter and every
/// descriptor are gone; dropping it unmaps.
#[derive(Debug)]
pub struct Mapping {
    memory: Memory,
    bytes: u64,
    device: DeviceUuid,
}

#[derive(Debug)]
enum Memory {
    Host(host::Mapping),
    Cuda(cuda::Range),
    /// The allocation of another process, and where in it the region starts.
    Legacy(Arc<cuda::legacy::Opened>, u64),
}

impl Mapping {
    /// Maps the region of `bytes` bytes that `fd` stands for; the descriptor is closed.
    ///
    /// `device` is the device that the publisher stated. CUDA memory is asked which device it is of;
    /// host memory cannot prove it, so there it is only kept.
    ///
    /// # Errors
    ///
    /// [`MemoryError::NotSealed`] and [`MemoryError::Size`] where the descriptor does not keep what
    /// was promised; [`MemoryError::OtherDevice`] and [`MemoryError::Cuda`] likewise on a CUDA device;
    /// [`MemoryError::Unsupported`] for memory that has no descriptor; [`MemoryError::OutOfMemory`]
    /// when the address space or the number of mappings runs out.
    pub fn import(
        handle: HandleKind,
        fd: OwnedFd,
        bytes: u64,
        device: DeviceUuid,
    ) -> Result<Mapping, MemoryError> {
        let memory = match handle {
            HandleKind::Memfd => Memory::Host(host::Mapping::import(fd, bytes)?),
            HandleKind::CudaFd => {
                let range = cuda::import(fd, device, bytes);
                let range = range.map_err(|error| MemoryError::cuda(device, bytes, error))?;
                Memory::Cuda(range.ok_or(MemoryError::OtherDevice { device })?)
            }
            HandleKind::CudaIpc => return Err(MemoryError::Unsupported { handle, device }),
        };
        Ok(Mapping {
            memory,
            bytes,
            device,
        })
    }

    /// Opens memory that its publisher made with `cuMemAlloc`. The driver cannot map such memory
    /// read-only, and it lives no longer than its publisher.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Cuda`], also when the publisher is gone; [`MemoryError::Size`] where the
    /// allocation is smaller than was stated.
    pub fn open_legacy(
        handle: &LegacyHandle,
        bytes: u64,
        device: DeviceUuid,
    ) -> Result<Mapping, MemoryError> {
        let failed = |error| MemoryError::cuda(device, bytes, error);
        let opened = cuda::legacy::Opened::open(device, handle).map_err(failed)?;
        let actual = opened.bytes();
        let end = handle.offset.checked_add(bytes);
        if end.is_none_or(|end| end > actual) {
            return Err(MemoryError::Size {
                stated: end.unwrap_or(u64::MAX),
                actual,
            });
        }
        Ok(Mapping {
            memory: Memory::Legacy(opened, handle.offset),
            bytes,
            device,
        })
    }

    /// The size of the region in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device that it is on.
    pub fn device(&self) -> DeviceUuid {
        self.device
    }

    /// The address of the first byte: on the host, or for the device.
    pub fn address(&self) -> u64 {
        match &self.memory {
            Memory::Host(mapping) => mapping.bytes().as_ptr() as u64,
            Memory::Cuda(range) => range.address(),
            Memory::Legacy(opened, offset) => opened.address() + offset,
        }
    }

    /// Byte `offset`, for a device to read; `None` where it is host memory, or outside.
    pub fn place(&self, offset: u64) -> Option<Place<'_>> {
        let readable = self.host().is_none() && offset < self.bytes;
        readable.then(|| Place::new(self.address() + offset))
    }

    /// The memory, where the host can read it.
    pub fn host(&self) -> Option<&[u8]> {
        match &self.memory {
            Memory::Host(mapping) => Some(mapping.bytes()),
            _ => None,
        }
    }

    /// The memory, where it is a device's.
    pub(crate) fn span(&self) -> Option<Span<'_>> {
        self.host()
            .is_none()
            .then(|| Span::new(self.address(), self.bytes))
    }

    /// Copies from byte `offset` on to the host, and waits for it.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfBounds`], and [`MemoryError::Cuda`] when the device is lost.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        let (count, bytes) = (into.len() as u64, self.bytes);
        check_bounds(offset, count, bytes)?;
        let read = match &self.memory {
            Memory::Host(mapping) => {
                into.copy_from_slice(&mapping.bytes()[offset as usize..][..into.len()]);
                Ok(())
            }
            Memory::Cuda(range) => cuda::read(range.context(), range.address() + offset, into),
            Memory::Legacy(opened, start) => {
                cuda::read(opened.context(), opened.address() + start + offset, into)
            }
        };
        read.map_err(|error| MemoryError::cuda(self.device, bytes, error))
    }
}
