//! The primary context of a device, shared by all that use the device in this process.

use super::driver::{CudaError, check, devices};
use cudarc::driver::sys;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use weightd_core::content::DeviceUuid;

/// A hold on a device's primary context: the one that PyTorch and the CUDA runtime use too, so that
/// no second one takes memory.
#[derive(Debug)]
pub(crate) struct Context {
    ordinal: i32,
    context: sys::CUcontext,
}

impl Context {
    /// The context of the device with this UUID, as this process counts devices.
    pub fn of(uuid: DeviceUuid) -> Result<Arc<Context>, CudaError> {
        static HELD: Mutex<BTreeMap<i32, Weak<Context>>> = Mutex::new(BTreeMap::new());
        let ordinal = devices()?.iter().position(|device| *device == uuid);
        let ordinal = ordinal.ok_or(CudaError::NotVisible { uuid })? as i32;
        let held = || HELD.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = held().get(&ordinal).and_then(Weak::upgrade) {
            return Ok(context);
        }
        // Without the lock, so that several devices can start at once: it takes a tenth of a second.
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` takes a handle; the ordinal is one that the driver listed.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&mut context, ordinal)
        })?;
        let context = Arc::new(Context { ordinal, context });
        // Where another thread was faster, each has a hold of its own on the same context.
        held().entry(ordinal).or_insert_with(|| Arc::downgrade(&context));
        Ok(context)
    }

    /// The device's ordinal in this process.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Makes it the calling thread's, as nearly every call of the driver wants, until the returned value
    /// is dropped: an engine that works on another device finds its own context again.
    pub fn enter(self: &Arc<Context>) -> Result<Entered, CudaError> {
        // SAFETY: the context is retained for as long as `self` lives.
        check("cuCtxPushCurrent", unsafe {
            sys::cuCtxPushCurrent_v2(self.context)
        })?;
        Ok(Entered {
            _context: Arc::clone(self),
            _thread: PhantomData,
        })
    }
}

/// A context that is the calling thread's.
#[derive(Debug)]
pub(crate) struct Entered {
    _context: Arc<Context>,
    /// It must be left on the thread that entered it.
    _thread: PhantomData<*const ()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut left = std::ptr::null_mut();
        // SAFETY: `left` takes a handle; this thread's topmost context is the one that was entered,
        // since guards are dropped in the reverse order of their making.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut left) };
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: balances the retain of `of`. Whoever uses the context otherwise has a hold of its own.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.ordinal) };
    }
}

// SAFETY: a context handle may be used from any thread (CUDA driver API, "Context Management").
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Context {}

/// Free and total bytes of a device.
pub(crate) fn memory(device: DeviceUuid) -> Result<(u64, u64), CudaError> {
    let context = Context::of(device)?;
    let _entered = context.enter()?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: both take one number each.
    check("cuMemGetInfo", unsafe {
        sys::cuMemGetInfo_v2(&mut free, &mut total)
    })?;
    Ok((free as u64, total as u64))
}
