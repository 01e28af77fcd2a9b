//! Reading one byte at each of many addresses, by the device itself.

use super::context::Context;
use super::driver::{CudaError, check};
use super::range::read;
use cudarc::driver::sys;
use std::ffi::CString;
use std::marker::PhantomData;
use std::sync::Arc;
use weightd_core::content::DeviceUuid;

/// A kernel, as text that every driver since CUDA 11 compiles: thread `i` copies the byte at
/// `addresses[i]` to `out[i]`.
const KERNEL: &str = "
.version 7.0
.target sm_52
.address_size 64
.visible .entry touch(.param .u64 addresses, .param .u64 out, .param .u32 count)
{
    .reg .pred %p;
    .reg .b32 %r<6>;
    .reg .b64 %d<8>;
    ld.param.u64 %d1, [addresses];
    ld.param.u64 %d2, [out];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p, %r5, %r1;
    @%p ret;
    cvta.to.global.u64 %d1, %d1;
    cvta.to.global.u64 %d2, %d2;
    mul.wide.u32 %d3, %r5, 8;
    add.u64 %d4, %d1, %d3;
    ld.global.u64 %d5, [%d4];
    cvta.to.global.u64 %d5, %d5;
    ld.global.u8 %r1, [%d5];
    cvt.u64.u32 %d6, %r5;
    add.u64 %d7, %d2, %d6;
    st.global.u8 [%d7], %r1;
    ret;
}
";

/// One byte of device memory that stays there for as long as what it is borrowed from.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    address: u64,
    memory: PhantomData<&'a ()>,
}

impl<'a> Place<'a> {
    /// The caller has checked that the byte is in device memory which the borrow keeps.
    pub(crate) fn new(address: u64) -> Place<'a> {
        Place {
            address,
            memory: PhantomData,
        }
    }
}

/// The kernel, ready to run on one device.
#[derive(Debug)]
pub struct Touch {
    context: Arc<Context>,
    module: sys::CUmodule,
    function: sys::CUfunction,
}

impl Touch {
    /// Compiles the kernel for a device.
    ///
    /// # Errors
    /// What the driver says of the device or the kernel.
    pub fn new(device: DeviceUuid) -> Result<Touch, CudaError> {
        let context = Context::of(device)?;
        let _entered = context.enter()?;
        let text = CString::new(KERNEL).expect("the kernel has no zero byte");
        let mut module = std::ptr::null_mut();
        // SAFETY: `module` takes a handle; the text is terminated.
        check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&mut module, text.as_ptr().cast())
        })?;
        let mut touch = Touch {
            context,
            module,
            function: std::ptr::null_mut(),
        };
        // SAFETY: `function` takes a handle; the name is terminated.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&mut touch.function, module, c"touch".as_ptr())
        })?;
        Ok(touch)
    }

    /// The byte at each place, in their order, as the device reads it.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS` for memory of a device that this one cannot reach, or memory that
    /// was lost; this process cannot use the device after that.
    pub fn read(&self, places: &[Place<'_>]) -> Result<Vec<u8>, CudaError> {
        let addresses: Vec<u64> = places.iter().map(|place| place.address).collect();
        let addresses = addresses.as_slice();
        let mut bytes = vec![0; addresses.len()];
        if addresses.is_empty() {
            return Ok(bytes);
        }
        let _entered = self.context.enter()?;
        let (listed, count) = (size_of_val(addresses), addresses.len() as u32);
        let mut memory = 0;
        // SAFETY: `memory` takes one address. The list comes first, then the bytes.
        check("cuMemAlloc", unsafe {
            sys::cuMemAlloc_v2(&mut memory, listed + addresses.len())
        })?;
        let result = self.run(memory, addresses, memory + listed as u64, count);
        let result = result.and_then(|()| read(&self.context, memory + listed as u64, &mut bytes));
        // SAFETY: the allocation above, which nothing uses any more.
        let _ = unsafe { sys::cuMemFree_v2(memory) };
        result.map(|()| bytes)
    }

    fn run(&self, list: u64, addresses: &[u64], out: u64, count: u32) -> Result<(), CudaError> {
        // SAFETY: the list has room for all addresses.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(list, addresses.as_ptr().cast(), size_of_val(addresses))
        })?;
        const THREADS: u32 = 256;
        let mut parameters = [
            (&raw const list).cast_mut().cast(),
            (&raw const out).cast_mut().cast(),
            (&raw const count).cast_mut().cast(),
        ];
        // SAFETY: three parameters of the kernel's types, alive during the call; the kernel writes
        // `count` bytes from `out` on, which are there, and reads what the addresses say, which is memory
        // that the caller's borrows keep.
        check("cuLaunchKernel", unsafe {
            sys::cuLaunchKernel(
                self.function,
                count.div_ceil(THREADS),
                1,
                1,
                THREADS,
                1,
                1,
                0,
                std::ptr::null_mut(),
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })?;
        // SAFETY: no arguments.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }
}

impl Drop for Touch {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: this value's own module, which runs nothing now.
            let _ = unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Touch {}
