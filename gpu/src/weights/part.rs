//! Parts of tensors, at their place in memory.

use super::TensorView;
use super::runs::{dims, pieces};
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
        } = **self;
        assert!(
            shape.first().is_some_and(|&size| at < size),
            "{name} of shape {shape:?} has no element {at} of dimension 0"
        );
        let part = self.moved(0, &shape[1..], &strides[1..]);
        let by = part.bytes_on(at, strides[0]);
        self.moved(by, part.shape, part.strides)
    }

    /// The elements of which the index of dimension `dim` is in `range`. They keep the tensor's name.
    ///
    /// # Panics
    ///
    /// When the tensor has no such dimension or range of it, or the part does not lie in whole bytes.
    pub fn narrow(&self, dim: usize, range: Range<u64>) -> Part<'a> {
        let Tensor {
            name, shape, strides, ..
        } = **self;
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
        let by = part.view().bytes_on(range.start, strides[dim]);
        part.of = self.moved(by, shape, strides);
        part
    }

    /// How many bytes on this view starts when it is moved by `steps` of `stride`.
    fn bytes_on(&self, steps: u64, stride: u64) -> u64 {
        if self.elements() == 0 {
            // The strides of an empty view are unchecked, and lead nowhere.
            return 0;
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
        start / 8
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
        let of = &self.of;
        of.moved(0, &self.shape[..of.shape.len()], of.strides)
    }
}
