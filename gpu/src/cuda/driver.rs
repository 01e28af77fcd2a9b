//! The driver: found once, and every call of it checked.

use cudarc::driver::sys::{self, CUresult};
use std::ffi::CStr;
use std::sync::OnceLock;
use weightd_core::content::DeviceUuid;

/// The oldest driver interface that has all that is called here, as `cuDriverGetVersion` says it: 11.4,
/// for `cuDeviceGetUuid_v2`. A symbol that is missing would be a panic.
const OLDEST: i32 = 11040;

/// Why the CUDA driver did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum CudaError {
    /// There is no driver.
    #[error("no CUDA driver on this machine (libcuda.so.1): install the NVIDIA driver, or use --device cpu")]
    NoDriver,
    /// The driver is too old.
    #[error("the CUDA driver speaks version {found} and {OLDEST} is needed: install a newer NVIDIA driver")]
    TooOld { found: i32 },
    /// There is a driver and no device.
    #[error("the CUDA driver finds no device: check nvidia-smi and CUDA_VISIBLE_DEVICES")]
    NoDevice,
    /// A device that this process does not see.
    #[error("this process sees no CUDA device {uuid}: check CUDA_VISIBLE_DEVICES")]
    NotVisible { uuid: DeviceUuid },
    /// A call failed.
    #[error("{call} failed with {name} ({text}): {advice}")]
    Call {
        call: &'static str,
        code: u32,
        name: String,
        text: String,
        advice: &'static str,
    },
}

impl CudaError {
    /// Whether the device has too little memory.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        matches!(self, CudaError::Call { code, .. } if *code == CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32)
    }
}

/// Finds and initializes the driver, once for the process.
///
/// # Errors
/// What is missing: a driver, a new enough one, or a device.
pub fn available() -> Result<(), CudaError> {
    static FOUND: OnceLock<Result<(), CudaError>> = OnceLock::new();
    FOUND.get_or_init(find).clone()
}

fn find() -> Result<(), CudaError> {
    // cudarc panics where it finds no driver, and says so beforehand only where it loads the driver itself,
    // which another user of it in the same program may have decided otherwise.
    // SAFETY: loading libcuda runs its initializers, which is what every user of it does.
    if unsafe { libloading::Library::new("libcuda.so.1") }.is_err() {
        return Err(CudaError::NoDriver);
    }
    let mut found = 0;
    // SAFETY: `found` takes one int. This function may be called before cuInit.
    check("cuDriverGetVersion", unsafe {
        sys::cuDriverGetVersion(&mut found)
    })?;
    if found < OLDEST {
        return Err(CudaError::TooOld { found });
    }
    // SAFETY: no arguments but the flags, which must be 0.
    check("cuInit", unsafe { sys::cuInit(0) })
}

/// The UUIDs of the devices that this process sees, by ordinal.
pub(crate) fn devices() -> Result<Vec<DeviceUuid>, CudaError> {
    available()?;
    let mut count = 0;
    // SAFETY: `count` takes one int.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    if count == 0 {
        return Err(CudaError::NoDevice);
    }
    (0..count).map(uuid).collect()
}

/// The full UUID also where the device is one part of a GPU (MIG), which is what `_v2` is for.
fn uuid(ordinal: i32) -> Result<DeviceUuid, CudaError> {
    let mut device = 0;
    // SAFETY: `device` takes a handle.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, ordinal) })?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: `uuid` takes 16 bytes; the handle is the driver's.
    check("cuDeviceGetUuid_v2", unsafe {
        sys::cuDeviceGetUuid_v2(&mut uuid, device)
    })?;
    Ok(DeviceUuid(uuid.bytes.map(|byte| byte as u8)))
}

/// Turns what a call returned into an error that says what to do.
pub(crate) fn check(call: &'static str, result: CUresult) -> Result<(), CudaError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    if result == CUresult::CUDA_ERROR_NO_DEVICE {
        return Err(CudaError::NoDevice);
    }
    let name = text(result, |code, text| {
        // SAFETY: `text` takes a pointer to a static string, or null.
        unsafe { sys::cuGetErrorName(code, text) }
    });
    let text = text(result, |code, text| {
        // SAFETY: as above.
        unsafe { sys::cuGetErrorString(code, text) }
    });
    Err(CudaError::Call {
        call,
        code: result as u32,
        name,
        text,
        advice: advice(result),
    })
}

fn text(code: CUresult, ask: impl Fn(CUresult, *mut *const std::ffi::c_char) -> CUresult) -> String {
    let mut text = std::ptr::null();
    if ask(code, &mut text) != CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("code {}", code as u32);
    }
    // SAFETY: the driver gave a static, terminated string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn advice(code: CUresult) -> &'static str {
    use CUresult::*;
    match code {
        CUDA_ERROR_OUT_OF_MEMORY => "free memory on the device (nvidia-smi shows who holds it) or load less",
        CUDA_ERROR_INVALID_HANDLE | CUDA_ERROR_INVALID_CONTEXT | CUDA_ERROR_CONTEXT_IS_DESTROYED => {
            "what it stands for is gone: attach again, or load afresh"
        }
        CUDA_ERROR_NOT_SUPPORTED => "this device or its virtualization cannot share memory by descriptor",
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH | CUDA_ERROR_SYSTEM_NOT_READY => {
            "the kernel module and libcuda differ, or fabric manager is not ready: check nvidia-smi"
        }
        CUDA_ERROR_DEVICE_UNAVAILABLE => "another process has the device to itself: check its compute mode",
        CUDA_ERROR_ECC_UNCORRECTABLE | CUDA_ERROR_ILLEGAL_ADDRESS | CUDA_ERROR_LAUNCH_FAILED => {
            "the device or this process's context is broken: see dmesg, and start the process again"
        }
        CUDA_ERROR_INVALID_VALUE => "the memory is not what its publisher stated: publish it anew",
        _ => "see the CUDA driver API's description of this code",
    }
}
