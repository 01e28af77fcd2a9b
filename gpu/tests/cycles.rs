//! Alone in its process, since it counts what the process holds.

use weightd_core::content::HandleKind;
use weightd_gpu::{Device, Mapping};

/// Open descriptors, and mappings of memfds.
fn held() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (
        descriptors,
        maps.lines().filter(|line| line.contains("memfd:weightd")).count(),
    )
}

#[test]
fn ten_thousand_imports_leave_nothing_behind() {
    let device = Device::host(0);
    let region = device.allocate(100_000).unwrap();
    region.write(99_999, b"x").unwrap();
    let export = region.export().unwrap();
    let import = |bytes| {
        Mapping::import(
            HandleKind::Memfd,
            export.fd.try_clone().unwrap(),
            bytes,
            device.uuid(),
        )
    };
    let before = held();
    for _ in 0..10_000 {
        assert_eq!(import(export.bytes).unwrap().host().unwrap()[99_999], b'x');
        assert!(import(export.bytes + 1).is_err());
    }
    assert_eq!(held(), before);

    let kept = import(export.bytes).unwrap();
    assert_eq!(held(), (before.0, before.1 + 1), "a mapping holds no descriptor");
    drop(kept);
    assert_eq!(held(), before);
}
