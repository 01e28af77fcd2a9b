//! What a cache serves, in words that candle knows.

// Nobody reads addresses of a GPU where candle is built without.
#![cfg_attr(not(feature = "cuda"), allow(dead_code))]

use candle_core::DType;

/// One tensor that is in memory already. Its elements are in row-major order, without gaps.
#[derive(Clone, Debug)]
pub struct Weight<'a> {
    pub name: &'a str,
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub memory: Memory<'a>,
}

/// Where the elements of a tensor are.
#[derive(Clone, Copy, Debug)]
pub enum Memory<'a> {
    Host(&'a [u8]),
    Device(DeviceAddress),
}

/// Memory of a CUDA device, which stays mapped and unchanged for as long as anybody uses a tensor over it.
#[derive(Clone, Copy, Debug)]
pub struct DeviceAddress(u64);

impl DeviceAddress {
    /// # Safety
    ///
    /// All elements of the tensor are at `address`, and for as long as a tensor over them may be used, also by
    /// work that the device has yet to do, nobody unmaps or writes them.
    pub unsafe fn new(address: u64) -> DeviceAddress {
        DeviceAddress(address)
    }

    pub fn get(self) -> u64 {
        self.0
    }
}
