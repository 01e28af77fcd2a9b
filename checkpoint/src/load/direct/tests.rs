use super::*;
use crate::load::reader::Reader;
use crate::load::residency::Residency;
use proptest::prelude::*;
use rustix::fs::Advice;
use std::path::Path;
use std::sync::OnceLock;
use tempfile::TempDir;

/// Not a multiple of any block.
const BYTES: usize = (1 << 20) + 12_345;

/// A file without a short period, on the file system where this is built, in a directory of its own.
fn file() -> (TempDir, SourceFile, Vec<u8>) {
    file_in(Path::new(env!("CARGO_MANIFEST_DIR")).join("../target").as_path())
}

fn file_in(place: &Path) -> (TempDir, SourceFile, Vec<u8>) {
    std::fs::create_dir_all(place).unwrap();
    let dir = tempfile::tempdir_in(place).unwrap();
    let bytes: Vec<u8> = (0..BYTES as u32)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    std::fs::write(dir.path().join("file"), &bytes).unwrap();
    let fd = rustix::fs::open(dir.path(), OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
    let source = SourceFile::open(&fd, dir.path(), "file").unwrap().unwrap();
    (dir, source, bytes)
}

/// Takes a file out of the page cache.
fn evict(source: &SourceFile) {
    source.file.sync_all().unwrap();
    rustix::fs::fadvise(&source.file, 0, None, Advice::DontNeed).unwrap();
}

fn direct(source: &SourceFile) -> Option<Direct> {
    let direct = Direct::open(source);
    if direct.is_none() {
        eprintln!("skipped: {} has no O_DIRECT", source.path.display());
    }
    direct
}

/// A lane with room for the range and the slack, as a load has it.
fn lane(bytes: u64) -> Lane {
    Lane::open(&[], 1, bytes as usize, None).unwrap().remove(0)
}

#[test]
fn blocks_are_read_past_the_cache_and_what_is_left_of_the_last_through_it() {
    let (_dir, source, bytes) = file();
    let Some(direct) = direct(&source) else { return };
    let (size, align) = (bytes.len() as u64, direct.align);
    let whole = size - size % align;
    let mut lane = lane(2 * align + direct.slack());
    let buffer = lane.next_buffer().unwrap();
    // The bytes wanted; those of them read directly; those read beside them.
    for (range, direct_bytes, slack) in [
        (0..align, align, 0),
        (1..align, align - 1, 1),
        (align - 1..align + 1, 2, 2 * align - 2),
        (whole - 1..size, 1, align - 1),
        (whole - align..whole, align, 0),
    ] {
        let filled = direct.read(&source, range.clone(), buffer).unwrap().unwrap();
        let expected = Filled {
            at: (range.start % align) as usize,
            direct: direct_bytes,
            slack,
        };
        assert_eq!(filled, expected, "{range:?}");
        let length = (range.end - range.start) as usize;
        assert!(buffer[filled.at..][..length] == bytes[range.start as usize..range.end as usize]);
    }
    for range in [whole..size, whole + 1..whole + 2] {
        assert_eq!(direct.read(&source, range, buffer).unwrap(), None);
    }
}

#[test]
fn blocks_larger_than_the_range_are_read_whole() {
    let (_dir, source, bytes) = file();
    let Some(file) = source.reopen(OFlags::DIRECT) else {
        return;
    };
    let direct = Direct::with(file, 64 << 10);
    let mut lane = lane(4096 + direct.slack());
    let buffer = lane.next_buffer().unwrap();
    let filled = direct.read(&source, 65_000..67_000, buffer).unwrap().unwrap();
    assert_eq!(
        (filled.at, filled.direct, filled.slack),
        (65_000, 2000, (128 << 10) - 2000)
    );
    assert!(buffer[filled.at..][..2000] == bytes[65_000..67_000]);
}

#[test]
fn a_file_that_shrinks_is_an_error_also_past_the_cache() {
    let (dir, source, _) = file();
    let Some(direct) = direct(&source) else { return };
    let mut lane = lane(BYTES as u64 + direct.slack());
    let buffer = lane.next_buffer().unwrap();
    let writable = std::fs::OpenOptions::new()
        .write(true)
        .open(dir.path().join("file"))
        .unwrap();
    for left in [700_001, direct.align, 0] {
        writable.set_len(left).unwrap();
        for range in [0..BYTES as u64, 500_000..1_000_000] {
            let error = direct.read(&source, range, buffer).unwrap_err();
            assert!(matches!(error, CheckpointError::Changed { .. }), "{error}");
        }
    }
}

#[test]
fn a_refused_read_goes_through_the_cache_and_is_not_tried_again() {
    let (_dir, source, bytes) = file();
    if direct(&source).is_none() {
        return;
    }
    // No block is as small as this, so the kernel refuses.
    let direct = Direct::with(source.reopen(OFlags::DIRECT).unwrap(), 1);
    let mut lane = lane(100);
    let buffer = lane.next_buffer().unwrap();
    let filled = direct.read(&source, 7..77, buffer).unwrap().unwrap();
    assert_eq!((filled.at, filled.direct, filled.slack), (0, 0, 0));
    assert!(buffer[..70] == bytes[7..77]);
    assert!(direct.refused());
    assert_eq!(direct.read(&source, 0..64, buffer).unwrap(), None);
}

#[test]
fn the_cached_half_of_a_file_is_read_from_the_cache_and_the_other_past_it() {
    let (_dir, source, bytes) = file();
    let reader = Reader::open(&source, false);
    if direct(&source).is_none() || !matches!(reader.residency(), Residency::Counted) {
        eprintln!("skipped: the kernel does not say what is cached here");
        return;
    }
    let half = 512 << 10;
    evict(&source);
    // Through a descriptor that does not read ahead.
    let ahead = source.reopen(OFlags::empty()).unwrap();
    rustix::fs::fadvise(&ahead, 0, None, Advice::Random).unwrap();
    std::os::unix::fs::FileExt::read_exact_at(&ahead, &mut vec![0; half as usize], 0).unwrap();
    if weightd_gpu::resident(&source.file, half, 0) != Some(0) {
        eprintln!("skipped: pages stay in the cache here");
        return;
    }
    let mut lane = lane((64 << 10) + reader.slack());
    let buffer = lane.next_buffer().unwrap();
    let (mut buffered, mut past) = (0, 0);
    for start in (0..1 << 20).step_by(64 << 10) {
        let range = start + 5..start + (64 << 10) - 5;
        let (at, taken) = reader.read(range.clone(), buffer).unwrap();
        let length = (range.end - range.start) as usize;
        assert!(buffer[at..][..length] == bytes[range.start as usize..range.end as usize]);
        assert!(!taken.refused);
        buffered += taken.buffered;
        past += taken.direct;
    }
    assert_eq!((buffered, past), (8 * ((64 << 10) - 10), 8 * ((64 << 10) - 10)));
    // Nothing of what was read past the cache is in it now.
    let resident = weightd_gpu::resident(&source.file, half, (1 << 20) - half).unwrap();
    assert_eq!(resident, 0);
}

#[test]
fn all_goes_through_the_cache_for_files_that_are_shared() {
    let (_dir, source, _) = file();
    evict(&source);
    let (_, taken) = Reader::open(&source, true)
        .read(0..BYTES as u64, &mut vec![0; BYTES])
        .unwrap();
    assert_eq!(
        (taken.buffered, taken.direct, taken.refused),
        (BYTES as u64, 0, false)
    );
}

#[test]
fn memory_file_systems_count_as_cached() {
    let Ok(_) = std::fs::metadata("/dev/shm") else {
        return;
    };
    let (_dir, source, bytes) = file_in(Path::new("/dev/shm"));
    let reader = Reader::open(&source, false);
    assert!(matches!(reader.residency(), Residency::Memory));
    let mut buffer = vec![0; 100];
    let (at, taken) = reader.read(1000..1100, &mut buffer).unwrap();
    assert_eq!(
        (at, taken.buffered, taken.direct, taken.refused),
        (0, 100, 0, false)
    );
    assert!(buffer == bytes[1000..1100]);
}

#[test]
fn probes_tell_what_is_cached_and_leave_the_cache_as_it_was() {
    let (_dir, source, _) = file();
    let Some(probed) = Residency::probed(&source) else {
        eprintln!("skipped: no reads without waiting here");
        return;
    };
    let all = 0..BYTES as u64;
    source.read_exact_at(&mut vec![0; BYTES], 0).unwrap();
    assert!(probed.cached(&source, all.clone()));
    evict(&source);
    let Some(before) = weightd_gpu::resident(&source.file, 0, 0) else {
        return;
    };
    if before > 0 {
        eprintln!("skipped: pages stay in the cache here");
        return;
    }
    assert!(!probed.cached(&source, all));
    // The page that was asked for may come, and no other.
    let after = weightd_gpu::resident(&source.file, 0, 0).unwrap();
    assert!(after <= rustix::param::page_size() as u64, "{after}");
}

#[test]
fn another_descriptor_is_of_the_same_file_whatever_its_name_is_now() {
    let (dir, source, bytes) = file();
    std::fs::rename(dir.path().join("file"), dir.path().join("moved")).unwrap();
    std::fs::write(dir.path().join("file"), "another").unwrap();
    let again = source.reopen(OFlags::empty()).unwrap();
    let mut read = vec![0; bytes.len()];
    std::os::unix::fs::FileExt::read_exact_at(&again, &mut read, 0).unwrap();
    assert!(read == bytes);
}

proptest! {
    #[test]
    fn both_ways_bring_the_same_bytes(
        start in 0..BYTES as u64, length in 1..200_000u64, shift in 0u32..5,
    ) {
        static FILE: OnceLock<(TempDir, SourceFile, Vec<u8>)> = OnceLock::new();
        let (_dir, source, bytes) = FILE.get_or_init(file);
        let Some(file) = source.reopen(OFlags::DIRECT) else { return Ok(()) };
        let direct = Direct::with(file, 4096 << shift);
        let range = start..(start + length).min(BYTES as u64);
        let wanted = (range.end - range.start) as usize;
        let mut lane = lane(wanted as u64 + direct.slack());
        let buffer = lane.next_buffer().unwrap();
        match direct.read(source, range.clone(), buffer).unwrap() {
            Some(filled) => {
                prop_assert!(buffer[filled.at..][..wanted] == bytes[range.start as usize..range.end as usize]);
                prop_assert!(!direct.refused() && filled.direct <= wanted as u64);
                prop_assert!(filled.slack < direct.slack());
            }
            None => prop_assert!(range.start >= BYTES as u64 - BYTES as u64 % direct.align),
        }
    }
}
