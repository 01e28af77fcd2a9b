//! Device memory that is being filled, and its way into another process.

use super::context::Context;
use super::copy;
use super::driver::{CudaError, check};
use super::range::{Allocation, Range, location};
use crate::region::Rows;
use cudarc::driver::sys::{self, CUmemAccess_flags, CUmemAllocationHandleType};
use rustix::io::{FdFlags, fcntl_setfd};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use weightd_core::content::DeviceUuid;

const POSIX: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// One allocation, mapped for writing.
#[derive(Debug)]
pub(crate) struct Region {
    range: Range,
    allocation: Allocation,
}

impl Region {
    /// Takes `bytes` bytes, rounded up to the device's granularity (2 MiB).
    pub fn allocate(device: DeviceUuid, bytes: u64) -> Result<Region, CudaError> {
        let context = Context::of(device)?;
        let _entered = context.enter()?;
        let properties = properties(context.ordinal());
        let bytes = round_up(&properties, bytes)?;
        let mut handle = 0;
        // SAFETY: `handle` takes a handle, and the properties are complete. The kind of descriptor is
        // asked for here, without which an export would fail.
        check("cuMemCreate", unsafe {
            sys::cuMemCreate(&mut handle, bytes, &properties, 0)
        })?;
        let allocation = Allocation {
            context,
            handle,
            bytes,
        };
        let range = Range::map(&allocation, CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE)?;
        Ok(Region { range, allocation })
    }

    pub fn address(&self) -> u64 {
        self.range.address()
    }

    pub fn context(&self) -> &Arc<Context> {
        self.range.context()
    }

    /// Copies from any host memory and waits for it. The caller has checked the bounds.
    pub fn write(&self, offset: u64, source: &[u8]) -> Result<(), CudaError> {
        let _entered = self.context().enter()?;
        // SAFETY: the destination is inside the region (checked by the caller) and the source is
        // `source`; the call returns when the copy is done.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(self.address() + offset, source.as_ptr().cast(), source.len())
        })
    }

    /// As [`write`](Region::write), row by row.
    pub fn write_rows(&self, source: &[u8], rows: &Rows) -> Result<(), CudaError> {
        let _entered = self.context().enter()?;
        let copy = copy_2d(source.as_ptr(), self.address(), rows);
        // SAFETY: the caller has checked that all rows are in `source` and in the region; the call
        // returns when the copy is done.
        check("cuMemcpy2D", unsafe { sys::cuMemcpy2DUnaligned_v2(&copy) })
    }

    /// Copies rows from device address `from` on, and waits for them, also when it fails.
    ///
    /// # Safety
    ///
    /// All rows must be memory that this device can read, until this returns; the caller has checked
    /// that they are in the region.
    pub unsafe fn copy_rows(&self, from: u64, rows: &Rows) -> Result<(), CudaError> {
        let entered = self.context().enter()?;
        // SAFETY: as the caller vouches; the region's context is current.
        let started = unsafe { copy::start(self.address(), from, rows) };
        drop(entered);
        started.and(copy::wait(self.context()))
    }

    pub fn zero(&self, offset: u64, count: u64) -> Result<(), CudaError> {
        let _entered = self.context().enter()?;
        // SAFETY: inside the region, which the caller has checked.
        check("cuMemsetD8", unsafe {
            sys::cuMemsetD8_v2(self.address() + offset, 0, count as usize)
        })
    }

    /// The descriptor that keeps the memory alive. The region's own mapping goes.
    pub fn export(self) -> Result<OwnedFd, CudaError> {
        let _entered = self.context().enter()?;
        // SAFETY: a null stream and no other argument: waits for all work of this context, so that
        // what was written is there before anybody maps it.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })?;
        let mut fd = -1;
        // SAFETY: for this kind of handle the driver writes one int.
        check("cuMemExportToShareableHandle", unsafe {
            sys::cuMemExportToShareableHandle((&raw mut fd).cast(), self.allocation.handle, POSIX, 0)
        })?;
        // SAFETY: the driver made this descriptor for us; nobody else closes it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // It goes to checked peers only, never through an exec. Failing is not possible for a
        // descriptor that is open.
        let _ = fcntl_setfd(&fd, FdFlags::CLOEXEC);
        Ok(fd)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context().enter() {
            // A lane's copies may still be on their way into it.
            // SAFETY: no arguments.
            let _ = unsafe { sys::cuCtxSynchronize() };
        }
    }
}

/// Maps what a descriptor stands for, read-only. `Ok(None)`: it is memory of another device.
pub(crate) fn import(fd: OwnedFd, device: DeviceUuid, bytes: u64) -> Result<Option<Range>, CudaError> {
    import_for(
        fd,
        device,
        bytes,
        CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
    )
}

/// Stores a byte in the memory that a descriptor stands for: what whoever holds one can do. False where it
/// is memory of another device.
///
/// # Errors
/// What the driver says.
///
/// # Panics
/// When the byte is outside.
#[cfg(feature = "testing")]
pub fn overwrite(fd: OwnedFd, device: DeviceUuid, bytes: u64, at: u64, byte: u8) -> Result<bool, CudaError> {
    assert!(at < bytes, "byte {at} of {bytes}");
    let access = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let Some(range) = import_for(fd, device, bytes, access)? else {
        return Ok(false);
    };
    let _entered = range.context().enter()?;
    // SAFETY: the byte lies in the range, which is mapped for writing.
    check("cuMemsetD8", unsafe {
        sys::cuMemsetD8_v2(range.address() + at, byte, 1)
    })?;
    // SAFETY: no arguments.
    check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })?;
    Ok(true)
}

fn import_for(
    fd: OwnedFd,
    device: DeviceUuid,
    bytes: u64,
    access: CUmemAccess_flags,
) -> Result<Option<Range>, CudaError> {
    let context = Context::of(device)?;
    let _entered = context.enter()?;
    let mut handle = 0;
    // SAFETY: for this kind of handle the "pointer" is the descriptor's number, and the driver takes
    // a hold of its own on what it stands for.
    check("cuMemImportFromShareableHandle", unsafe {
        sys::cuMemImportFromShareableHandle(&mut handle, fd.as_raw_fd() as usize as *mut _, POSIX)
    })?;
    drop(fd);
    let bytes = round_up(&properties(context.ordinal()), bytes)?;
    let allocation = Allocation {
        context,
        handle,
        bytes,
    };
    let mut found = properties(0);
    // SAFETY: `found` takes one set of properties; the handle is ours.
    check("cuMemGetAllocationPropertiesFromHandle", unsafe {
        sys::cuMemGetAllocationPropertiesFromHandle(&mut found, allocation.handle)
    })?;
    if found.location != location(allocation.context.ordinal()) {
        return Ok(None);
    }
    Range::map(&allocation, access).map(Some)
}

/// Rows from host memory at `source` into a region at device address `region`.
pub(super) fn copy_2d(source: *const u8, region: u64, rows: &Rows) -> sys::CUDA_MEMCPY2D {
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: source.cast(),
        srcDevice: 0,
        srcArray: std::ptr::null_mut(),
        srcPitch: rows.src_pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: std::ptr::null_mut(),
        dstDevice: region + rows.offset,
        dstArray: std::ptr::null_mut(),
        dstPitch: rows.dst_pitch as usize,
        WidthInBytes: rows.width,
        Height: rows.rows,
    }
}

fn properties(ordinal: i32) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: POSIX,
        location: location(ordinal),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// An allocation is never empty: a region of no bytes takes one granule.
fn round_up(properties: &sys::CUmemAllocationProp, bytes: u64) -> Result<usize, CudaError> {
    let mut granularity = 0;
    let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: `granularity` takes one number.
    check("cuMemGetAllocationGranularity", unsafe {
        sys::cuMemGetAllocationGranularity(&mut granularity, properties, minimum)
    })?;
    let bytes = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
    Ok(bytes
        .checked_next_multiple_of(granularity)
        .unwrap_or(usize::MAX - granularity + 1))
}
