//! Regions that are filled with what is on the device already.

use crate::*;
use weightd_gpu::cuda::Allocation;

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_the_engine_holds_is_copied_inside_the_device() {
    let device = device();
    let source = bytes(5 << 20);
    let ours = Allocation::new(device.uuid(), source.len() as u64).unwrap();
    ours.write(0, &source).unwrap();
    let region = device.allocate(source.len() as u64 + 256).unwrap();
    region.zero(0, source.len() as u64 + 256).unwrap();
    // SAFETY: all of it is inside `ours`, which nothing writes, or refused before it is read.
    unsafe {
        region
            .copy_from_device(256, ours.address(), source.len() as u64)
            .unwrap();
        region.copy_from_device(3, ours.address() + 1001, 99).unwrap();
        region.copy_from_device(0, 0, 0).unwrap();
        let error = region
            .copy_from_device(257, ours.address(), source.len() as u64)
            .unwrap_err();
        assert!(matches!(error, MemoryError::OutOfBounds { .. }), "{error}");
    }
    // Each copy was waited for.
    drop(ours);
    let kept = region.export().unwrap();
    let sent = kept.try_clone().unwrap();
    let mut expected = vec![0; 256];
    expected[3..102].copy_from_slice(&source[1001..1100]);
    expected.extend_from_slice(&source);
    for export in [kept, sent] {
        let mapping = Mapping::import(export.handle, export.fd, export.bytes, device.uuid()).unwrap();
        assert!(read(&mapping) == expected);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_are_gathered_from_what_is_strided() {
    let device = device();
    let source = bytes(1 << 20);
    let ours = Allocation::new(device.uuid(), source.len() as u64).unwrap();
    ours.write(0, &source).unwrap();
    // Packed, with gaps, rows that overlap in the source, and one row alone.
    for (dst_pitch, src_pitch, width, rows) in [
        (333, 1001, 333, 700),
        (512, 1001, 333, 700),
        (64, 2, 64, 9),
        (0, 0, 77, 1),
    ] {
        let region = device.allocate(1 << 20).unwrap();
        region.zero(0, 1 << 20).unwrap();
        let copy = Rows {
            offset: 5,
            dst_pitch,
            src_pitch,
            width,
            rows,
        };
        // SAFETY: the last row ends inside `ours`, which nothing writes.
        unsafe { region.copy_rows_from_device(ours.address() + 7, copy).unwrap() };
        let mut expected = vec![0; 1 << 20];
        for row in 0..rows {
            expected[5 + row * dst_pitch as usize..][..width]
                .copy_from_slice(&source[7 + row * src_pitch..][..width]);
        }
        let export = region.export().unwrap();
        let mapping = Mapping::import(export.handle, export.fd, export.bytes, device.uuid()).unwrap();
        assert!(read(&mapping) == expected, "{copy:?}");
    }
}
