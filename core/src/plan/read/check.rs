//! What a plan must keep to, whoever made it.

use super::{Fill, Part, Rect, Source};
use thiserror::Error;

/// Why a plan is refused. Numbers name files, sources (in file order) and local ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)]
pub enum ReadPlanError {
    /// A source lies outside the plan's files.
    #[error("source {source_index} ({bytes} bytes at {offset} of file {file}) is outside the plan's files")]
    OutsideFile {
        source_index: usize,
        file: u32,
        offset: u64,
        bytes: u64,
    },
    /// Two sources share bytes of a file, which would be read twice.
    #[error("sources {} and {source_index} overlap in file {file} at byte {offset}", source_index - 1)]
    SourcesOverlap {
        source_index: usize,
        file: u32,
        offset: u64,
    },
    /// A part is no rectangle, or leaves its source.
    #[error("source {source_index}: part {part:?} is not a rectangle inside its {bytes} bytes")]
    OutsideSource {
        source_index: usize,
        part: Part,
        bytes: u64,
    },
    /// A cast would have to split an element.
    #[error("source {source_index}: part {part:?} does not consist of whole elements of {element} bytes")]
    SplitsElement {
        source_index: usize,
        part: Part,
        element: u64,
    },
    /// A part or fill leaves its region, or names a rank that has none.
    #[error("rank {rank}: a write at {offset} leaves its region or its rows overlap")]
    OutsideRegion { rank: u32, offset: u64 },
    /// Two writes share bytes of a region.
    #[error("rank {rank}: the writes at {first} and at {second} of its region overlap")]
    WritesOverlap { rank: u32, first: u64, second: u64 },
}

/// Checks a plan whose sources are in file order, and counts the bytes it writes to each region.
pub(super) fn check(
    files: &[u64],
    regions: &[u64],
    sources: &[Source],
    fills: &[Fill],
) -> Result<Vec<u64>, ReadPlanError> {
    check_sources(files, sources)?;
    let mut writes: Vec<Vec<Write>> = vec![Vec::new(); regions.len()];
    let mut note = |rank: u32, to: Rect| {
        let outside = ReadPlanError::OutsideRegion {
            rank,
            offset: to.start,
        };
        let end = to.end().ok_or(outside)?;
        let region = usize::try_from(rank)
            .ok()
            .filter(|&rank| rank < regions.len())
            .ok_or(outside)?;
        if end > regions[region] {
            return Err(outside);
        }
        writes[region].push(Write { to, end });
        Ok(())
    };
    for (source_index, source) in sources.iter().enumerate() {
        for part in &source.parts {
            check_part(source_index, source, part)?;
            let outside = ReadPlanError::OutsideRegion {
                rank: part.rank,
                offset: part.to,
            };
            let width = part
                .cast
                .map_or(Some(part.from.width), |cast| cast.scale(part.from.width));
            let width = width.ok_or(outside)?;
            note(
                part.rank,
                Rect {
                    start: part.to,
                    pitch: part.to_pitch,
                    width,
                    rows: part.from.rows,
                },
            )?;
        }
    }
    for fill in fills {
        note(fill.rank, Rect::range(fill.offset, fill.bytes))?;
    }
    (0..)
        .zip(writes)
        .map(|(rank, writes)| check_apart(rank, writes))
        .collect()
}

fn check_sources(files: &[u64], sources: &[Source]) -> Result<(), ReadPlanError> {
    let mut before = (0, 0);
    for (
        source_index,
        &Source {
            file, offset, bytes, ..
        },
    ) in sources.iter().enumerate()
    {
        let end = offset.checked_add(bytes);
        let length = usize::try_from(file).ok().and_then(|file| files.get(file));
        let Some(end) = end.filter(|&end| length.is_some_and(|&length| end <= length)) else {
            return Err(ReadPlanError::OutsideFile {
                source_index,
                file,
                offset,
                bytes,
            });
        };
        if before.0 == file && offset < before.1 {
            return Err(ReadPlanError::SourcesOverlap {
                source_index,
                file,
                offset,
            });
        }
        before = (file, end);
    }
    Ok(())
}

fn check_part(source_index: usize, source: &Source, part: &Part) -> Result<(), ReadPlanError> {
    let (from, element) = (part.from, source.element);
    if from.end().is_none_or(|end| end > source.bytes) {
        return Err(ReadPlanError::OutsideSource {
            source_index,
            part: *part,
            bytes: source.bytes,
        });
    }
    let whole = |bytes: u64| element != 0 && bytes.is_multiple_of(element);
    let pitch_whole = from.rows == 1 || whole(from.pitch);
    let cast_whole = part.cast.is_none_or(|cast| cast.source_element() == element);
    if !(whole(from.start) && whole(from.width) && pitch_whole && cast_whole) {
        return Err(ReadPlanError::SplitsElement {
            source_index,
            part: *part,
            element,
        });
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct Write {
    to: Rect,
    end: u64,
}

/// Finds two writes that share a byte; otherwise gives the bytes of all.
fn check_apart(rank: u32, mut writes: Vec<Write>) -> Result<u64, ReadPlanError> {
    writes.sort_by_key(|write| (write.to.start, write.end));
    let mut total = 0;
    // Writes that began and have not ended: rows of the others may lie between theirs.
    let mut open: Vec<Write> = Vec::new();
    for write in writes {
        open.retain(|other| other.end > write.to.start);
        if let Some(other) = open.iter().find(|other| other.to.overlaps(&write.to)) {
            let (first, second) = (other.to.start, write.to.start);
            return Err(ReadPlanError::WritesOverlap { rank, first, second });
        }
        // Apart and inside one region, so the sum is no larger than the region.
        total += write.to.width * write.to.rows;
        open.push(write);
    }
    Ok(total)
}
