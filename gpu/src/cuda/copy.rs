//! Copies from memory of a device to other memory of it.

use super::allocation::Allocation;
use super::context::Context;
use super::driver::{CudaError, check};
use super::region::copy_2d;
use crate::MemoryError;
use crate::region::Rows;
use cudarc::driver::sys::{self, CUmemorytype};
use std::marker::PhantomData;
use std::sync::Arc;

/// The largest pitch that a copy of rows may have, as every device has it
/// (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const MAX_PITCH: u64 = i32::MAX as u64;

/// Device memory that stays there for as long as what it is borrowed from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span<'a> {
    address: u64,
    bytes: u64,
    memory: PhantomData<&'a ()>,
}

impl<'a> Span<'a> {
    /// The caller has checked that all of it is device memory which the borrow keeps.
    pub fn new(address: u64, bytes: u64) -> Span<'a> {
        Span {
            address,
            bytes,
            memory: PhantomData,
        }
    }
}

impl Allocation {
    /// Copies rows, those of each piece from a byte of its source on, and waits for all of them, also
    /// when one fails: when it returns, nothing is read or written any more. Sources are on the same
    /// device.
    pub(crate) fn copy<'a>(
        &self,
        pieces: impl IntoIterator<Item = (Span<'a>, u64, Rows)>,
    ) -> Result<(), MemoryError> {
        let entered = self.context().enter()?;
        let start = |(from, at, rows): (Span<'_>, u64, Rows)| {
            let left = from.bytes.saturating_sub(at) as usize;
            if !rows.check(left, self.bytes())? {
                return Ok(());
            }
            // SAFETY: all rows are in the source, which the borrow keeps, and in this allocation, as
            // just checked. The context is current, and what is started here is waited for below, while
            // both are still there.
            Ok(unsafe { start(self.address(), from.address + at, &rows) }?)
        };
        let started = pieces.into_iter().try_for_each(start);
        drop(entered);
        let finished = wait(self.context());
        started.and(finished.map_err(MemoryError::from))
    }
}

/// Starts a copy of rows from device address `from` to byte `rows.offset` from `to` on.
///
/// # Safety
///
/// The context of the device whose memory both are is the thread's. Everything that the rows say must
/// be memory there until the copy is done; the destination must be the caller's to write.
pub(super) unsafe fn start(to: u64, from: u64, rows: &Rows) -> Result<(), CudaError> {
    let pitches = [rows.src_pitch as u64, rows.dst_pitch];
    let fits = |pitch: &u64| (rows.width as u64..=MAX_PITCH).contains(pitch);
    if rows.rows > 1 && pitches.iter().all(fits) {
        let copy = sys::CUDA_MEMCPY2D {
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: std::ptr::null(),
            srcDevice: from,
            ..copy_2d(std::ptr::null(), to, rows)
        };
        // SAFETY: the caller has all rows in memory on both sides.
        return check("cuMemcpy2D", unsafe { sys::cuMemcpy2DUnaligned_v2(&copy) });
    }
    (0..rows.rows as u64).try_for_each(|row| {
        let to = to + rows.offset + row * rows.dst_pitch;
        let from = from + row * rows.src_pitch as u64;
        // SAFETY: as above, for this row.
        check("cuMemcpyDtoD", unsafe {
            sys::cuMemcpyDtoD_v2(to, from, rows.width)
        })
    })
}

/// Waits for all work of a context: copies inside a device return before they are done.
pub(super) fn wait(context: &Arc<Context>) -> Result<(), CudaError> {
    let _entered = context.enter()?;
    // SAFETY: no arguments.
    check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
}
