//! From the elements of one view to those of another that lie otherwise.

use crate::region::Rows;
use crate::weights::runs::dims;
use weightd_core::content::manifest::Tensor;

/// Equal pieces, repeated over axes.
#[derive(Debug)]
pub(super) struct Copies {
    /// The size of a piece, in bytes.
    width: u64,
    /// Outermost first.
    axes: Vec<Axis>,
    keep_strides: bool,
}

/// How many steps there are, and how long one is in bytes on both sides.
#[derive(Clone, Copy, Debug)]
struct Axis {
    size: u64,
    to: u64,
    from: u64,
}

impl Copies {
    /// Between two views of one type and shape that are not empty. `None`: elements of `to` may share
    /// memory with each other, and those of `from` do not in the same way.
    pub fn between(to: &Tensor<'_>, from: &Tensor<'_>) -> Option<Copies> {
        let mut axes: Vec<Axis> = dims(to)
            .zip(dims(from))
            .map(|((size, to), (_, from))| Axis { size, to, from })
            .collect();
        // Which element comes first does not matter here.
        axes.sort_by_key(|axis| axis.to);
        let keep_strides = axes.iter().all(|axis| axis.to == axis.from);
        let (piece, packed) = match keep_strides {
            true => covered(&axes),
            false => packed(&axes)?,
        };
        axes.drain(..packed);
        axes.reverse();
        // What is not packed has elements of whole bytes, and a packed view ends on a whole byte.
        let bytes = |elements: u64| elements * to.dtype.bits() / 8;
        for axis in &mut axes {
            (axis.to, axis.from) = (bytes(axis.to), bytes(axis.from));
        }
        Some(Copies {
            width: bytes(piece),
            axes,
            keep_strides,
        })
    }

    /// Whether the strides are the same on both sides, so that every byte moves equally far.
    pub fn keep_strides(&self) -> bool {
        self.keep_strides
    }

    /// Whether there is one piece.
    pub fn are_one(&self) -> bool {
        self.axes.is_empty()
    }

    /// Where in the source the first row starts, and the rows, for views that start at bytes `to` and
    /// `from` of their memory.
    pub fn rows(&self, to: u64, from: u64) -> impl Iterator<Item = (u64, Rows)> {
        let one = Axis {
            size: 1,
            to: self.width,
            from: self.width,
        };
        let (row, outer) = match self.axes.split_last() {
            Some((row, outer)) => (*row, outer),
            None => (one, &[][..]),
        };
        let count: u64 = outer.iter().map(|axis| axis.size).product();
        (0..count).map(move |number| {
            let (mut rest, mut to, mut from) = (number, to, from);
            for axis in outer.iter().rev() {
                to += rest % axis.size * axis.to;
                from += rest % axis.size * axis.from;
                rest /= axis.size;
            }
            let rows = Rows {
                offset: to,
                dst_pitch: row.to,
                src_pitch: row.from as usize,
                width: self.width as usize,
                rows: row.size as usize,
            };
            (from, rows)
        })
    }
}

/// How many elements lie in a row without a gap, whichever they are and however often each, and how
/// many axes that takes.
fn covered(axes: &[Axis]) -> (u64, usize) {
    let mut piece = 1;
    for (number, axis) in axes.iter().enumerate() {
        if axis.to > piece {
            return (piece, number);
        }
        piece += (axis.size - 1) * axis.to;
    }
    (piece, axes.len())
}

/// How many elements lie in a row in the same order on both sides, and how many axes that takes; `None`
/// where two elements may have one place.
fn packed(axes: &[Axis]) -> Option<(u64, usize)> {
    let mut reach = 0;
    for axis in axes {
        if axis.to <= reach {
            return None;
        }
        reach += (axis.size - 1) * axis.to;
    }
    let mut piece = 1;
    for (number, axis) in axes.iter().enumerate() {
        if (axis.to, axis.from) != (piece, piece) {
            return Some((piece, number));
        }
        piece *= axis.size;
    }
    Some((piece, axes.len()))
}
