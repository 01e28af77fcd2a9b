use super::meaning::{execute, needed, reference};
use super::*;
use crate::content::Dtype;
use proptest::prelude::*;

const CASTS: [(Dtype, Dtype); 4] = [
    (Dtype::F32, Dtype::BF16),
    (Dtype::BF16, Dtype::F32),
    (Dtype::F16, Dtype::BF16),
    (Dtype::F32, Dtype::F16),
];

/// A rectangle in elements, and what is done with it.
#[derive(Clone, Debug)]
struct Wanted {
    rank: u32,
    start: u64,
    width: u64,
    gap: u64,
    rows: u64,
    to_gap: u64,
    cast: Option<usize>,
}

fn wanted() -> impl Strategy<Value = Wanted> {
    let cast = prop::option::of(0..CASTS.len());
    (0u32..3, 0u64..30, 1u64..9, 0u64..9, 1u64..6, 0u64..9, cast).prop_map(
        |(rank, start, width, gap, rows, to_gap, cast)| Wanted {
            rank,
            start,
            width,
            gap,
            rows,
            to_gap,
            cast,
        },
    )
}

/// Each source: a gap before it, its element (2 or 4 bytes), its parts.
fn plans() -> impl Strategy<Value = ReadPlan> {
    let source = (
        0u32..2,
        0u64..40,
        prop::sample::select(vec![2u64, 4]),
        prop::collection::vec(wanted(), 0..5),
    );
    (
        prop::collection::vec(source, 0..6),
        prop::collection::vec((0u32..3, 1u64..50), 0..4),
    )
        .prop_map(|(sources, fills)| {
            let (mut files, mut regions) = (vec![7u64; 2], vec![0u64; 3]);
            let mut made = Vec::new();
            for (file, gap, element, wants) in sources {
                let parts: Vec<Part> = wants
                    .iter()
                    .map(|want| part(want, element, &mut regions[want.rank as usize]))
                    .collect();
                let bytes = parts
                    .iter()
                    .map(|part| part.from.end().unwrap())
                    .max()
                    .unwrap_or(0)
                    + 3;
                let offset = files[file as usize] + gap;
                files[file as usize] = offset + bytes;
                made.push(Source {
                    file,
                    offset,
                    bytes,
                    element,
                    parts,
                });
            }
            let fills = fills
                .into_iter()
                .map(|(rank, bytes)| {
                    let offset = regions[rank as usize] + 5;
                    regions[rank as usize] = offset + bytes;
                    Fill { rank, offset, bytes }
                })
                .collect();
            ReadPlan::new(files, regions, made, fills).unwrap()
        })
}

fn part(want: &Wanted, element: u64, region: &mut u64) -> Part {
    let cast = want.cast.and_then(|cast| Cast::new(CASTS[cast].0, CASTS[cast].1));
    let cast = cast.filter(|cast| cast.source_element() == element);
    let from = Rect {
        start: want.start * element,
        pitch: (want.width + want.gap) * element,
        width: want.width * element,
        rows: want.rows,
    };
    let width = written(from.width, cast);
    let (to, to_pitch) = (*region, width + want.to_gap);
    *region = to + to_pitch * want.rows;
    Part {
        from,
        rank: want.rank,
        to,
        to_pitch,
        cast,
    }
}

proptest! {
    #[test]
    fn executing_the_chunks_gives_what_the_parts_mean(plan in plans(), max_bytes in 1u64..120, max_gap in 0u64..20) {
        prop_assert_eq!(execute(&plan, plan.chunks(max_bytes, max_gap)), reference(&plan));
    }

    #[test]
    fn executing_the_blocks_gives_what_the_parts_mean(plan in plans(), bytes in 1u64..120) {
        let chunks = plan.blocks(bytes).map(|block| block.chunk);
        prop_assert_eq!(execute(&plan, chunks), reference(&plan));
    }

    #[test]
    fn blocks_are_all_bytes_and_read_no_more_than_an_element_twice(plan in plans(), bytes in 1u64..120) {
        let (mut files, mut left) = (vec![0; plan.files().len()], 0..0);
        for Block { chunk, range } in plan.blocks(bytes) {
            let block = Block { chunk, range: range.clone() };
            let done = &mut files[block.chunk.file as usize];
            prop_assert_eq!(range.start, *done, "without gaps, from the start");
            prop_assert!(range.end - range.start == bytes || range.end == plan.files()[block.chunk.file as usize]);
            *done = range.end;
            if range.start > 0 {
                prop_assert_eq!(block.before(), left, "what the last block left over");
            }
            prop_assert!(block.read().end == range.end && block.read().start == block.chunk.offset);
            left = block.after();
            prop_assert!(left.end - left.start < plan.largest_element());
        }
        prop_assert_eq!(files.as_slice(), plan.files());
    }

    #[test]
    fn no_byte_is_read_twice_and_no_wide_hole_at_all(plan in plans(), max_bytes in 1u64..120, max_gap in 0u64..20) {
        let needed = needed(&plan);
        let mut end = (0, 0);
        for chunk in plan.chunks(max_bytes, max_gap) {
            prop_assert!((chunk.file, chunk.offset) >= end, "in file order, apart");
            end = (chunk.file, chunk.offset + chunk.bytes);
            prop_assert!(chunk.bytes > 0 && chunk.bytes <= max_bytes.max(4));
            let read = &needed[chunk.file as usize][chunk.offset as usize..end.1 as usize];
            let widest = read.split(|&needed| needed).map(<[bool]>::len).max();
            prop_assert!(widest.unwrap_or(0) as u64 <= max_gap);
        }
        // Where no size cuts them, reads begin and end with a needed byte and stand wide apart.
        let chunks: Vec<Chunk> = plan.chunks(u64::MAX, max_gap).collect();
        for chunk in &chunks {
            let needed = &needed[chunk.file as usize];
            prop_assert!(needed[chunk.offset as usize] && needed[(chunk.offset + chunk.bytes - 1) as usize]);
        }
        for pair in chunks.windows(2) {
            let hole = pair[1].offset.saturating_sub(pair[0].offset + pair[0].bytes);
            prop_assert!(pair[0].file != pair[1].file || hole > max_gap);
        }
    }

    #[test]
    fn the_bytes_written_are_counted(plan in plans()) {
        for (rank, region) in (0..).zip(reference(&plan)) {
            let fills = plan.fills().iter().filter(|fill| fill.rank == rank).map(|fill| fill.bytes).sum::<u64>();
            let parts = plan.sources().iter().flat_map(|source| &source.parts);
            let rows = parts.filter(|part| part.rank == rank)
                .map(|part| part.from.rows * written(part.from.width, part.cast)).sum::<u64>();
            prop_assert_eq!(plan.written()[rank as usize], fills + rows);
            prop_assert!(fills + rows <= region.len() as u64);
        }
    }

    #[test]
    fn rectangles_overlap_exactly_when_a_byte_is_in_both(
        a in (0u64..40, 1u64..6, 0u64..6, 1u64..6), b in (0u64..40, 1u64..6, 0u64..6, 1u64..6), same in any::<bool>(),
    ) {
        let rect = |(start, width, gap, rows): (u64, u64, u64, u64)| Rect { start, pitch: width + gap, width, rows };
        let (mut a, mut b) = (rect(a), rect(b));
        if same {
            a.pitch = a.pitch.max(b.pitch);
            b.pitch = a.pitch;
        }
        let bytes = |rect: Rect| -> Vec<u64> {
            (0..rect.rows).flat_map(|row| (0..rect.width).map(move |at| rect.start + row * rect.pitch + at)).collect()
        };
        let other = bytes(b);
        let expected = bytes(a).iter().any(|byte| other.contains(byte));
        prop_assert_eq!(a.overlaps(&b), expected);
        prop_assert_eq!(b.overlaps(&a), expected);
    }

    #[test]
    fn any_numbers_give_a_plan_or_an_error(
        numbers in prop::collection::vec(prop_oneof![0u64..20, any::<u64>()], 9), rank in 0u32..3, file in 0u32..3,
    ) {
        let &[length, region, offset, bytes, start, pitch, width, rows, to] = numbers.as_slice() else { unreachable!() };
        let from = Rect { start, pitch, width, rows };
        let parts = vec![Part { from, rank, to, to_pitch: pitch, cast: None }];
        let source = Source { file, offset, bytes, element: 1, parts };
        let plan = ReadPlan::new(vec![length; 2], vec![region; 2], vec![source], vec![]);
        if let Ok(plan) = plan {
            prop_assert!(offset + bytes <= length && plan.written()[rank as usize] <= region);
        }
    }
}

fn copy_of(bytes: u64, rank: u32, to: u64) -> Part {
    Part {
        from: Rect::range(0, bytes),
        rank,
        to,
        to_pitch: bytes,
        cast: None,
    }
}

fn source(offset: u64, bytes: u64, parts: Vec<Part>) -> Source {
    Source {
        file: 0,
        offset,
        bytes,
        element: 1,
        parts,
    }
}

#[test]
fn what_no_rank_needs_is_not_read() {
    // Two ranks of four hold the middle columns of 100 rows.
    let column = |rank: u32| Part {
        from: Rect {
            start: 1000 + 1000 * u64::from(rank),
            pitch: 4000,
            width: 1000,
            rows: 100,
        },
        rank,
        to: 0,
        to_pitch: 1000,
        cast: None,
    };
    let all = source(8, 400_000, vec![column(0), column(1)]);
    let plan = ReadPlan::new(vec![400_008], vec![100_000; 2], vec![all], vec![]).unwrap();
    let read = |max_gap| {
        plan.chunks(1 << 20, max_gap)
            .map(|chunk| chunk.bytes)
            .collect::<Vec<_>>()
    };
    assert_eq!(read(1999), [2000; 100]);
    assert_eq!(read(2000), [99 * 4000 + 2000], "small holes are read along");
}

#[test]
fn small_neighbours_are_one_read() {
    let sources = (0..50)
        .map(|i| source(8 + i * 64, 60, vec![copy_of(60, 0, i * 256)]))
        .collect();
    let plan = ReadPlan::new(vec![8 + 50 * 64], vec![50 * 256], sources, vec![]).unwrap();
    assert_eq!(plan.chunks(1 << 20, 4).count(), 1);
    assert_eq!(plan.chunks(1 << 20, 3).count(), 50);
    assert_eq!(plan.chunks(1000, 4).map(|chunk| chunk.bytes).max(), Some(1000));
}

#[test]
fn a_plan_that_leaves_its_files_or_regions_or_writes_twice_is_refused() {
    let new = |sources, fills| ReadPlan::new(vec![100], vec![100], sources, fills).unwrap_err();
    let part = |to| vec![copy_of(10, 0, to)];
    assert!(matches!(
        new(vec![source(91, 10, vec![])], vec![]),
        ReadPlanError::OutsideFile { .. }
    ));
    assert!(matches!(
        new(vec![source(u64::MAX, 10, vec![])], vec![]),
        ReadPlanError::OutsideFile { .. }
    ));
    assert!(matches!(
        new(vec![source(0, 10, vec![]), source(9, 10, vec![])], vec![]),
        ReadPlanError::SourcesOverlap {
            source_index: 1,
            file: 0,
            offset: 9
        }
    ));
    assert!(matches!(
        new(vec![source(0, 9, part(0))], vec![]),
        ReadPlanError::OutsideSource { .. }
    ));
    assert!(matches!(
        new(vec![source(0, 10, part(91))], vec![]),
        ReadPlanError::OutsideRegion { rank: 0, offset: 91 }
    ));
    assert!(matches!(
        new(vec![source(0, 10, vec![copy_of(10, 1, 0)])], vec![]),
        ReadPlanError::OutsideRegion { rank: 1, .. }
    ));
    let two = vec![source(0, 10, part(0)), source(10, 10, part(9))];
    assert_eq!(
        new(two, vec![]),
        ReadPlanError::WritesOverlap {
            rank: 0,
            first: 0,
            second: 9
        }
    );
    let fill = Fill {
        rank: 0,
        offset: 5,
        bytes: 1,
    };
    assert_eq!(
        new(vec![source(0, 10, part(0))], vec![fill]),
        ReadPlanError::WritesOverlap {
            rank: 0,
            first: 0,
            second: 5
        }
    );
    let cast = Cast::new(Dtype::F32, Dtype::BF16);
    let odd = Part {
        cast,
        ..copy_of(10, 0, 0)
    };
    let odd = Source {
        element: 4,
        ..source(0, 10, vec![odd])
    };
    assert!(matches!(
        new(vec![odd], vec![]),
        ReadPlanError::SplitsElement { element: 4, .. }
    ));
}
