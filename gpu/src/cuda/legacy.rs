//! Legacy CUDA IPC, for memory that a process allocated itself with `cuMemAlloc`.
//!
//! Such memory lives as long as its publisher: what was opened before the publisher's death stays
//! readable, opening it afterwards fails. (CUDA driver API, `cuIpcGetMemHandle`.)

use super::context::Context;
use super::driver::{CudaError, check};
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use weightd_core::content::DeviceUuid;
use weightd_core::content::manifest::LegacyHandle;

/// What another process needs to open memory of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LegacyExport {
    /// The handle of the allocation, and where in it the memory starts.
    pub handle: LegacyHandle,
    /// The size of the whole allocation in bytes.
    pub allocation_bytes: u64,
}

/// Exports the allocation that holds device address `address`, of `device`.
///
/// # Errors
/// Where the address is in no allocation of `cuMemAlloc`.
pub fn export(device: DeviceUuid, address: u64) -> Result<LegacyExport, CudaError> {
    let context = Context::of(device)?;
    let _entered = context.enter()?;
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: both take one number; the driver checks the address.
    check("cuMemGetAddressRange", unsafe {
        sys::cuMemGetAddressRange_v2(&mut base, &mut bytes, address)
    })?;
    let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: `handle` takes 64 bytes, and `base` is an allocation's start.
    check("cuIpcGetMemHandle", unsafe {
        sys::cuIpcGetMemHandle(&mut handle, base)
    })?;
    let handle = LegacyHandle {
        handle: handle.reserved.map(|byte| byte as u8),
        offset: address - base,
    };
    Ok(LegacyExport {
        handle,
        allocation_bytes: bytes as u64,
    })
}

/// An allocation of another process, opened once in this one, however many hold it.
#[derive(Debug)]
pub(crate) struct Opened {
    context: Arc<Context>,
    handle: [u8; 64],
    base: u64,
    bytes: u64,
}

/// The allocations that this process has open, with their address and how many hold them: the driver
/// gives the same address for a second open, and closes it at the first close.
static OPEN: Mutex<BTreeMap<[u8; 64], (u64, usize)>> = Mutex::new(BTreeMap::new());

impl Opened {
    /// Opens the allocation, or joins whoever has it open.
    pub fn open(device: DeviceUuid, handle: &LegacyHandle) -> Result<Arc<Opened>, CudaError> {
        let context = Context::of(device)?;
        let _entered = context.enter()?;
        let handle = handle.handle;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let base = match open.get_mut(&handle) {
            Some((base, holders)) => {
                *holders += 1;
                *base
            }
            None => {
                let base = open_handle(&handle)?;
                open.insert(handle, (base, 1));
                base
            }
        };
        drop(open);
        let mut opened = Opened {
            context,
            handle,
            base,
            bytes: 0,
        };
        let (mut start, mut bytes) = (0, 0);
        // SAFETY: both take one number.
        check("cuMemGetAddressRange", unsafe {
            sys::cuMemGetAddressRange_v2(&mut start, &mut bytes, base)
        })?;
        opened.bytes = bytes as u64;
        Ok(Arc::new(opened))
    }

    /// The device address of the allocation's first byte, in this process.
    pub fn address(&self) -> u64 {
        self.base
    }

    /// The size of the allocation in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

fn open_handle(handle: &[u8; 64]) -> Result<u64, CudaError> {
    let raw = sys::CUipcMemHandle {
        reserved: handle.map(|byte| byte as std::ffi::c_char),
    };
    let lazy = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
    let mut base = 0;
    // SAFETY: `base` takes one address; the driver checks the handle, whatever its bytes are.
    check("cuIpcOpenMemHandle", unsafe {
        sys::cuIpcOpenMemHandle_v2(&mut base, raw, lazy)
    })?;
    Ok(base)
}

impl Drop for Opened {
    fn drop(&mut self) {
        // Held while closing, so that nobody joins what is about to be closed.
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((_, holders)) = open.get_mut(&self.handle) else {
            return;
        };
        *holders -= 1;
        if *holders == 0 {
            open.remove(&self.handle);
            if let Ok(_entered) = self.context.enter() {
                // SAFETY: opened once, and this is its last holder.
                let _ = unsafe { sys::cuIpcCloseMemHandle(self.base) };
            }
        }
    }
}
