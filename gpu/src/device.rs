//! Devices and the names that they go by.

use crate::cuda::{self, CudaError};
use crate::{MemoryError, Region};
use std::fs;
use std::sync::Arc;
use weightd_core::content::DeviceUuid;

/// What a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Host memory. There are as many such devices as one asks for.
    Cpu,
    /// An NVIDIA GPU, or a part of one.
    Cuda,
}

/// A device that memory can be allocated on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    kind: DeviceKind,
    ordinal: u32,
    uuid: DeviceUuid,
}

impl Device {
    /// The host device `cpu:{ordinal}`.
    ///
    /// Its UUID (RFC 9562, version 8) is the same for every process of a machine, also after a
    /// reboot: 90 bits of a hash of the machine's identity, then the ordinal in the last 4 bytes. The
    /// identity is `/etc/machine-id`, else `/var/lib/dbus/machine-id`, else the host name. Processes
    /// in containers agree on it only where they see the same of these.
    pub fn host(ordinal: u32) -> Device {
        Device {
            kind: DeviceKind::Cpu,
            ordinal,
            uuid: host_uuid(&machine_identity(), ordinal),
        }
    }

    /// The CUDA devices that this process sees, by ordinal: `cuda:0` and so on. Each keeps its UUID
    /// under any order and form of `CUDA_VISIBLE_DEVICES`.
    ///
    /// # Errors
    ///
    /// What is missing: a driver, a new enough one, or a device.
    pub fn cuda() -> Result<Vec<Device>, CudaError> {
        let device = |(ordinal, uuid)| Device {
            kind: DeviceKind::Cuda,
            ordinal,
            uuid,
        };
        Ok((0..).zip(cuda::devices()?).map(device).collect())
    }

    /// A CUDA device that another process has told of.
    pub fn cuda_with(ordinal: u32, uuid: DeviceUuid) -> Device {
        Device {
            kind: DeviceKind::Cuda,
            ordinal,
            uuid,
        }
    }

    /// A device that memory is on already. Its ordinal is not said.
    pub(crate) fn known(kind: DeviceKind, uuid: DeviceUuid) -> Device {
        let ordinal = 0;
        Device { kind, ordinal, uuid }
    }

    /// What it is.
    pub fn kind(&self) -> DeviceKind {
        self.kind
    }

    /// Its number among the devices of its kind, as this process counts them.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The name that every process knows it by.
    pub fn uuid(&self) -> DeviceUuid {
        self.uuid
    }

    /// Makes the device ready for this process, and keeps it so: the first use of a CUDA device takes
    /// a tenth of a second and some hundred MiB of its memory.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Cuda`] when the device cannot be used.
    pub fn open(&self) -> Result<Opened, MemoryError> {
        match self.kind {
            DeviceKind::Cpu => Ok(Opened { _context: None }),
            DeviceKind::Cuda => Ok(Opened {
                _context: Some(cuda::Context::of(self.uuid)?),
            }),
        }
    }

    /// Free and total memory, in bytes; `None` for host memory, which belongs to the whole machine.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Cuda`] when the driver does not say.
    pub fn memory(&self) -> Result<Option<(u64, u64)>, MemoryError> {
        match self.kind {
            DeviceKind::Cpu => Ok(None),
            DeviceKind::Cuda => Ok(Some(cuda::memory(self.uuid)?)),
        }
    }

    /// How many bytes a region could have now, where one of `bytes` bytes has no room; `None` where that is not
    /// known, or is a limit on this process and not the device's.
    pub fn room_for(&self, bytes: u64) -> Option<u64> {
        match self.kind {
            DeviceKind::Cpu => crate::host::room_for(bytes),
            DeviceKind::Cuda => cuda::memory(self.uuid).ok().map(|(free, _)| free),
        }
    }

    /// A region of zero bytes. A CUDA device takes all of it now; host memory is taken when it is
    /// written, or at the latest by [`Region::export`].
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfMemory`]; for host memory, where the machine has too little at this moment.
    pub fn allocate(&self, bytes: u64) -> Result<Region, MemoryError> {
        Region::allocate(self, bytes)
    }
}

/// A device that stays ready for as long as this is held.
#[derive(Debug)]
pub struct Opened {
    _context: Option<Arc<cuda::Context>>,
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind {
            DeviceKind::Cpu => write!(f, "cpu:{}", self.ordinal),
            DeviceKind::Cuda => write!(f, "cuda:{}", self.ordinal),
        }
    }
}

fn machine_identity() -> String {
    let machine_id = |path| {
        let text = fs::read_to_string(path).ok()?;
        // systemd writes `uninitialized` where an image has none yet.
        let id = text.trim();
        (id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| id.to_owned())
    };
    machine_id("/etc/machine-id")
        .or_else(|| machine_id("/var/lib/dbus/machine-id"))
        .or_else(|| fs::read_to_string("/proc/sys/kernel/hostname").ok())
        .unwrap_or_default()
}

fn host_uuid(identity: &str, ordinal: u32) -> DeviceUuid {
    let mut uuid = fnv1a(&[b"weightd host device\0", identity.trim().as_bytes()].concat()).to_be_bytes();
    uuid[6] = uuid[6] & 0x0f | 0x80; // version 8
    uuid[8] = uuid[8] & 0x3f | 0x80; // variant of RFC 9562
    uuid[12..].copy_from_slice(&ordinal.to_be_bytes());
    DeviceUuid(uuid)
}

/// FNV-1a of 128 bits (draft-eastlake-fnv): never to change, and needed for nothing secret.
fn fnv1a(bytes: &[u8]) -> u128 {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = (1 << 88) + 0x13b;
    let step = |hash: u128, byte: &u8| (hash ^ u128::from(*byte)).wrapping_mul(PRIME);
    bytes.iter().fold(BASIS, step)
}

/// Whether CUDA devices, which must be open, have as many bytes free as these regions take together. What they
/// say is true for the moment.
///
/// # Errors
///
/// [`MemoryError::OutOfMemory`], with needed and free bytes; [`MemoryError::Cuda`] when a device is lost.
pub(crate) fn check_free(regions: impl IntoIterator<Item = (Device, u64)>) -> Result<(), MemoryError> {
    let mut needed: Vec<(Device, u64)> = Vec::new();
    for (device, bytes) in regions {
        match needed.iter_mut().find(|(known, _)| known.uuid() == device.uuid()) {
            Some((_, sum)) => *sum = sum.saturating_add(bytes),
            None => needed.push((device, bytes)),
        }
    }
    for (device, bytes) in needed {
        if let Some((free, total)) = device.memory()?
            && bytes > free
        {
            let why = format!("device {}: {free} of {total} bytes are free", device.uuid());
            return Err(MemoryError::OutOfMemory { bytes, why });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_device_keeps_its_uuid_and_shares_it_with_no_other() {
        assert_eq!(Device::host(3), Device::host(3));
        assert_ne!(Device::host(0).uuid(), Device::host(1).uuid());
        assert_ne!(host_uuid("a", 0), host_uuid("b", 0));
        // Written down, since a change would part an engine from a daemon of another version.
        let uuid = host_uuid("3d1219c7c4c5404aaa1f6d2a48adfda4\n", 258);
        assert_eq!(uuid.hex(), "1c0ff5ae7ccf8498a1c0810c00000102");
    }

    #[test]
    fn the_hash_is_fnv_1a() {
        assert_eq!(fnv1a(b""), 0x6c62272e07bb014262b821756295c58d);
        assert_eq!(fnv1a(b"a"), 0xd228cb696f1a8caf78912b704e4a8964);
    }
}
