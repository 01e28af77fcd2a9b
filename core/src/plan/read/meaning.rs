//! What a plan means, byte by byte, for whoever checks what its chunks and blocks do.

use super::{Chunk, ReadPlan, written};
use crate::plan::cast::Cast;

fn contents(plan: &ReadPlan) -> Vec<Vec<u8>> {
    let byte = |file: u64, at: u64| (at.wrapping_mul(0x9e37_79b9) >> 7) as u8 ^ file as u8;
    (0..)
        .zip(plan.files())
        .map(|(file, &bytes)| (0..bytes).map(|at| byte(file, at)).collect())
        .collect()
}

/// Does one row of a copy.
fn move_row(cast: Option<Cast>, from: &[u8], to: &mut [u8]) {
    match cast {
        Some(cast) => cast.apply(from, to),
        None => to.copy_from_slice(from),
    }
}

fn blank(plan: &ReadPlan) -> Vec<Vec<u8>> {
    plan.regions()
        .iter()
        .map(|&bytes| vec![0xee; bytes as usize])
        .collect()
}

/// What the regions hold by the meaning of each part alone.
pub(crate) fn reference(plan: &ReadPlan) -> Vec<Vec<u8>> {
    let (files, mut regions) = (contents(plan), blank(plan));
    for source in plan.sources() {
        for part in &source.parts {
            for row in 0..part.from.rows {
                let from = (source.offset + part.from.start + row * part.from.pitch) as usize;
                let to = (part.to + row * part.to_pitch) as usize;
                let (width, to_width) = (part.from.width, written(part.from.width, part.cast));
                move_row(
                    part.cast,
                    &files[source.file as usize][from..from + width as usize],
                    &mut regions[part.rank as usize][to..to + to_width as usize],
                );
            }
        }
    }
    regions
}

/// What the regions hold once these chunks are read and copied.
pub(crate) fn execute(plan: &ReadPlan, chunks: impl Iterator<Item = Chunk>) -> Vec<Vec<u8>> {
    let (files, mut regions) = (contents(plan), blank(plan));
    for chunk in chunks {
        let read = &files[chunk.file as usize][chunk.offset as usize..(chunk.offset + chunk.bytes) as usize];
        for copy in plan.copies(&chunk) {
            for row in 0..copy.from.rows {
                let from = (copy.from.start + row * copy.from.pitch) as usize;
                let to = (copy.to + row * copy.to_pitch) as usize;
                move_row(
                    copy.cast,
                    &read[from..from + copy.from.width as usize],
                    &mut regions[copy.rank as usize][to..to + copy.to_width() as usize],
                );
            }
        }
    }
    regions
}

/// By file: the bytes that some rank needs.
pub(crate) fn needed(plan: &ReadPlan) -> Vec<Vec<bool>> {
    let mut needed: Vec<Vec<bool>> = plan
        .files()
        .iter()
        .map(|&bytes| vec![false; bytes as usize])
        .collect();
    for source in plan.sources() {
        for part in &source.parts {
            for row in 0..part.from.rows {
                let from = (source.offset + part.from.start + row * part.from.pitch) as usize;
                needed[source.file as usize][from..from + part.from.width as usize].fill(true);
            }
        }
    }
    needed
}
