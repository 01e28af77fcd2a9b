//! A range of device addresses with memory behind it.

use super::context::Context;
use super::driver::{CudaError, check};
use cudarc::driver::sys::{self, CUmemAccess_flags, CUmemGenericAllocationHandle};
use std::sync::Arc;

/// One physical allocation, held by its handle, or mapped as a whole.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub context: Arc<Context>,
    pub handle: CUmemGenericAllocationHandle,
    /// A multiple of the device's granularity.
    pub bytes: usize,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's own. Mappings and descriptors keep the memory alive.
        let _ = unsafe { sys::cuMemRelease(self.handle) };
    }
}

/// Mapped device memory; unmapped on drop.
#[derive(Debug)]
pub(crate) struct Range {
    context: Arc<Context>,
    start: sys::CUdeviceptr,
    bytes: usize,
}

impl Range {
    /// Maps all of an allocation. The mapping keeps the memory alive by itself.
    pub fn map(allocation: &Allocation, access: CUmemAccess_flags) -> Result<Range, CudaError> {
        let bytes = allocation.bytes;
        let context = Arc::clone(&allocation.context);
        let _entered = context.enter()?;
        let mut start = 0;
        // SAFETY: `start` takes an address of the driver's choice; a reservation touches no memory.
        check("cuMemAddressReserve", unsafe {
            sys::cuMemAddressReserve(&mut start, bytes, 0, 0, 0)
        })?;
        // SAFETY: the reservation is ours, has this size, and nothing is mapped in it.
        let mapped = check("cuMemMap", unsafe {
            sys::cuMemMap(start, bytes, 0, allocation.handle, 0)
        });
        if let Err(error) = mapped {
            // SAFETY: the reservation is ours and empty.
            let _ = unsafe { sys::cuMemAddressFree(start, bytes) };
            return Err(error);
        }
        let range = Range {
            context,
            start,
            bytes,
        };
        let access = sys::CUmemAccessDesc {
            location: location(range.context.ordinal()),
            flags: access,
        };
        // SAFETY: the range is mapped, and `access` is one descriptor.
        check("cuMemSetAccess", unsafe {
            sys::cuMemSetAccess(start, bytes, &access, 1)
        })?;
        Ok(range)
    }

    pub fn address(&self) -> u64 {
        self.start
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the range is mapped, as a whole and by this value alone; views of it have ended.
            let _ = unsafe { sys::cuMemUnmap(self.start, self.bytes) };
            // SAFETY: the reservation is this value's own, and empty now.
            let _ = unsafe { sys::cuMemAddressFree(self.start, self.bytes) };
        }
    }
}

/// Copies device memory to the host and waits for it. The caller has checked that all of it is inside
/// memory that it has mapped.
pub(crate) fn read(context: &Arc<Context>, address: u64, into: &mut [u8]) -> Result<(), CudaError> {
    let _entered = context.enter()?;
    // SAFETY: the source is mapped, as the caller has checked, and the destination is `into`; the call
    // returns when the copy is done.
    check("cuMemcpyDtoH", unsafe {
        sys::cuMemcpyDtoH_v2(into.as_mut_ptr().cast(), address, into.len())
    })
}

/// The device as the driver wants it said.
pub(crate) fn location(ordinal: i32) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: ordinal,
    }
}
