//! Cutting a plan into reads.

use super::{ReadPlan, Rect, Source};
use std::ops::Range;

/// One read: a range of a file, and the sources that have bytes in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Which of the plan's files.
    pub file: u32,
    /// The first byte, from the start of the file.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
    /// The plan's sources that it touches.
    pub(super) sources: Range<usize>,
}

/// The reads of a plan, in file order; see [`ReadPlan::chunks`].
#[derive(Debug)]
pub struct Chunks<'a> {
    sources: &'a [Source],
    max_bytes: u64,
    max_gap: u64,
    /// The source that `need` belongs to.
    at: usize,
    /// What is still needed of it.
    need: Need,
}

impl<'a> Chunks<'a> {
    pub(super) fn new(plan: &'a ReadPlan, max_bytes: u64, max_gap: u64) -> Chunks<'a> {
        let sources = &plan.sources;
        let need = sources
            .first()
            .map(|source| Need::of(source, max_gap))
            .unwrap_or_default();
        Chunks {
            sources,
            max_bytes: max_bytes.max(1),
            max_gap,
            at: 0,
            need,
        }
    }

    /// The next run of needed bytes, as a range of the file of source `at`. Nothing is taken yet.
    fn run(&mut self) -> Option<Range<u64>> {
        loop {
            let source = self.sources.get(self.at)?;
            if let Some(run) = self.need.run() {
                return Some(source.offset + run.start..source.offset + run.end);
            }
            self.at += 1;
            self.need = self
                .sources
                .get(self.at)
                .map(|s| Need::of(s, self.max_gap))
                .unwrap_or_default();
        }
    }

    /// The longest beginning of `run` that ends by `limit` without cutting an element.
    fn fit(&self, run: &Range<u64>, limit: u64) -> u64 {
        let source = &self.sources[self.at];
        if run.end <= limit {
            run.end
        } else {
            limit - (limit - source.offset) % source.element
        }
    }
}

impl Iterator for Chunks<'_> {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        let run = self.run()?;
        let (first, offset) = (self.at, run.start);
        let file = self.sources[first].file;
        let limit = offset.saturating_add(self.max_bytes.max(self.sources[first].element));
        let mut end = self.fit(&run, limit);
        self.need.take(end - self.sources[self.at].offset);
        let mut last = first;
        while let Some(run) = self.run() {
            if self.sources[self.at].file != file || run.start - end > self.max_gap || run.start >= limit {
                break;
            }
            let fits = self.fit(&run, limit);
            if fits <= run.start {
                break;
            }
            end = fits;
            last = self.at;
            self.need.take(end - self.sources[self.at].offset);
        }
        Some(Chunk {
            file,
            offset,
            bytes: end - offset,
            sources: first..last + 1,
        })
    }
}

/// What some rank needs of a source and is not yet in a chunk: everything in `rects` from `from` on.
/// Offsets count from the start of the source.
#[derive(Debug, Default)]
struct Need {
    rects: Vec<Rect>,
    from: u64,
}

impl Need {
    /// The union of a source's parts, with holes of up to `max_gap` filled where that is seen
    /// without walking the rows.
    fn of(source: &Source, max_gap: u64) -> Need {
        let mut rects: Vec<Rect> = source.parts.iter().map(|part| part.from.flat()).collect();
        // Columns that adjoin become one wider column; a column as wide as its pitch a range.
        rects.sort_by_key(|rect| (rect.rows, rect.pitch, rect.start));
        rects = merged(rects, |a, b| {
            if a.rows == 1 || (a.rows, a.pitch) != (b.rows, b.pitch) {
                return None;
            }
            let (over, hole) = (b.start - a.start, b.start.saturating_sub(a.start + a.width));
            let width = a.width.max(over.saturating_add(b.width));
            (hole <= max_gap && width <= a.pitch).then_some(Rect { width, ..*a })
        });
        for rect in &mut rects {
            if rect.rows > 1 && rect.pitch - rect.width <= max_gap {
                *rect = Rect::range(rect.start, rect.pitch * (rect.rows - 1) + rect.width);
            }
        }
        rects.sort_by_key(|rect| (rect.rows, rect.start));
        rects = merged(rects, |a, b| {
            let end = a.start + a.width;
            let close = b.start <= end.saturating_add(max_gap);
            (a.rows == 1 && b.rows == 1 && close)
                .then(|| Rect::range(a.start, end.max(b.start + b.width) - a.start))
        });
        Need { rects, from: 0 }
    }

    /// The first run of needed bytes.
    fn run(&self) -> Option<Range<u64>> {
        let row = |rect: &Rect, at: u64| {
            let row = rect.row_ending_after(at);
            (row < rect.rows).then(|| {
                let start = rect.start + row * rect.pitch;
                start.max(at)..start + rect.width
            })
        };
        let rows = || self.rects.iter().filter_map(|rect| row(rect, self.from));
        let first = rows().min_by_key(|run| run.start)?;
        // Up to where the longest of the rows that begin there ends.
        let end = rows()
            .filter(|run| run.start == first.start)
            .map(|run| run.end)
            .max();
        Some(first.start..end.unwrap_or(first.end))
    }

    /// Everything before `until` is in a chunk now.
    fn take(&mut self, until: u64) {
        self.from = until;
    }
}

/// Joins each rectangle with the one before it wherever `join` can.
fn merged(rects: Vec<Rect>, join: impl Fn(&Rect, &Rect) -> Option<Rect>) -> Vec<Rect> {
    let mut out: Vec<Rect> = Vec::with_capacity(rects.len());
    for rect in rects {
        match out.last().and_then(|last| join(last, &rect)) {
            Some(joined) => *out.last_mut().expect("there is a last one") = joined,
            None => out.push(rect),
        }
    }
    out
}
