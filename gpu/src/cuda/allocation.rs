//! Device memory of this process alone.

use super::context::Context;
use super::driver::{CudaError, check};
use super::range::read;
use cudarc::driver::sys;
use std::sync::Arc;
use weightd_core::content::DeviceUuid;

/// Device memory of this process, allocated as engines do; freed on drop.
#[derive(Debug)]
pub struct Allocation {
    context: Arc<Context>,
    address: u64,
    bytes: u64,
}

impl Allocation {
    /// Takes `bytes` bytes of `device`.
    ///
    /// # Errors
    /// Those of `cuMemAlloc`.
    pub fn new(device: DeviceUuid, bytes: u64) -> Result<Allocation, CudaError> {
        let context = Context::of(device)?;
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: `address` takes one address. The driver refuses to allocate nothing, so one byte is
        // taken then.
        check("cuMemAlloc", unsafe {
            sys::cuMemAlloc_v2(&mut address, (bytes as usize).max(1))
        })?;
        Ok(Allocation {
            context,
            address,
            bytes,
        })
    }

    /// The device address of its first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Copies `source` to byte `offset`, and waits for it.
    ///
    /// # Errors
    /// Those of `cuMemcpyHtoD`.
    ///
    /// # Panics
    /// When `source` leaves the allocation.
    pub fn write(&self, offset: u64, source: &[u8]) -> Result<(), CudaError> {
        self.check(offset, source.len());
        let _entered = self.context.enter()?;
        // SAFETY: inside the allocation, as just checked; the call returns when the copy is done.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(self.address + offset, source.as_ptr().cast(), source.len())
        })
    }

    /// Copies from byte `offset` on to the host, and waits for it.
    ///
    /// # Errors
    /// Those of `cuMemcpyDtoH`.
    ///
    /// # Panics
    /// When that leaves the allocation.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), CudaError> {
        self.check(offset, into.len());
        read(&self.context, self.address + offset, into)
    }

    fn check(&self, offset: u64, count: usize) {
        let end = offset.checked_add(count as u64);
        let inside = end.is_some_and(|end| end <= self.bytes);
        assert!(
            inside,
            "{count} bytes at {offset} leave an allocation of {}",
            self.bytes
        );
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: this value's own allocation.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}
