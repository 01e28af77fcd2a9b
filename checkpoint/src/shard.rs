//! The part of a stored tensor that one rank holds.

use std::ops::Range;
use weightd_core::content::Dtype;
use weightd_core::plan::read::Rect;

/// Index ranges of a tensor along one dimension, put one after another; or the whole tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    stored: Vec<u64>,
    cut: Option<Cut>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Cut {
    dim: usize,
    ranges: Vec<Range<u64>>,
}

/// Bytes of a stored tensor, and where they lie in the packed shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The bytes; the start counts from the start of the stored tensor.
    pub from: Rect,
    /// Where the first row goes, from the start of the shard.
    pub to: u64,
    /// The distance between rows in the shard, in bytes.
    pub to_pitch: u64,
}

impl Shard {
    /// All of a tensor of this shape.
    pub fn whole(stored: &[u64]) -> Shard {
        Shard {
            stored: stored.to_vec(),
            cut: None,
        }
    }

    /// The indices `ranges` of dimension `dim`, in this order.
    ///
    /// # Panics
    /// When there is no such dimension, or a range leaves it.
    pub fn along(stored: &[u64], dim: usize, ranges: Vec<Range<u64>>) -> Shard {
        let inside = |range: &Range<u64>| range.start <= range.end && range.end <= stored[dim];
        assert!(
            ranges.iter().all(inside),
            "{ranges:?} of dimension {dim} of {stored:?}"
        );
        Shard {
            stored: stored.to_vec(),
            cut: Some(Cut { dim, ranges }),
        }
    }

    /// The dimension that is cut, and the ranges of it that are held; `None` of a whole tensor.
    pub fn cut(&self) -> Option<(usize, &[Range<u64>])> {
        self.cut.as_ref().map(|cut| (cut.dim, &cut.ranges[..]))
    }

    /// The shape of the shard, outermost dimension first.
    pub fn shape(&self) -> Vec<u64> {
        let mut shape = self.stored.clone();
        if let Some(cut) = &self.cut {
            shape[cut.dim] = cut.ranges.iter().map(|range| range.end - range.start).sum();
        }
        shape
    }

    /// The shard as row-major rows: for each index of the dimensions outside the cut one, the
    /// ranges of elements of the stored tensor. A whole tensor is one row.
    pub fn rows(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let (outer, pitch, ranges) = self.row_ranges();
        (0..outer).flat_map(move |row| {
            ranges
                .clone()
                .into_iter()
                .map(move |range| row * pitch + range.start..row * pitch + range.end)
        })
    }

    /// The shard as rectangles of bytes. `None` where elements of less than a byte would be cut
    /// inside one.
    pub fn pieces(&self, dtype: Dtype) -> Option<Vec<Piece>> {
        let (rows, pitch, ranges) = self.row_ranges();
        let row = dtype.bytes(ranges.iter().map(|range| range.end - range.start).sum())?;
        let mut to = 0;
        let mut pieces = Vec::with_capacity(ranges.len());
        for range in ranges {
            let width = dtype.bytes(range.end - range.start)?;
            if width > 0 && rows > 0 {
                let pitch = if rows == 1 { width } else { dtype.bytes(pitch)? };
                let from = Rect {
                    start: dtype.bytes(range.start)?,
                    pitch,
                    width,
                    rows,
                };
                pieces.push(Piece {
                    from,
                    to,
                    to_pitch: row,
                });
            }
            to += width;
        }
        Some(pieces)
    }

    /// How many rows, their distance in elements, and which elements of the first are held.
    fn row_ranges(&self) -> (u64, u64, Vec<Range<u64>>) {
        let elements = |shape: &[u64]| shape.iter().product::<u64>();
        match &self.cut {
            None => {
                let all = 0..elements(&self.stored);
                (1, all.end, vec![all])
            }
            Some(Cut { dim, ranges }) => {
                let inner = elements(&self.stored[dim + 1..]);
                let ranges = ranges
                    .iter()
                    .map(|range| range.start * inner..range.end * inner)
                    .collect();
                (elements(&self.stored[..*dim]), self.stored[*dim] * inner, ranges)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_cut_inside_a_byte_is_no_shard() {
        let shard = |range: Range<u64>| Shard::along(&[2, 6], 1, vec![range]);
        assert_eq!(shard(0..3).pieces(Dtype::F4), None);
        let piece = Piece {
            from: Rect {
                start: 0,
                pitch: 3,
                width: 1,
                rows: 2,
            },
            to: 0,
            to_pitch: 1,
        };
        assert_eq!(shard(0..2).pieces(Dtype::F4), Some(vec![piece]));
    }

    proptest! {
        #[test]
        fn rows_and_pieces_are_the_elements_of_the_ranges(
            shape in prop::collection::vec(1u64..5, 1..4), dim in 0usize..3, bounds in prop::collection::vec(0u64..5, 4),
        ) {
            let dim = dim % shape.len();
            let size = shape[dim];
            let range = |a: u64, b: u64| a.min(b).min(size)..a.max(b).min(size);
            let ranges = vec![range(bounds[0], bounds[1]), range(bounds[2], bounds[3])];
            let shard = Shard::along(&shape, dim, ranges.clone());

            // Element by element, in row-major order of the shard.
            let inner: u64 = shape[dim + 1..].iter().product();
            let kept: Vec<u64> = ranges.into_iter().flatten().collect();
            let mut expected = Vec::new();
            for outer in 0..shape[..dim].iter().product::<u64>() {
                for index in &kept {
                    expected.extend((0..inner).map(|i| (outer * size + index) * inner + i));
                }
            }
            prop_assert_eq!(shard.shape()[dim], kept.len() as u64);
            prop_assert_eq!(shard.rows().flatten().collect::<Vec<_>>(), expected.clone());

            let mut packed = vec![u64::MAX; expected.len()];
            for piece in shard.pieces(Dtype::U8).unwrap() {
                for row in 0..piece.from.rows {
                    for byte in 0..piece.from.width {
                        let to = &mut packed[(piece.to + row * piece.to_pitch + byte) as usize];
                        prop_assert_eq!(*to, u64::MAX, "written once");
                        *to = piece.from.start + row * piece.from.pitch + byte;
                    }
                }
            }
            prop_assert_eq!(packed, expected);
        }
    }
}
