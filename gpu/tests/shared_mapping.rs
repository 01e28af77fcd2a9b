//! A checkpoint that is changed through a shared mapping, whose stores file times tell of only now and then. (Here, since
//! such a mapping takes `unsafe`, which is nowhere else.)

#![allow(unsafe_code)]

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::fs::{self, File};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;
use weightd_checkpoint::Checkpoint;

/// All of a file, mapped for storing.
struct Stores {
    start: *mut c_void,
    bytes: usize,
}

impl Stores {
    fn into(path: &Path) -> Stores {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let bytes = file.metadata().unwrap().len() as usize;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice. It lasts until `self` goes.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0) }.unwrap();
        Stores { start, bytes }
    }

    /// Changes the last byte, which belongs to a weight.
    fn change(&self) {
        let last = self.start.cast::<u8>().wrapping_add(self.bytes - 1);
        // SAFETY: the byte is the mapping's last, and no reference into it exists. The file keeps its size.
        unsafe { last.write_volatile(last.read_volatile() ^ 1) };
    }
}

impl Drop for Stores {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, as a whole.
        unsafe { munmap(self.start, self.bytes) }.unwrap();
    }
}

/// What the checkpoint is told apart by without being read, once its files are old enough for that.
fn identity(model: &Path) -> Option<[u8; 32]> {
    let known = || Checkpoint::open(model).unwrap().identity().files;
    (0..500).find_map(|_| {
        sleep(Duration::from_millis(10));
        known()
    })
}

#[test]
fn every_store_through_a_mapping_makes_another_checkpoint_or_one_that_has_to_be_read() {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/qwen3");
    let model = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), model.path().join(entry.file_name())).unwrap();
    }
    let stores = Stores::into(&model.path().join("model.safetensors"));
    let mut seen = Vec::new();
    for _ in 0..3 {
        stores.change();
        let Some(now) = identity(model.path()) else {
            // This file system keeps no times that can be trusted: the bytes are compared, always.
            assert!(seen.is_empty(), "it was trusted before");
            return;
        };
        assert!(!seen.contains(&now), "bytes changed, and nobody can tell");
        seen.push(now);
    }
}
