//! How much of a file is in the page cache.

#![allow(unsafe_code)] // A system call that no crate wraps.

use std::ffi::{c_int, c_long, c_uint};
use std::os::fd::{AsFd, AsRawFd};

/// How many bytes of the page cache hold pages of a file's range, by `cachestat(2)` (Linux 6.5).
///
/// Asking reads nothing and moves nothing. `bytes` of 0 means up to the end of the file. Pages count
/// whole, also those that only begin or end in the range. On a file system that keeps its pages
/// elsewhere, as overlayfs does, the answer is 0 whatever is cached.
///
/// `None` where the kernel does not tell: an older one, a filter on system calls, or a file that the
/// caller neither owns nor may write.
pub fn resident(fd: impl AsFd, offset: u64, bytes: u64) -> Option<u64> {
    let number = CACHESTAT?;
    let range = Range { offset, bytes };
    let mut stat = Stat::default();
    let flags: c_uint = 0;
    let fd: c_int = fd.as_fd().as_raw_fd();
    // SAFETY: the kernel reads `range` and writes `stat`, which are laid out as it defines them and
    // live through the call, and touches nothing else of this process. One that does not know the
    // number returns an error, since no number is given twice.
    let answer = unsafe { syscall(number, fd, &raw const range, &raw mut stat, flags) };
    (answer == 0).then(|| stat.cached.saturating_mul(rustix::param::page_size() as u64))
}

/// The number is the same on all architectures but a few old ones.
const CACHESTAT: Option<c_long> = match cfg!(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_arch = "riscv64",
    target_arch = "powerpc64",
    target_arch = "s390x",
    target_arch = "loongarch64"
)) && cfg!(target_pointer_width = "64")
{
    true => Some(451),
    false => None,
};

/// `struct cachestat_range` of linux/mman.h.
#[repr(C)]
struct Range {
    offset: u64,
    bytes: u64,
}

/// `struct cachestat` of linux/mman.h, in pages.
#[repr(C)]
#[derive(Default)]
struct Stat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

unsafe extern "C" {
    /// Of the C library, which std links: -1 for an error.
    fn syscall(number: c_long, ...) -> c_long;
}
