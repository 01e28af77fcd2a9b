//! Filling a region with what is on its device already.

#![allow(unsafe_code)] // The source is an address that the caller vouches for.

use super::{Memory, Region, Rows};
use crate::MemoryError;

/// For engines that publish: what they hold was loaded, fused or quantized by them, and is copied at
/// the speed of the device.
impl Region {
    /// Copies `bytes` bytes from device address `address` to byte `offset`, and waits for it. For a
    /// region of host memory the address is one of this process.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfBounds`], before anything is written; [`MemoryError::Cuda`] where the driver
    /// finds no memory at the address.
    ///
    /// # Safety
    ///
    /// All of `address..address + bytes` must be memory of this process that the region's device (for
    /// host memory: this thread) can read, is not the region's own, and is neither freed nor written
    /// before this returns. Work of the device that writes it must be done before the call: a stream
    /// that does not wait for the default stream is not waited for.
    ///
    /// # Examples
    ///
    /// ```
    /// # use weightd_gpu::{Device, Mapping};
    /// # fn main() -> Result<(), weightd_gpu::MemoryError> {
    /// let device = Device::host(0);
    /// let ours: Vec<f32> = vec![1.0, 2.0, 3.0];
    ///
    /// let region = device.allocate(256 + 12)?;
    /// // SAFETY: `ours` has 12 bytes, and nobody else knows of it.
    /// unsafe { region.copy_from_device(256, ours.as_ptr() as u64, 12)? };
    ///
    /// let export = region.export()?;
    /// let sent = export.try_clone()?; // for the daemon
    /// # drop(sent);
    /// let mapping = Mapping::import(export.handle, export.fd, export.bytes, device.uuid())?;
    /// assert_eq!(mapping.host().unwrap()[256..260], 1.0f32.to_ne_bytes());
    /// # Ok(())
    /// # }
    /// ```
    pub unsafe fn copy_from_device(&self, offset: u64, address: u64, bytes: u64) -> Result<(), MemoryError> {
        self.check(offset, bytes)?;
        // SAFETY: the caller vouches for these bytes, and one row is exactly them.
        unsafe { self.copy_rows_from_device(address, Rows::one(offset, bytes)) }
    }

    /// Copies rows, the first from device address `address`, and waits for them: for a tensor that
    /// does not lie packed.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfBounds`] where rows leave the region, [`MemoryError::Rows`] where they
    /// overlap in it; both before anything is written. [`MemoryError::Cuda`] where the driver finds no
    /// memory at the address.
    ///
    /// # Safety
    ///
    /// As for [`copy_from_device`](Region::copy_from_device), for everything from the first row's start
    /// to the last row's end, what lies between rows included.
    pub unsafe fn copy_rows_from_device(&self, address: u64, rows: Rows) -> Result<(), MemoryError> {
        if !self.check_rows(usize::MAX, &rows)? {
            return Ok(());
        }
        match &self.memory {
            Memory::Host(region) => {
                let count = (rows.rows - 1) * rows.src_pitch + rows.width;
                // SAFETY: the caller has all of it readable and unchanged until this returns. It is not
                // null, since there is memory at it, and `check_rows` found that the count does not
                // overflow.
                let source = unsafe { std::slice::from_raw_parts(address as *const u8, count) };
                region.write_rows(source, &rows)
            }
            Memory::Cuda(region) => {
                // SAFETY: the caller has all of the source readable; `check_rows` found all of the
                // destination in the region.
                let copied = unsafe { region.copy_rows(address, &rows) };
                copied.map_err(|error| self.failed(error))
            }
        }
    }
}
