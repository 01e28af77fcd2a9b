//! Regions, exports and mappings within one process.

use proptest::prelude::*;
use rustix::fs::{self, FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use weightd_core::content::{DeviceUuid, HandleKind};
use weightd_gpu::{
    Device, Export, Lane, Mapping, MemoryError, Region, Rows, check_room, read_sealed, resident, sealed,
};

fn region(bytes: u64) -> Region {
    Device::host(0).allocate(bytes).unwrap()
}

fn import(fd: OwnedFd, bytes: u64) -> Result<Mapping, MemoryError> {
    Mapping::import(HandleKind::Memfd, fd, bytes, Device::host(0).uuid())
}

fn exported(region: Region) -> Mapping {
    let Export { fd, bytes, handle } = region.export().unwrap();
    Mapping::import(handle, fd, bytes, Device::host(0).uuid()).unwrap()
}

fn bytes_of(region: Region) -> Vec<u8> {
    exported(region).host().unwrap().to_vec()
}

#[test]
fn fresh_memory_is_zero_and_zeroed_memory_too() {
    let region = region(1 << 20);
    region.write(100, &[7; 900_000]).unwrap();
    region.zero(200, 800_000).unwrap();
    let mut expected = vec![0; 1 << 20];
    expected[100..200].fill(7);
    expected[800_200..900_100].fill(7);
    assert!(bytes_of(region) == expected);
}

#[test]
fn a_region_of_no_bytes_works() {
    let region = region(0);
    region.write(0, &[]).unwrap();
    region.zero(0, 0).unwrap();
    assert_eq!(exported(region).host().unwrap(), []);
}

#[test]
fn an_access_outside_the_region_is_refused_and_writes_nothing() {
    let region = region(10);
    let refused = |result: Result<(), MemoryError>| {
        assert!(
            matches!(result, Err(MemoryError::OutOfBounds { bytes: 10, .. })),
            "{result:?}"
        );
    };
    let ones = [1; 16];
    refused(region.write(9, &ones[..2]));
    refused(region.write(11, &[]));
    refused(region.write(u64::MAX, &ones[..2]));
    refused(region.zero(0, 11));
    refused(region.zero(u64::MAX, u64::MAX));
    refused(region.write_2d(&ones, copy_of(0, 4, 4, 4, 3)));
    refused(region.write_2d(&ones, copy_of(0, u64::MAX, 4, 4, 3)));
    refused(region.write_2d(&ones, copy_of(0, u64::MAX - 3, 4, 4, 2)));
    refused(region.write_2d(&ones, copy_of(u64::MAX, 4, 4, 4, 2)));
    refused(region.write_2d(&[], copy_of(11, 0, 0, 0, 0)));
    assert_eq!(bytes_of(region), [0; 10]);
}

#[test]
fn rows_that_leave_their_source_or_overlap_are_refused() {
    let region = region(64);
    let refused = |result| assert!(matches!(result, Err(MemoryError::Rows { .. })), "{result:?}");
    let source = [1; 16];
    refused(region.write_2d(&source, copy_of(0, 4, 4, 4, 5)));
    refused(region.write_2d(&source, copy_of(0, 4, 7, 4, 3)));
    refused(region.write_2d(&source, copy_of(0, 4, usize::MAX, 4, 3)));
    refused(region.write_2d(&source, copy_of(0, 4, usize::MAX - 3, 4, 2)));
    refused(region.write_2d(&source, copy_of(0, 3, 4, 4, 2)));
    assert_eq!(bytes_of(region), [0; 64]);
}

#[test]
fn long_runs_of_rows_are_gathered_whole() {
    let (rows, width, pitch) = (1500, 1000, 1001);
    let source: Vec<u8> = (0..rows * pitch).map(|at| (at * 31 % 251) as u8).collect();
    let region = region((rows * width) as u64);
    region
        .write_2d(&source, copy_of(0, width as u64, pitch, width, rows))
        .unwrap();
    let expected: Vec<u8> = source
        .chunks(pitch)
        .flat_map(|row| &row[..width])
        .copied()
        .collect();
    assert!(bytes_of(region) == expected);
}

proptest! {
    #[test]
    fn rows_land_where_their_pitches_say(
        (offset, width, rows) in (0usize..9, 0usize..9, 0usize..9),
        (src_gap, dst_gap) in (0usize..4, prop_oneof![Just(0usize), 1usize..4]),
    ) {
        let (src_pitch, dst_pitch) = (width + src_gap, width + dst_gap);
        let source: Vec<u8> = (1..=255).collect();
        let mut expected = vec![0u8; 200];
        for row in 0..rows {
            let from = &source[row * src_pitch..][..width];
            expected[offset + row * dst_pitch..][..width].copy_from_slice(from);
        }
        let region = region(200);
        region.write_2d(&source, copy_of(offset as u64, dst_pitch as u64, src_pitch, width, rows)).unwrap();
        prop_assert_eq!(bytes_of(region), expected);
    }
}

#[test]
fn more_memory_than_there_is_is_refused_before_it_is_taken() {
    for bytes in [1 << 48, u64::MAX] {
        let error = Device::host(0).allocate(bytes).unwrap_err();
        assert!(matches!(error, MemoryError::OutOfMemory { .. }), "{error}");
        assert!(error.to_string().contains(&bytes.to_string()), "{error}");
    }
}

#[test]
fn regions_need_room_together() {
    let host = |number| Device::host(number);
    check_room([(host(0), 1 << 20), (host(1), 1 << 20)]).unwrap();
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let kib = |name: &str| -> u64 {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name));
        let line = line.unwrap_or("0");
        line.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap()
    };
    let share = (kib("MemAvailable:") + kib("SwapFree:")) * 1024 / 3 * 2;
    check_room([(host(0), share)]).unwrap();
    let error = check_room([(host(0), share), (host(1), share)]).unwrap_err();
    assert!(
        matches!(error, MemoryError::OutOfMemory { bytes, .. } if bytes == 2 * share),
        "{error}"
    );
    check_room([(host(0), u64::MAX), (host(1), u64::MAX)]).unwrap_err();
}

#[test]
fn an_exported_region_has_all_of_its_pages_and_no_reader_takes_more() {
    for bytes in [10, 1 << 20, (1 << 20) + 1] {
        let region = region(bytes);
        region.write(bytes / 2, &[9]).unwrap();
        let fd = region.export().unwrap().fd;
        let taken = fs::fstat(&fd).unwrap().st_blocks as u64 * 512;
        assert!(taken >= bytes, "{taken} of {bytes}");
        let mapping = import(fd, bytes).unwrap();
        let mapped = mapping.host().unwrap();
        assert_eq!(mapped[bytes as usize / 2], 9);
        assert_eq!(mapped.iter().map(|&byte| u64::from(byte)).sum::<u64>(), 9);
    }
}

#[test]
fn the_page_cache_tells_what_it_holds_of_a_file() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[1; 100_000]).unwrap();
    let Some(all) = resident(&file, 0, 0) else {
        eprintln!("skipped: the kernel has no cachestat, or a filter forbids it");
        return;
    };
    let page = rustix::param::page_size() as u64;
    // Where another file system's pages are used, none are counted.
    if all > 0 {
        assert_eq!(all, 100_000u64.next_multiple_of(page));
        assert_eq!(resident(&file, 1, 1), Some(page));
        assert_eq!(resident(&file, page - 1, 2), Some(2 * page));
    }
    assert_eq!(resident(&file, 1 << 40, 1 << 20), Some(0));
}

#[test]
fn buffers_of_a_lane_start_on_a_page_and_hold_what_was_asked_for() {
    for bytes in [1, 4096, 5000] {
        for mut lane in Lane::open(&[Device::host(0)], 3, bytes, None).unwrap() {
            let buffer = lane.next_buffer().unwrap();
            assert!(buffer.len() >= bytes && buffer.as_ptr().addr().is_multiple_of(Lane::ALIGN));
        }
    }
}

#[test]
fn exported_memory_can_be_changed_by_nobody() {
    let region = region(4096);
    region.write(0, b"weights").unwrap();
    let fd = region.export().unwrap().fd;
    assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::PERM));
    assert_eq!(fs::ftruncate(&fd, 0), Err(Errno::PERM));
    assert_eq!(fs::ftruncate(&fd, 8192), Err(Errno::PERM));
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fs::fallocate(&fd, punch, 0, 4096), Err(Errno::PERM));
    assert_eq!(
        fs::fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE),
        Err(Errno::PERM)
    );
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let reopened = OpenOptions::new()
        .write(true)
        .open(path)
        .and_then(|mut file| file.write(b"x"));
    assert_eq!(
        reopened.unwrap_err().raw_os_error(),
        Some(Errno::PERM.raw_os_error())
    );
    assert_eq!(writable_mapping(&fd), Err(Errno::PERM));
    assert_eq!(&import(fd, 4096).unwrap().host().unwrap()[..7], b"weights");
}

#[allow(unsafe_code)]
fn writable_mapping(fd: &OwnedFd) -> Result<(), Errno> {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let writable = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping touches no memory of ours.
    unsafe { mmap(std::ptr::null_mut(), 4096, writable, MapFlags::SHARED, fd, 0) }.map(drop)
}

fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let fd = fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    fs::ftruncate(&fd, bytes).unwrap();
    fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[test]
fn memory_that_may_still_change_is_refused_at_import() {
    let all = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    assert_eq!(import(memfd(10, all), 10).unwrap().host().unwrap(), [0; 10]);
    for missing in all.iter() {
        let error = import(memfd(10, all - missing), 10).unwrap_err();
        assert!(matches!(error, MemoryError::NotSealed { .. }), "{error}");
    }
    let future = (all - SealFlags::WRITE) | SealFlags::FUTURE_WRITE;
    let null = std::fs::File::open("/dev/null").unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(10).unwrap();
    for fd in [memfd(10, future), null.into(), file.into()] {
        let error = import(fd, 10).unwrap_err();
        assert!(matches!(error, MemoryError::NotSealed { .. }), "{error}");
    }
}

#[test]
fn memory_of_another_size_or_kind_is_refused_at_import() {
    for stated in [0, 9, 11, u64::MAX] {
        let fd = region(10).export().unwrap().fd;
        let error = import(fd, stated).unwrap_err();
        assert!(matches!(error, MemoryError::Size { actual: 10, .. }), "{error}");
    }
    for handle in [HandleKind::CudaFd, HandleKind::CudaIpc] {
        let fd = region(10).export().unwrap().fd;
        let error = Mapping::import(handle, fd, 10, DeviceUuid([1; 16])).unwrap_err();
        assert!(
            matches!(error, MemoryError::Unsupported { .. } | MemoryError::Cuda(_)),
            "{error}"
        );
    }
}

#[test]
fn sealed_bytes_come_back_within_their_cap() {
    for bytes in [&b""[..], b"manifest", &[5; 100_000]] {
        let fd = sealed(bytes).unwrap();
        assert_eq!(read_sealed(&fd, bytes.len() as u64).unwrap(), bytes);
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::PERM));
        assert!(
            rustix::io::fcntl_getfd(&fd)
                .unwrap()
                .contains(rustix::io::FdFlags::CLOEXEC)
        );
    }
    let error = read_sealed(sealed(b"12345").unwrap(), 4).unwrap_err();
    assert!(
        matches!(error, MemoryError::TooLarge { actual: 5, cap: 4 }),
        "{error}"
    );
    let error = read_sealed(memfd(5, SealFlags::WRITE), 5).unwrap_err();
    assert!(matches!(error, MemoryError::NotSealed { .. }), "{error}");
}

fn copy_of(offset: u64, dst_pitch: u64, src_pitch: usize, width: usize, rows: usize) -> Rows {
    Rows {
        offset,
        dst_pitch,
        src_pitch,
        width,
        rows,
    }
}
