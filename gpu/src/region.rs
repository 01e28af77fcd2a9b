//! Memory that is being filled.

mod present;

use crate::device::DeviceKind;
use crate::{Device, MemoryError, cuda, host};
use rustix::io::fcntl_dupfd_cloexec;
use std::os::fd::OwnedFd;
use weightd_core::content::{DeviceUuid, HandleKind};

/// One allocation of a device, filled by any number of threads at once and then exported.
///
/// When a write returns, its source may be reused. Where two writes overlap, either may win. The
/// fast way in from host memory is a [`Lane`](crate::Lane); what is on the device already comes by
/// [`copy_from_device`](Region::copy_from_device).
#[derive(Debug)]
pub struct Region {
    memory: Memory,
    bytes: u64,
    device: DeviceUuid,
}

#[derive(Debug)]
pub(crate) enum Memory {
    Host(host::Region),
    Cuda(cuda::Region),
}

/// Memory that is filled and fixed, ready to be handed to other processes.
#[derive(Debug)]
pub struct Export {
    /// Keeps the memory alive, and lets whoever holds it map it.
    pub fd: OwnedFd,
    /// The size of the region in bytes.
    pub bytes: u64,
    /// What the descriptor is.
    pub handle: HandleKind,
}

/// Rows of one width, on their way into a region. The first starts at the source's first byte and at
/// byte `offset` of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Where the first row goes, in bytes.
    pub offset: u64,
    /// From one row to the next in the region, in bytes.
    pub dst_pitch: u64,
    /// From one row to the next in the source, in bytes.
    pub src_pitch: usize,
    /// The length of a row in bytes.
    pub width: usize,
    /// How many rows there are.
    pub rows: usize,
}

impl Export {
    /// Another descriptor of the same memory: a publisher sends one and maps the other.
    ///
    /// # Errors
    ///
    /// [`MemoryError::System`] when the descriptors run out.
    pub fn try_clone(&self) -> Result<Export, MemoryError> {
        let fd = fcntl_dupfd_cloexec(&self.fd, 0);
        Ok(Export {
            fd: fd.map_err(MemoryError::system("duplicating a descriptor"))?,
            bytes: self.bytes,
            handle: self.handle,
        })
    }
}

impl Region {
    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device whose memory it is.
    pub fn device(&self) -> DeviceUuid {
        self.device
    }

    /// Writes `source` at byte `offset`.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfBounds`], before anything is written.
    pub fn write(&self, offset: u64, source: &[u8]) -> Result<(), MemoryError> {
        self.check(offset, source.len() as u64)?;
        match &self.memory {
            Memory::Host(region) => region.write(offset, source),
            Memory::Cuda(region) => region.write(offset, source).map_err(|error| self.failed(error)),
        }
    }

    /// Writes rows of `source`.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfBounds`] where rows leave the region, [`MemoryError::Rows`] where they leave
    /// the source or overlap in the region; both before anything is written.
    pub fn write_2d(&self, source: &[u8], rows: Rows) -> Result<(), MemoryError> {
        if !self.check_rows(source.len(), &rows)? {
            return Ok(());
        }
        match &self.memory {
            Memory::Host(region) => region.write_rows(source, &rows),
            Memory::Cuda(region) => region
                .write_rows(source, &rows)
                .map_err(|error| self.failed(error)),
        }
    }

    /// Sets `count` bytes at byte `offset` to zero.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfBounds`], before anything is written.
    pub fn zero(&self, offset: u64, count: u64) -> Result<(), MemoryError> {
        self.check(offset, count)?;
        match &self.memory {
            Memory::Host(region) => region.zero(offset, count),
            Memory::Cuda(region) => region.zero(offset, count).map_err(|error| self.failed(error)),
        }
    }

    /// Ends the filling: everything that was written is there, and nobody can change host memory any
    /// more.
    ///
    /// # Errors
    ///
    /// [`MemoryError::System`] when the kernel refuses to seal, [`MemoryError::Cuda`] when the driver
    /// gives no descriptor.
    pub fn export(self) -> Result<Export, MemoryError> {
        let (bytes, device) = (self.bytes, self.device);
        let (fd, handle) = match self.memory {
            Memory::Host(region) => (region.export()?, HandleKind::Memfd),
            Memory::Cuda(region) => {
                let fd = region
                    .export()
                    .map_err(|error| MemoryError::cuda(device, bytes, error))?;
                (fd, HandleKind::CudaFd)
            }
        };
        Ok(Export { fd, bytes, handle })
    }

    pub(crate) fn allocate(device: &Device, bytes: u64) -> Result<Region, MemoryError> {
        let uuid = device.uuid();
        let memory = match device.kind() {
            DeviceKind::Cpu => Memory::Host(host::Region::allocate(bytes)?),
            DeviceKind::Cuda => {
                let region = cuda::Region::allocate(uuid, bytes);
                Memory::Cuda(region.map_err(|error| MemoryError::cuda(uuid, bytes, error))?)
            }
        };
        Ok(Region {
            memory,
            bytes,
            device: uuid,
        })
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(crate) fn check(&self, offset: u64, count: u64) -> Result<(), MemoryError> {
        check_bounds(offset, count, self.bytes)
    }

    /// As [`Rows::check`].
    pub(crate) fn check_rows(&self, src: usize, rows: &Rows) -> Result<bool, MemoryError> {
        rows.check(src, self.bytes)
    }

    pub(crate) fn failed(&self, error: cuda::CudaError) -> MemoryError {
        MemoryError::cuda(self.device, self.bytes, error)
    }
}

impl Rows {
    /// One row, for which pitches do not matter.
    pub fn one(offset: u64, bytes: u64) -> Rows {
        Rows {
            offset,
            dst_pitch: bytes,
            src_pitch: bytes as usize,
            width: bytes as usize,
            rows: 1,
        }
    }

    /// Whether there is anything to copy, once all of it was found to be inside: of `src` bytes from
    /// the first row's start on, and of a region of `dst` bytes.
    pub(crate) fn check(&self, src: usize, dst: u64) -> Result<bool, MemoryError> {
        let Rows {
            offset,
            dst_pitch,
            src_pitch,
            width,
            rows,
        } = *self;
        let Some(steps) = rows.checked_sub(1).filter(|_| width > 0) else {
            return check_bounds(offset, 0, dst).map(|()| false);
        };
        let in_source = steps
            .checked_mul(src_pitch)
            .and_then(|last| last.checked_add(width));
        let apart = steps == 0 || dst_pitch >= width as u64;
        if !apart || in_source.is_none_or(|end| end > src) {
            return Err(MemoryError::Rows {
                rows,
                width,
                src_pitch,
                src,
                dst_pitch,
            });
        }
        let in_region = (steps as u64).checked_mul(dst_pitch);
        let in_region = in_region.and_then(|last| last.checked_add(width as u64));
        check_bounds(offset, in_region.unwrap_or(u64::MAX), dst).map(|()| true)
    }
}

pub(crate) fn check_bounds(offset: u64, count: u64, bytes: u64) -> Result<(), MemoryError> {
    match offset.checked_add(count) {
        Some(end) if end <= bytes => Ok(()),
        _ => Err(MemoryError::OutOfBounds { offset, count, bytes }),
    }
}
