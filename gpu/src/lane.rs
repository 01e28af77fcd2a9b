//! A worker's way from files into regions.

use crate::device::DeviceKind;
use crate::region::{Memory, Rows};
use crate::{Device, MemoryError, Region, cuda, host};
use std::ops::Range;
use std::sync::Arc;

/// How many buffers a lane to a CUDA device has: one is filled while the device reads the other.
const CUDA_BUFFERS: usize = 2;

/// A small buffer, used again and again: filled by its owner, then copied to any number of regions.
///
/// On a CUDA device copies go on while the next buffer is filled; [`finish`](Lane::finish) waits for
/// all of them.
#[derive(Debug)]
pub struct Lane(Kind);

/// Memory for lanes, ready before their devices are: faulting it in needs no driver, and takes less than
/// the tenth of a second that a CUDA device takes to start (measured: 15 ms for 128 MiB).
#[derive(Debug)]
pub struct LaneMemory(Option<cuda::Staging>);

impl LaneMemory {
    /// Takes what `lanes` lanes to devices of this kind need, with buffers of `bytes` bytes. Host
    /// devices need nothing in advance.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfMemory`] and [`MemoryError::System`].
    pub fn prepare(kind: DeviceKind, lanes: usize, bytes: usize) -> Result<LaneMemory, MemoryError> {
        let staging = match kind {
            DeviceKind::Cpu => None,
            DeviceKind::Cuda => Some(cuda::Staging::fault_in(staging_bytes(lanes, bytes)?)?),
        };
        Ok(LaneMemory(staging))
    }
}

fn staging_bytes(lanes: usize, bytes: usize) -> Result<usize, MemoryError> {
    let buffer = bytes.checked_next_multiple_of(Lane::ALIGN);
    let lane = buffer.and_then(|buffer| buffer.checked_mul(CUDA_BUFFERS));
    lane.and_then(|lane| lane.checked_mul(lanes))
        .ok_or_else(|| MemoryError::OutOfMemory {
            bytes: u64::MAX,
            why: format!("{lanes} lanes with buffers of {bytes} bytes"),
        })
}

#[derive(Debug)]
enum Kind {
    Host(host::Pages),
    Cuda(cuda::Lane),
}

impl Lane {
    /// Every buffer starts at a multiple of this, in bytes, which is enough for a read past the page
    /// cache (`O_DIRECT`) wherever that needs no more than a page.
    pub const ALIGN: usize = 4096;

    /// `lanes` lanes to `devices`, which are of one kind, with buffers of `bytes` bytes or up to a
    /// page more. `memory` is used where it is large enough.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfMemory`] and [`MemoryError::Cuda`].
    pub fn open(
        devices: &[Device],
        lanes: usize,
        bytes: usize,
        memory: Option<LaneMemory>,
    ) -> Result<Vec<Lane>, MemoryError> {
        let Some(first) = devices.first().filter(|device| device.kind() == DeviceKind::Cuda) else {
            let host = |_| {
                Ok(Lane(Kind::Host(host::Pages::new(
                    bytes.next_multiple_of(Lane::ALIGN),
                )?)))
            };
            return (0..lanes).map(host).collect();
        };
        let wanted = staging_bytes(lanes, bytes)?;
        let prepared = memory.and_then(|memory| memory.0);
        let mut staging = match prepared.filter(|staging| staging.bytes() >= wanted) {
            Some(staging) => staging,
            None => cuda::Staging::fault_in(wanted)?,
        };
        staging.register(first.uuid())?;
        let mut uuids: Vec<_> = devices.iter().map(Device::uuid).collect();
        uuids.sort_unstable();
        uuids.dedup();
        let bytes = bytes.next_multiple_of(Lane::ALIGN);
        let lanes = cuda::Lane::open(&Arc::new(staging), &uuids, lanes, CUDA_BUFFERS, bytes);
        let lanes = lanes.map_err(|error| MemoryError::cuda(first.uuid(), wanted as u64, error))?;
        Ok(lanes.into_iter().map(|lane| Lane(Kind::Cuda(lane))).collect())
    }

    /// The buffer to fill next, once nobody reads it any more.
    pub fn next_buffer(&mut self) -> Result<&mut [u8], MemoryError> {
        match &mut self.0 {
            Kind::Host(buffer) => Ok(buffer.bytes_mut()),
            Kind::Cuda(lane) => Ok(lane.next_buffer()?),
        }
    }

    /// The buffer as it was filled.
    pub fn buffer(&self) -> &[u8] {
        match &self.0 {
            Kind::Host(buffer) => buffer.bytes(),
            Kind::Cuda(lane) => lane.buffer(),
        }
    }

    /// Copies a part of the buffer to byte `offset` of a region.
    ///
    /// # Errors
    ///
    /// Those of [`Region::write`].
    ///
    /// # Panics
    ///
    /// When `from` leaves the buffer.
    pub fn write(&mut self, region: &Region, offset: u64, from: Range<usize>) -> Result<(), MemoryError> {
        match (&mut self.0, region.memory()) {
            (Kind::Cuda(lane), Memory::Cuda(memory)) => {
                region.check(offset, from.len() as u64)?;
                let written = lane.write(region.device(), memory, offset, from);
                written.map_err(|error| region.failed(error))
            }
            _ => region.write(offset, &self.buffer()[from]),
        }
    }

    /// Copies rows of the buffer, from byte `from` on.
    ///
    /// # Errors
    ///
    /// Those of [`Region::write_2d`].
    ///
    /// # Panics
    ///
    /// When `from` leaves the buffer.
    pub fn write_2d(&mut self, region: &Region, from: usize, rows: Rows) -> Result<(), MemoryError> {
        match (&mut self.0, region.memory()) {
            (Kind::Cuda(lane), Memory::Cuda(memory)) => {
                let source = &lane.buffer()[from..];
                if !region.check_rows(source.len(), &rows)? {
                    return Ok(());
                }
                let written = lane.write_rows(region.device(), memory, from, &rows);
                written.map_err(|error| region.failed(error))
            }
            _ => region.write_2d(&self.buffer()[from..], rows),
        }
    }

    /// Waits until everything has arrived.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Cuda`]: what was copied may not have arrived.
    pub fn finish(&mut self) -> Result<(), MemoryError> {
        match &mut self.0 {
            Kind::Host(_) => Ok(()),
            Kind::Cuda(lane) => Ok(lane.finish()?),
        }
    }
}
