//! A tensor in memory.

use super::{Backing, Runs};
use crate::MemoryError;
use crate::cuda::Place;
use std::borrow::Cow;
use std::ops::Deref;
use weightd_core::content::manifest::Tensor;

/// A tensor and its memory. The tensor's fields are reached through it: `view.shape`.
///
/// Of these, `region` and `offset` say where its manifest has it, which is where it is unless it was
/// [cloned](super::Weights::make_writable); [`address`](TensorView::address) always says where it is.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    tensor: Tensor<'a>,
    memory: &'a Backing,
    /// Where it starts in the memory, in bytes.
    at: u64,
}

impl<'a> Deref for TensorView<'a> {
    type Target = Tensor<'a>;

    fn deref(&self) -> &Tensor<'a> {
        &self.tensor
    }
}

impl<'a> TensorView<'a> {
    /// The caller has checked that all of it is in the memory.
    pub(super) fn new(tensor: Tensor<'a>, memory: &'a Backing, at: u64) -> TensorView<'a> {
        TensorView { tensor, memory, at }
    }

    /// The address of the first element: on the host, or for the device. The views of an alias and of
    /// its tensor share it.
    pub fn address(&self) -> u64 {
        self.memory.address() + self.at
    }

    /// The first byte, for a device to read; `None` where it is host memory, or there is none.
    pub fn place(&self) -> Option<Place<'a>> {
        let readable = self.memory.span().is_some() && self.extent() > 0;
        readable.then(|| Place::new(self.address()))
    }

    /// Whether it is in memory of the engine's own, which the engine may write: on the host by
    /// [`Weights::get_mut`](super::Weights::get_mut), on a device at its address. An empty tensor has
    /// nothing that could not be written.
    pub fn is_writable(&self) -> bool {
        self.memory.is_own() || self.extent() == 0
    }

    /// The memory from the first element to the end of the last, where the host can read it.
    pub fn host(&self) -> Option<&'a [u8]> {
        Some(&self.memory.host()?[self.at as usize..][..self.extent() as usize])
    }

    /// The elements in row-major order, where the host can read them and they lie so in memory.
    pub fn contiguous(&self) -> Option<&'a [u8]> {
        self.host().filter(|_| self.is_contiguous())
    }

    /// The memory from the first element to the end of the last, copied from the device where the
    /// host cannot read it.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfMemory`] when the host has no room for a copy, [`MemoryError::Cuda`] when the
    /// device is lost.
    pub fn fetch(&self) -> Result<Cow<'a, [u8]>, MemoryError> {
        if let Some(bytes) = self.host() {
            return Ok(Cow::Borrowed(bytes));
        }
        let mut copy = Vec::new();
        let (bytes, len) = (self.extent(), self.extent() as usize);
        let room = copy.try_reserve_exact(len);
        room.map_err(|error| MemoryError::OutOfMemory {
            bytes,
            why: error.to_string(),
        })?;
        copy.resize(len, 0);
        self.memory.read(self.at, &mut copy)?;
        Ok(Cow::Owned(copy))
    }

    /// The elements in row-major order, as the longest pieces that lie so in memory, all of one size.
    /// `memory` is what [`host`](TensorView::host) or [`fetch`](TensorView::fetch) gave.
    ///
    /// # Panics
    ///
    /// When `memory` is shorter than that.
    pub fn runs<'m>(&self, memory: &'m [u8]) -> Runs<'m> {
        Runs::new(self, memory)
    }

    pub(super) fn memory(&self) -> &'a Backing {
        self.memory
    }

    /// Where it starts in its memory, in bytes.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// The same elements under another shape and strides, `by` bytes further on. The caller has checked
    /// that they are in the memory.
    pub(super) fn moved(&self, by: u64, shape: &'a [u64], strides: &'a [u64]) -> TensorView<'a> {
        let mut moved = *self;
        (moved.tensor.shape, moved.tensor.strides) = (shape, strides);
        moved.tensor.offset += by;
        moved.at += by;
        moved
    }
}
