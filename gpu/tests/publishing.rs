//! Filling regions with what an engine holds, and sending what it keeps. Host memory stands for a
//! device's here; `cuda/publishing.rs` has the same on a GPU.

#![allow(unsafe_code)] // Addresses, which these tests vouch for.

use weightd_core::content::HandleKind;
use weightd_gpu::{Device, Export, Mapping, MemoryError, Region, Rows};

fn import(export: Export) -> Mapping {
    let Export { fd, bytes, handle } = export;
    Mapping::import(handle, fd, bytes, Device::host(0).uuid()).unwrap()
}

fn bytes_of(region: Region) -> Vec<u8> {
    import(region.export().unwrap()).host().unwrap().to_vec()
}

#[test]
fn what_the_engine_holds_is_copied_from_its_address() {
    let ours: Vec<u8> = (0..100).collect();
    let address = ours.as_ptr() as u64;
    let region = Device::host(0).allocate(110).unwrap();
    // SAFETY: all of it is inside `ours`, or refused, or nothing.
    unsafe {
        region.copy_from_device(10, address, 100).unwrap();
        region.copy_from_device(0, address + 90, 10).unwrap();
        region.copy_from_device(110, 0, 0).unwrap();
        for (offset, bytes) in [(11, 100), (111, 0), (u64::MAX, 2)] {
            let error = region.copy_from_device(offset, address, bytes).unwrap_err();
            assert!(matches!(error, MemoryError::OutOfBounds { .. }), "{error}");
        }
    }
    assert_eq!(bytes_of(region), [&ours[90..], &ours].concat());
}

#[test]
fn rows_are_gathered_from_what_is_strided() {
    let ours: Vec<u8> = (0..40).collect();
    let rows = |dst_pitch| Rows {
        offset: 1,
        dst_pitch,
        src_pitch: 10,
        width: 3,
        rows: 4,
    };
    for pitch in [3, 5] {
        let region = Device::host(0).allocate(20).unwrap();
        // SAFETY: the rows are inside `ours`, or refused.
        unsafe {
            region
                .copy_rows_from_device(ours.as_ptr() as u64, rows(pitch))
                .unwrap();
            let error = region
                .copy_rows_from_device(ours.as_ptr() as u64, rows(2))
                .unwrap_err();
            assert!(matches!(error, MemoryError::Rows { .. }), "{error}");
            let error = region
                .copy_rows_from_device(ours.as_ptr() as u64, rows(6))
                .unwrap_err();
            assert!(matches!(error, MemoryError::OutOfBounds { .. }), "{error}");
        }
        let mut expected = vec![0; 20];
        for row in 0..4 {
            expected[1 + row * pitch as usize..][..3].copy_from_slice(&ours[row * 10..][..3]);
        }
        assert_eq!(bytes_of(region), expected);
    }
}

#[test]
fn an_export_is_sent_and_mapped() {
    let region = Device::host(0).allocate(4).unwrap();
    region.write(0, b"both").unwrap();
    let kept = region.export().unwrap();
    let sent = kept.try_clone().unwrap();
    assert_eq!((sent.bytes, sent.handle), (4, HandleKind::Memfd));
    assert!(
        rustix::io::fcntl_getfd(&sent.fd)
            .unwrap()
            .contains(rustix::io::FdFlags::CLOEXEC)
    );
    let mapping = import(kept);
    assert_eq!(import(sent).host(), Some(&b"both"[..]));
    assert_eq!(mapping.host(), Some(&b"both"[..]));
}
