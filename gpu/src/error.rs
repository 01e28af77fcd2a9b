//! What can be wrong with device memory.

use crate::cuda::CudaError;
use rustix::io::Errno;
use weightd_core::content::{DeviceUuid, HandleKind};

/// Why memory could not be had, filled, exported or imported.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum MemoryError {
    /// The device, or a limit on this process, leaves no room.
    #[error("no room for {bytes} bytes: {why}; free memory, raise the limit or load less")]
    OutOfMemory { bytes: u64, why: String },
    /// An access outside the region.
    #[error("{count} bytes at {offset} leave the region of {bytes} bytes; check the layout")]
    OutOfBounds { offset: u64, count: u64, bytes: u64 },
    /// Rows that are not all in their source, or that overlap in their destination.
    #[error(
        "{rows} rows of {width} bytes, {src_pitch} apart in {src} bytes and {dst_pitch} apart in the region, \
         leave their source or overlap; check the layout"
    )]
    Rows {
        rows: usize,
        width: usize,
        src_pitch: usize,
        src: usize,
        dst_pitch: u64,
    },
    /// A descriptor that is no memfd, or whose bytes may still change.
    #[error("the descriptor is no sealed memfd (seals {seals:#x}); the publisher must seal before it sends")]
    NotSealed { seals: u32 },
    /// Memory of another size than was stated.
    #[error("the memory has {actual} bytes where {stated} were stated; publish it anew")]
    Size { stated: u64, actual: u64 },
    /// Sealed bytes of more than the reader allows.
    #[error("the sealed bytes are {actual}, over the cap of {cap}; publish less")]
    TooLarge { actual: u64, cap: u64 },
    /// A kind of memory that this machine or this build cannot map.
    #[error("memory of kind {handle:?} on device {device} cannot be mapped here; run where that device is")]
    Unsupported { handle: HandleKind, device: DeviceUuid },
    /// The memory is of another device than was stated.
    #[error("the memory is not on device {device}, which its publisher stated; publish it anew")]
    OtherDevice { device: DeviceUuid },
    /// The CUDA driver, or a device of it.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A system call failed in a way that nothing above names.
    #[error("{call} failed: {source}; see its manual page")]
    System { call: &'static str, source: Errno },
}

impl MemoryError {
    /// For `map_err`: which call failed.
    pub(crate) fn system(call: &'static str) -> impl Fn(Errno) -> MemoryError {
        move |source| MemoryError::System { call, source }
    }

    /// What the driver said about `bytes` bytes on a device.
    pub(crate) fn cuda(device: DeviceUuid, bytes: u64, error: CudaError) -> MemoryError {
        if !error.is_out_of_memory() {
            return MemoryError::Cuda(error);
        }
        let free = match crate::cuda::memory(device) {
            Ok((free, total)) => format!("{free} of {total} bytes are free"),
            Err(error) => format!("what is free cannot be told: {error}"),
        };
        MemoryError::OutOfMemory {
            bytes,
            why: format!("device {device}: {error}, {free}"),
        }
    }
}
