//! Rectangles of bytes: rows of equal width at equal distances.

/// Rows of `width` bytes, the first at `start`, each `pitch` bytes after the one before.
///
/// With one row it is a contiguous range, and the pitch means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rect {
    /// The first byte.
    pub start: u64,
    /// The distance from row to row in bytes, at least `width`.
    pub pitch: u64,
    /// The bytes of a row.
    pub width: u64,
    /// How many rows.
    pub rows: u64,
}

impl Rect {
    /// A contiguous range.
    pub fn range(start: u64, bytes: u64) -> Rect {
        Rect {
            start,
            pitch: bytes,
            width: bytes,
            rows: 1,
        }
    }

    /// How many bytes its rows have together; `None` on overflow.
    pub fn bytes(&self) -> Option<u64> {
        self.width.checked_mul(self.rows)
    }

    /// The end of its last row; `None` on overflow, or where it is no rectangle (empty, or rows
    /// that overlap).
    pub(super) fn end(&self) -> Option<u64> {
        let last = self.rows.checked_sub(1)?;
        if self.width == 0 || last > 0 && self.pitch < self.width {
            return None;
        }
        // With one row the pitch is no distance to anything.
        let down = if last == 0 {
            0
        } else {
            last.checked_mul(self.pitch)?
        };
        self.start.checked_add(down)?.checked_add(self.width)
    }

    /// The same bytes with as few rows as possible.
    pub(super) fn flat(self) -> Rect {
        if self.rows > 1 && self.pitch == self.width {
            Rect::range(self.start, self.width * self.rows)
        } else {
            self
        }
    }

    /// The first row that ends after `at`; maybe one beyond the last.
    pub(super) fn row_ending_after(&self, at: u64) -> u64 {
        let first_end = self.start + self.width;
        match at.checked_sub(first_end) {
            None => 0,
            Some(_) if self.rows == 1 => 1,
            Some(beyond) => beyond / self.pitch + 1,
        }
    }

    /// The rows of it that lie in `start..end`, as up to three rectangles: for each the row it
    /// begins in, how many bytes of that row are left out before it, and itself.
    pub(super) fn clip(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64, Rect)> + use<> {
        let rect = *self;
        let mut row = rect.row_ending_after(start);
        std::iter::from_fn(move || {
            if row >= rect.rows || start >= end {
                return None;
            }
            let at = rect.start + row * rect.pitch;
            if at >= end {
                return None;
            }
            let first = row;
            if at < start || end < at + rect.width {
                row += 1;
                let from = at.max(start);
                let bytes = end.min(at + rect.width) - from;
                return Some((
                    first,
                    from - at,
                    Rect {
                        start: from,
                        width: bytes,
                        rows: 1,
                        ..rect
                    },
                ));
            }
            // All rows that end by `end`.
            let below = if rect.rows == 1 {
                0
            } else {
                (end - at - rect.width) / rect.pitch
            };
            let rows = (below + 1).min(rect.rows - row);
            row += rows;
            Some((
                first,
                0,
                Rect {
                    start: at,
                    rows,
                    ..rect
                },
            ))
        })
    }

    /// Whether a byte belongs to both.
    pub(super) fn overlaps(&self, other: &Rect) -> bool {
        if self.rows > 1 && other.rows > 1 && self.pitch == other.pitch {
            return self.overlaps_at_same_pitch(other);
        }
        let (few, many) = if self.rows <= other.rows {
            (self, other)
        } else {
            (other, self)
        };
        (0..few.rows).any(|row| {
            let at = few.start + row * few.pitch;
            many.clip(at, at + few.width).next().is_some()
        })
    }

    /// Row `i` of this and row `j` of the other overlap when the distance between their starts,
    /// `d + (j - i) * pitch`, is above minus the other's width and below this one's.
    fn overlaps_at_same_pitch(&self, other: &Rect) -> bool {
        let wide = i128::from;
        let (pitch, d) = (wide(self.pitch), wide(other.start) - wide(self.start));
        let least = (1 - wide(other.width) - d + pitch - 1)
            .div_euclid(pitch)
            .max(1 - wide(self.rows));
        let most = (wide(self.width) - 1 - d)
            .div_euclid(pitch)
            .min(wide(other.rows) - 1);
        least <= most
    }
}
