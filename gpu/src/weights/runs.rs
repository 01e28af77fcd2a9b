//! Elements in row-major order, as the pieces that lie so in memory.

use super::TensorView;
use weightd_core::content::manifest::{MAX_DIMS, Tensor};

/// The dimensions that elements repeat over, with their strides.
pub(super) fn dims<'a>(tensor: &Tensor<'a>) -> impl DoubleEndedIterator<Item = (u64, u64)> + use<'a> {
    let dims = tensor.shape.iter().zip(tensor.strides);
    dims.map(|(size, stride)| (*size, *stride))
        .filter(|(size, _)| *size != 1)
}

/// The longest packed pieces of a view that is not empty: how many elements each has, and over how
/// many of [`dims`] they repeat.
pub(super) fn pieces(tensor: &Tensor<'_>) -> (u64, usize) {
    let (mut piece, mut outer) = (1, dims(tensor).count());
    for (size, stride) in dims(tensor).rev() {
        if stride != piece {
            break;
        }
        piece *= size;
        outer -= 1;
    }
    (piece, outer)
}

/// The pieces of a view in row-major order; see [`TensorView::runs`].
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    bytes: &'a [u8],
    /// The size of each piece, in bytes.
    piece: usize,
    /// The dimensions over which pieces repeat, outermost first.
    outer: [Axis; MAX_DIMS],
    ndim: usize,
    /// Where the next piece starts, in bytes; `None` after the last.
    next: Option<usize>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Axis {
    size: u64,
    /// In bytes.
    stride: usize,
    /// Where the next piece is, of `size`.
    at: u64,
}

impl<'a> Runs<'a> {
    pub(super) fn new(view: &TensorView<'_>, memory: &'a [u8]) -> Runs<'a> {
        let bytes = &memory[..view.extent() as usize];
        let mut runs = Runs {
            bytes,
            piece: bytes.len(),
            outer: [Axis::default(); MAX_DIMS],
            ndim: 0,
            next: (!bytes.is_empty()).then_some(0),
        };
        if view.is_contiguous() {
            return runs;
        }
        // Pieces and what is between them are whole bytes, also where an element is not.
        let bytes = |elements: u64| (elements * view.dtype.bits() / 8) as usize;
        let (piece, outer) = pieces(view);
        (runs.piece, runs.ndim) = (bytes(piece), outer);
        for (axis, (size, stride)) in runs.outer[..outer].iter_mut().zip(dims(view)) {
            *axis = Axis {
                size,
                stride: bytes(stride),
                at: 0,
            };
        }
        runs
    }
}

impl<'a> Iterator for Runs<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let start = self.next?;
        let mut next = start;
        // Counts up like an odometer: the innermost axis that is not at its end moves on.
        let moved = self.outer[..self.ndim].iter_mut().rev().any(|axis| {
            axis.at += 1;
            if axis.at < axis.size {
                next += axis.stride;
                return true;
            }
            next -= (axis.size - 1) as usize * axis.stride;
            axis.at = 0;
            false
        });
        self.next = moved.then_some(next);
        Some(&self.bytes[start..start + self.piece])
    }
}
