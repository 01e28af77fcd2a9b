//! Whether the host has room.

use crate::device::DeviceKind;
use crate::{Device, MemoryError};
use rustix::process::{Resource, getrlimit};

/// Whether the host has room for regions of so many bytes on these devices, all together.
///
/// Host memory is taken when a region is filled and not when it is allocated, so regions that fit
/// one by one may not fit together. A CUDA device says itself when it allocates.
///
/// # Errors
///
/// [`MemoryError::OutOfMemory`], with the sum.
pub fn check_room(regions: impl IntoIterator<Item = (Device, u64)>) -> Result<(), MemoryError> {
    let host = regions
        .into_iter()
        .filter(|(device, _)| device.kind() == DeviceKind::Cpu);
    let bytes = host.fold(0u64, |sum, (_, bytes)| sum.saturating_add(bytes));
    let lacking = |why| MemoryError::OutOfMemory { bytes, why };
    check_memory(bytes).map_err(lacking)
}

/// Finds a lack of memory before the kernel does, which would kill a process for it: a memfd may
/// promise more than the machine has, and a file over the size limit ends its writer by a signal.
pub(crate) fn check(bytes: u64) -> Result<(), String> {
    check_memory(bytes)?;
    if let Some(limit) = getrlimit(Resource::Fsize).current
        && bytes > limit
    {
        return Err(format!("the limit on file sizes (ulimit -f) is {limit} bytes"));
    }
    Ok(())
}

/// How many bytes regions could have, all together; `None` where that is not known, or a limit on this process
/// is what leaves no room for `bytes`.
pub(crate) fn room_for(bytes: u64) -> Option<u64> {
    let limit = getrlimit(Resource::Fsize).current;
    if limit.is_some_and(|limit| bytes > limit) {
        return None;
    }
    available(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn check_memory(bytes: u64) -> Result<(), String> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    match available(&meminfo) {
        Some(available) if bytes > available => {
            Err(format!("{available} bytes of host memory are available"))
        }
        _ => Ok(()),
    }
}

/// What `/proc/meminfo` says can be had without harm, swap included, in bytes.
fn available(meminfo: &str) -> Option<u64> {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        let kib = line.strip_prefix(':')?.trim().strip_suffix("kB")?;
        kib.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    field("MemAvailable")?.checked_add(field("SwapFree").unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_what_the_kernel_says_is_available() {
        let meminfo = "MemTotal: 9 kB\nMemAvailable:    3 kB\nSwapTotal: 8 kB\nSwapFree:  1 kB\n";
        assert_eq!(available(meminfo), Some(4096));
        assert_eq!(available("MemAvailable: 3 kB\n"), Some(3072));
        assert_eq!(available("MemTotal: 9 kB\n"), None);
    }
}
