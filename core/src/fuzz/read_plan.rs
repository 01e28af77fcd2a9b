//! Read plans of any numbers.

use super::Input;
use crate::content::Dtype;
use crate::plan::cast::Cast;
use crate::plan::read::meaning::{execute, needed, reference};
use crate::plan::read::{Block, Fill, Part, ReadPlan, Rect, Source};

const FILES: u32 = 2;
const RANKS: u32 = 3;

const CASTS: [Option<(Dtype, Dtype)>; 7] = [
    None,
    Some((Dtype::F32, Dtype::BF16)),
    Some((Dtype::F32, Dtype::F16)),
    Some((Dtype::BF16, Dtype::F32)),
    Some((Dtype::BF16, Dtype::F16)),
    Some((Dtype::F16, Dtype::F32)),
    Some((Dtype::F16, Dtype::BF16)),
];

/// Makes a plan, or not, and checks that
///
/// * nothing panics, and what a plan writes are the bytes of its parts and fills, no byte twice;
/// * executing its chunks, of any size, and its blocks gives what the parts mean;
/// * no byte is in two chunks, and blocks are all bytes of all files.
pub fn read_plan(input: &[u8]) {
    let mut input = Input::new(input);
    let (max_bytes, max_gap, block_bytes) =
        (input.number().max(1), input.number(), 1 + input.number() % 1000);
    let files: Vec<u64> = (0..FILES).map(|_| input.short() % 1500).collect();
    let regions: Vec<u64> = (0..RANKS).map(|_| input.short() % 1500).collect();
    let (mut sources, mut fills) = (Vec::new(), Vec::new());
    let mut places = Places::default();
    while !input.is_empty() {
        if input.below(8) == 0 {
            fills.push(fill(&mut input, &mut places));
        } else {
            sources.push(source(&mut input, &mut places));
        }
    }
    let Ok(plan) = ReadPlan::new(files, regions, sources, fills) else {
        return;
    };
    let meant = reference(&plan);
    assert_eq!(execute(&plan, plan.chunks(max_bytes, max_gap)), meant);
    assert_eq!(execute(&plan, plan.chunks(u64::MAX, 0)), meant);
    let blocks = plan.blocks(block_bytes).map(|block| block.chunk);
    assert_eq!(execute(&plan, blocks), meant);
    chunks_are_apart(&plan, max_bytes, max_gap);
    blocks_are_everything(&plan, block_bytes);
    for (written, region) in plan.written().iter().zip(plan.regions()) {
        assert!(written <= region, "a byte that is written twice");
    }
}

/// Where sources and writes go that shall not be in each other's way.
#[derive(Default)]
struct Places {
    files: [u64; FILES as usize],
    regions: [u64; RANKS as usize],
}

/// Behind what is there, mostly; else anywhere.
fn place(input: &mut Input<'_>, behind: &mut u64, bytes: u64) -> u64 {
    if input.below(16) == 0 {
        return input.number();
    }
    let at = behind.saturating_add(u64::from(input.byte() % 8));
    *behind = at.saturating_add(bytes);
    at
}

fn fill(input: &mut Input<'_>, places: &mut Places) -> Fill {
    let (rank, bytes) = (input.below(RANKS as usize), input.number());
    Fill {
        rank: rank as u32,
        offset: place(input, &mut places.regions[rank], bytes),
        bytes,
    }
}

fn source(input: &mut Input<'_>, places: &mut Places) -> Source {
    let file = input.below(FILES as usize);
    let element = input.one_of(&[4, 2, 1, 8, 0]);
    let parts: Vec<Part> = (0..input.below(4))
        .map(|_| part(input, places, element))
        .collect();
    let end = |part: &Part| {
        let rows = part.from.rows.saturating_sub(1).saturating_mul(part.from.pitch);
        rows.saturating_add(part.from.start)
            .saturating_add(part.from.width)
    };
    let bytes = parts.iter().map(end).max().unwrap_or(0);
    let bytes = bytes.saturating_add(u64::from(input.byte() % 8));
    Source {
        // Past the last one, now and then.
        file: file as u32 + u32::from(input.byte() == 255),
        offset: place(input, &mut places.files[file], bytes),
        bytes,
        element,
        parts,
    }
}

fn part(input: &mut Input<'_>, places: &mut Places, element: u64) -> Part {
    let rank = input.below(RANKS as usize);
    let cast = input.one_of(&CASTS);
    let cast = cast.and_then(|(from, to)| Cast::new(from, to));
    let cast = cast.filter(|cast| cast.source_element() == element || input.byte() == 255);
    let width = input.number().saturating_mul(element);
    let from = Rect {
        start: input.number().saturating_mul(element),
        pitch: input.number().saturating_mul(element).saturating_add(width),
        width,
        rows: input.number(),
    };
    let to_width = cast
        .map_or(Some(width), |cast| cast.scale(width))
        .unwrap_or(width);
    let to_pitch = to_width.saturating_add(input.number());
    Part {
        from,
        rank: rank as u32 + u32::from(input.byte() == 255),
        to: place(
            input,
            &mut places.regions[rank],
            to_pitch.saturating_mul(from.rows),
        ),
        to_pitch,
        cast,
    }
}

fn chunks_are_apart(plan: &ReadPlan, max_bytes: u64, max_gap: u64) {
    let needed = needed(plan);
    let mut end = (0, 0);
    let mut read = 0;
    for chunk in plan.chunks(max_bytes, max_gap) {
        assert!((chunk.file, chunk.offset) >= end, "in file order, apart");
        end = (chunk.file, chunk.offset + chunk.bytes);
        assert!(chunk.bytes > 0 && chunk.bytes <= max_bytes.max(plan.largest_element()));
        let bytes = &needed[chunk.file as usize][chunk.offset as usize..end.1 as usize];
        read += bytes.iter().filter(|needed| **needed).count();
    }
    let wanted = needed.iter().flatten().filter(|needed| **needed).count();
    assert_eq!(read, wanted, "every needed byte is read, once");
}

fn blocks_are_everything(plan: &ReadPlan, block_bytes: u64) {
    let mut files = vec![0; plan.files().len()];
    for Block { chunk, range } in plan.blocks(block_bytes) {
        let done = &mut files[chunk.file as usize];
        assert_eq!(range.start, *done, "without gaps, from the start");
        assert!(range.end - range.start <= block_bytes);
        *done = range.end;
    }
    assert_eq!(files, plan.files());
}
