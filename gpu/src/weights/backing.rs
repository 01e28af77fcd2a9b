//! Memory that tensors lie in.

use crate::cuda::Span;
use crate::{Mapping, MemoryError, Owned};
use weightd_core::content::DeviceUuid;

/// Memory of the daemon's, mapped read-only, or of the engine's own.
#[derive(Debug)]
pub(crate) enum Backing {
    Mapped(Mapping),
    Own(Owned),
}

impl Backing {
    /// The address of the first byte: on the host, or for the device.
    pub fn address(&self) -> u64 {
        match self {
            Backing::Mapped(mapping) => mapping.address(),
            Backing::Own(owned) => owned.address(),
        }
    }

    pub fn bytes(&self) -> u64 {
        match self {
            Backing::Mapped(mapping) => mapping.bytes(),
            Backing::Own(owned) => owned.bytes(),
        }
    }

    pub fn device(&self) -> DeviceUuid {
        match self {
            Backing::Mapped(mapping) => mapping.device(),
            Backing::Own(owned) => owned.device(),
        }
    }

    /// The memory, where the host can read it.
    pub fn host(&self) -> Option<&[u8]> {
        match self {
            Backing::Mapped(mapping) => mapping.host(),
            Backing::Own(owned) => owned.host(),
        }
    }

    /// The memory, where it is a device's.
    pub fn span(&self) -> Option<Span<'_>> {
        match self {
            Backing::Mapped(mapping) => mapping.span(),
            Backing::Own(owned) => owned.span(),
        }
    }

    /// Copies from byte `offset` on to the host, and waits for it.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        match self {
            Backing::Mapped(mapping) => mapping.read(offset, into),
            Backing::Own(owned) => owned.read(offset, into),
        }
    }

    pub fn is_own(&self) -> bool {
        matches!(self, Backing::Own(_))
    }

    pub fn own_mut(&mut self) -> Option<&mut Owned> {
        match self {
            Backing::Mapped(_) => None,
            Backing::Own(owned) => Some(owned),
        }
    }
}
