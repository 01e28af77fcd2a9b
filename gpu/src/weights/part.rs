//! Parts of tensors, at their place in memory.

use super::{TensorView, dims, pieces};
use std::ops::Range;
use weightd_core::content::manifest::{MAX_DIMS, Tensor};

impl<'a> TensorView<'a> {
    /// Element `at` of the outermost dimension, without that dimension: of shape `[E, M, N]` one
    /// `[M, N]`. It keeps the tensor's name.
    ///
    /// # Panics
    ///
    /// When there is no such element, or it does not lie in whole bytes.
    pub fn index(&self, at: u64) -> TensorView<'a> {
        let Tensor {
            name, shape, strides, ..
        } = self.tensor;
        assert!(
            shape.first().is_some_and(|&size| at < size),
            "{name} of shape {shape:?} has no element {at} of dimension 0"
        );
        let mut part = *self;
        (part.tensor.shape, part.tensor.strides) = (&shape[1..], &strides[1..]);
        part.tensor.offset = part.offset_from(at, strides[0]);
        part
    }

    /// The elements of which the index of dimension `dim` is in `range`. They keep the tensor's name.
    ///
    /// # Panics
    ///
    /// When the tensor has no such dimension or range of it, or the part does not lie in whole bytes.
    pub fn narrow(&self, dim: usize, range: Range<u64>) -> Part<'a> {
        let Tensor {
            name, shape, strides, ..
        } = self.tensor;
        let size = shape.get(dim);
        assert!(
            size.is_some_and(|&size| range.start <= range.end && range.end <= size),
            "{name} of shape {shape:?} has no {range:?} of dimension {dim}"
        );
        let mut narrowed = [0; MAX_DIMS];
        narrowed[..shape.len()].copy_from_slice(shape);
        narrowed[dim] = range.end - range.start;
        let mut part = Part {
            of: *self,
            shape: narrowed,
        };
        part.of.tensor.offset = part.view().offset_from(range.start, strides[dim]);
        part
    }

    /// Where this view starts when moved on by `steps` of `stride`, in bytes of the region.
    fn offset_from(&self, steps: u64, stride: u64) -> u64 {
        if self.elements() == 0 {
            // The strides of an empty view are unchecked, and lead nowhere.
            return self.offset;
        }
        let width = self.dtype.bits();
        let start = steps * stride * width;
        let (piece, outer) = pieces(self);
        let whole = |bits: u64| bits.is_multiple_of(8);
        let mut repeats = dims(self).take(outer);
        assert!(
            whole(start) && whole(piece * width) && repeats.all(|(_, stride)| whole(stride * width)),
            "a part of {} with shape {:?} starts or ends inside a byte",
            self.name,
            self.shape
        );
        self.offset + start / 8
    }
}

/// A range of one dimension of a tensor; see [`TensorView::narrow`].
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// Has the strides and the start of the part, and the shape of the whole.
    of: TensorView<'a>,
    shape: [u64; MAX_DIMS],
}

impl Part<'_> {
    /// The part as a view of its own, at its place in the memory of the whole.
    pub fn view(&self) -> TensorView<'_> {
        let mut view = self.of;
        view.tensor.shape = &self.shape[..self.of.shape.len()];
        view
    }
}
