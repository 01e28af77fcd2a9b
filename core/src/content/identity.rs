//! The names that content goes by: generation, device, role, and how its regions are handed over.

use serde::{Deserialize, Serialize};
use speedy::{Readable, Writable};
use std::fmt;
use std::str::FromStr;

/// One content of one daemon. Never reused; compared whole. Re-arming a server and adopting one
/// keep it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Readable, Writable)]
pub struct Generation {
    /// Random per vault, so that two launchers never name the same generation.
    pub epoch: u64,
    /// Counts up within one vault, from 1.
    pub number: u64,
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{}", self.epoch, self.number)
    }
}

impl FromStr for Generation {
    type Err = &'static str;

    /// Reads what [`Display`](fmt::Display) writes.
    fn from_str(text: &str) -> Result<Generation, Self::Err> {
        const FORM: &str =
            "a generation is 16 hex digits, a dash and a number, as `weightd status` prints it";
        let (epoch, number) = text.split_once('-').ok_or(FORM)?;
        if epoch.len() != 16 {
            return Err(FORM);
        }
        Ok(Generation {
            epoch: u64::from_str_radix(epoch, 16).map_err(|_| FORM)?,
            number: number.parse().map_err(|_| FORM)?,
        })
    }
}

/// The UUID of a device: the only name by which weightd knows one, since ordinals change with
/// `CUDA_VISIBLE_DEVICES`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Readable, Writable)]
pub struct DeviceUuid(pub [u8; 16]);

impl DeviceUuid {
    /// The 32 lower-case hex digits, without dashes.
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads what [`hex`](DeviceUuid::hex) writes.
    pub fn from_hex(text: &str) -> Option<DeviceUuid> {
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|_| digits)?;
        Some(DeviceUuid(number.to_be_bytes()))
    }
}

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hex())
    }
}

impl fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.hex())
    }
}

/// What a model is for: the model that is served, or the draft of its speculative decoding.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Readable, Writable,
)]
#[serde(rename_all = "lowercase")]
#[speedy(tag_type = u8)]
pub enum Role {
    /// The model itself.
    Target,
    /// The draft model of speculative decoding.
    Draft,
}

impl Role {
    /// `target` or `draft`.
    pub fn name(self) -> &'static str {
        match self {
            Role::Target => "target",
            Role::Draft => "draft",
        }
    }
}

/// How a region is handed from process to process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Readable, Writable)]
#[speedy(tag_type = u8)]
pub enum HandleKind {
    /// A sealed memfd: host memory.
    Memfd,
    /// A POSIX descriptor of memory made by `cuMemCreate`.
    CudaFd,
    /// A legacy CUDA IPC handle (`cuIpcGetMemHandle`); it has no descriptor.
    CudaIpc,
}
