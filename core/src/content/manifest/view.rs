//! Views: which bytes of a region a tensor is.

use super::{MAX_DIMS, TensorKind, ViewError};
use crate::content::Dtype;

/// A tensor: a name for a view of a region.
///
/// Element `(i, j, ..)` starts at byte `offset + (i*strides[0] + j*strides[1] + ..) * width` of the
/// region, where `width` is the dtype's. All of them lie inside the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive] // Only a manifest makes one, and has checked it.
pub struct Tensor<'a> {
    /// Its own name, also when it was reached through an alias.
    pub name: &'a str,
    /// Parameter or buffer.
    pub kind: TensorKind,
    /// Whether it belongs to the model's state dictionary; false for buffers that the model makes
    /// anew.
    pub persistent: bool,
    /// The element type.
    pub dtype: Dtype,
    /// The size of each dimension, outermost first; empty for a scalar.
    pub shape: &'a [u64],
    /// For each dimension, the distance between neighbours, in elements.
    pub strides: &'a [u64],
    /// The number of its region.
    pub region: usize,
    /// Where it starts in the region, in bytes; a multiple of the element's size.
    pub offset: u64,
}

impl Tensor<'_> {
    /// The number of elements; 1 for a scalar.
    pub fn elements(&self) -> u64 {
        elements(self.shape)
    }

    /// The size of its elements when packed, in bytes. A view that repeats bytes (a stride of 0)
    /// can be larger than its region.
    pub fn packed_bytes(&self) -> u64 {
        self.elements() * self.dtype.bits() / 8
    }

    /// The bytes of the region from its first element to the end of its last; 0 when it has none.
    pub fn extent(&self) -> u64 {
        if self.is_contiguous() {
            return self.packed_bytes();
        }
        let steps: u64 = self
            .shape
            .iter()
            .zip(self.strides)
            .map(|(size, stride)| (size - 1) * stride)
            .sum();
        (steps + 1) * self.dtype.bits() / 8
    }

    /// Whether its elements are packed in row-major order, so that its extent is its bytes. The
    /// strides of dimensions of size 1 do not matter, and an empty tensor is contiguous.
    pub fn is_contiguous(&self) -> bool {
        is_contiguous(self.shape, self.strides)
    }
}

/// Checks that a view lies inside a region of `region_bytes` and that nothing computed from it can
/// overflow.
pub(super) fn check(
    dtype: Dtype,
    shape: &[u64],
    strides: &[u64],
    offset: u64,
    region_bytes: u64,
) -> Result<(), ViewError> {
    let ndim = shape.len();
    if ndim > MAX_DIMS {
        return Err(ViewError::TooManyDims { ndim });
    }
    if strides.len() != ndim {
        let strides = strides.len();
        return Err(ViewError::StrideCount { strides, ndim });
    }
    // Empty dimensions count as 1 here, so that row-major strides cannot overflow either.
    shape
        .iter()
        .try_fold(1u64, |product, &size| product.checked_mul(size.max(1)))
        .and_then(|product| product.checked_mul(dtype.bits()))
        .ok_or(ViewError::Overflow)?;
    let align = dtype.bits().div_ceil(8);
    if !offset.is_multiple_of(align) {
        return Err(ViewError::Misaligned { offset, align });
    }
    let extent = checked_extent(dtype, shape, strides)?;
    match offset.checked_add(extent) {
        Some(end) if end <= region_bytes => Ok(()),
        Some(end) => Err(ViewError::Overruns {
            offset,
            end,
            region_bytes,
        }),
        None => Err(ViewError::Overflow),
    }
}

fn checked_extent(dtype: Dtype, shape: &[u64], strides: &[u64]) -> Result<u64, ViewError> {
    let contiguous = is_contiguous(shape, strides);
    if dtype.bits() < 8 && !contiguous {
        return Err(ViewError::StridedSubByte { dtype });
    }
    if contiguous {
        let elements = elements(shape);
        return dtype
            .bytes(elements)
            .ok_or(ViewError::PartialByte { dtype, elements });
    }
    let mut steps = 0u64;
    for (&size, &stride) in shape.iter().zip(strides) {
        let step = (size - 1).checked_mul(stride).ok_or(ViewError::Overflow)?;
        steps = steps.checked_add(step).ok_or(ViewError::Overflow)?;
    }
    let elements = steps.checked_add(1).ok_or(ViewError::Overflow)?;
    dtype.bytes(elements).ok_or(ViewError::Overflow)
}

/// Appends to the shape that starts at `start` the strides of packed elements in row-major order.
/// Empty dimensions count as 1. Saturates, but only for shapes that [`check`] refuses.
pub(super) fn push_row_major(dims: &mut Vec<u64>, start: usize) {
    let ndim = dims.len() - start;
    dims.resize(start + 2 * ndim, 1);
    let (shape, strides) = dims[start..].split_at_mut(ndim);
    let mut packed = 1u64;
    for (stride, &size) in strides.iter_mut().zip(&*shape).rev() {
        *stride = packed;
        packed = packed.saturating_mul(size.max(1));
    }
}

/// Whether the strides are those that [`push_row_major`] gives.
pub(super) fn is_row_major(shape: &[u64], strides: &[u64]) -> bool {
    let mut packed = 1u64;
    shape.iter().zip(strides).rev().all(|(&size, &stride)| {
        let expected = packed;
        packed = packed.saturating_mul(size.max(1));
        stride == expected
    })
}

fn elements(shape: &[u64]) -> u64 {
    if shape.contains(&0) {
        0
    } else {
        shape.iter().product()
    }
}

fn is_contiguous(shape: &[u64], strides: &[u64]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut packed = 1u64;
    for (&size, &stride) in shape.iter().zip(strides).rev() {
        if size != 1 {
            if stride != packed {
                return false;
            }
            packed *= size;
        }
    }
    true
}
