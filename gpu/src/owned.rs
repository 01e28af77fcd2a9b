//! Memory of the engine's own, on the device of what it was copied from.

use crate::cuda::{Place, Span};
use crate::device::check_free;
use crate::region::{Rows, check_bounds};
use crate::weights::Backing;
use crate::{Device, DeviceKind, MemoryError, cuda, host};
use weightd_core::content::DeviceUuid;

/// Memory that this process allocated on the device of its source, and may write; freed on drop.
#[derive(Debug)]
pub struct Owned {
    memory: Memory,
    device: DeviceUuid,
}

#[derive(Debug)]
enum Memory {
    Host(host::Anonymous),
    Cuda(cuda::Allocation),
}

/// Rows to copy: the first starts at byte `at` of `from`.
pub(crate) struct Piece<'a> {
    pub from: &'a Backing,
    pub at: u64,
    pub rows: Rows,
}

impl Owned {
    /// The address of its first byte: on the host, or for the device.
    pub fn address(&self) -> u64 {
        match &self.memory {
            Memory::Host(memory) => memory.bytes().as_ptr() as u64,
            Memory::Cuda(allocation) => allocation.address(),
        }
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        match &self.memory {
            Memory::Host(memory) => memory.bytes().len() as u64,
            Memory::Cuda(allocation) => allocation.bytes(),
        }
    }

    /// The device that it is on.
    pub fn device(&self) -> DeviceUuid {
        self.device
    }

    /// Byte `offset`, for a device to read; `None` where it is host memory, or outside.
    pub fn place(&self, offset: u64) -> Option<Place<'_>> {
        let readable = self.span().is_some() && offset < self.bytes();
        readable.then(|| Place::new(self.address() + offset))
    }

    /// The memory, where the host can read it.
    pub fn host(&self) -> Option<&[u8]> {
        match &self.memory {
            Memory::Host(memory) => Some(memory.bytes()),
            Memory::Cuda(_) => None,
        }
    }

    /// The memory, where the host can write it.
    pub(crate) fn host_mut(&mut self) -> Option<&mut [u8]> {
        match &mut self.memory {
            Memory::Host(memory) => Some(memory.bytes_mut()),
            Memory::Cuda(_) => None,
        }
    }

    /// Copies from byte `offset` on to the host, and waits for it.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfBounds`], and [`MemoryError::Cuda`] when the device is lost.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        check_bounds(offset, into.len() as u64, self.bytes())?;
        match &self.memory {
            Memory::Host(memory) => into.copy_from_slice(&memory.bytes()[offset as usize..][..into.len()]),
            Memory::Cuda(allocation) => allocation.read(offset, into)?,
        }
        Ok(())
    }

    /// Memory of these sizes, each of the kind and on the device of what is beside it: all of it, or
    /// none.
    pub(crate) fn take(wanted: &[(&Backing, u64)]) -> Result<Vec<Owned>, MemoryError> {
        check_room(wanted)?;
        let allocate = |(like, bytes): &(&Backing, u64)| Owned::allocate(like, *bytes);
        wanted.iter().map(allocate).collect()
    }

    /// Memory of this size, of the kind and on the device of what is given.
    pub(crate) fn take_one(like: &Backing, bytes: u64) -> Result<Owned, MemoryError> {
        check_room(&[(like, bytes)])?;
        Owned::allocate(like, bytes)
    }

    fn allocate(like: &Backing, bytes: u64) -> Result<Owned, MemoryError> {
        let device = like.device();
        let memory = match like.host() {
            Some(_) => Memory::Host(host::Anonymous::allocate(bytes)?),
            None => {
                let allocation = cuda::Allocation::new(device, bytes);
                Memory::Cuda(allocation.map_err(|error| MemoryError::cuda(device, bytes, error))?)
            }
        };
        Ok(Owned { memory, device })
    }

    /// Copies rows of memory of the same kind and device, and waits for them, also when it fails.
    pub(crate) fn copy<'a>(
        &mut self,
        mut pieces: impl Iterator<Item = Piece<'a>>,
    ) -> Result<(), MemoryError> {
        match &mut self.memory {
            Memory::Host(memory) => pieces.try_for_each(|Piece { from, at, rows }| {
                let from = from.host().expect("host memory is copied from host memory");
                copy_rows(memory.bytes_mut(), &from[at as usize..], &rows)
            }),
            Memory::Cuda(allocation) => allocation.copy(pieces.map(|Piece { from, at, rows }| {
                let from = from.span().expect("device memory is copied from device memory");
                (from, at, rows)
            })),
        }
    }

    /// The memory, where it is a device's.
    pub(crate) fn span(&self) -> Option<Span<'_>> {
        match &self.memory {
            Memory::Host(_) => None,
            Memory::Cuda(allocation) => Some(Span::new(allocation.address(), allocation.bytes())),
        }
    }
}

/// Whether all of it fits, as host and devices say before anything is taken.
fn check_room(wanted: &[(&Backing, u64)]) -> Result<(), MemoryError> {
    let wanted = wanted.iter().map(|(like, bytes)| {
        let kind = match like.host() {
            Some(_) => DeviceKind::Cpu,
            None => DeviceKind::Cuda,
        };
        (Device::known(kind, like.device()), *bytes)
    });
    host::check_room(wanted.clone())?;
    check_free(wanted)
}

fn copy_rows(to: &mut [u8], from: &[u8], rows: &Rows) -> Result<(), MemoryError> {
    if !rows.check(from.len(), to.len() as u64)? {
        return Ok(());
    }
    for row in 0..rows.rows {
        let to = &mut to[rows.offset as usize + row * rows.dst_pitch as usize..];
        to[..rows.width].copy_from_slice(&from[row * rows.src_pitch..][..rows.width]);
    }
    Ok(())
}
