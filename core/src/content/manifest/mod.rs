//! The manifest: the names, types and places of all tensors in a content's regions.
//!
//! A [`Manifest`] is made by a [`ManifestBuilder`] or by [`Manifest::decode`], both of which check
//! all of it, so whoever holds one can rely on every view lying inside its region, every alias
//! naming a tensor and every name being unique. It never changes afterwards.

mod build;
mod check;
mod checksums;
mod codec;
mod error;
mod view;

#[cfg(test)]
mod tests;

pub use build::{ManifestBuilder, TensorSpec};
pub use checksums::Extent;
pub use error::{ManifestError, ViewError};
pub use view::Tensor;

use super::{DeviceUuid, Dtype, HandleKind};

/// The most regions that a manifest may name: with the manifest's own, their descriptors fit one
/// message.
pub const MAX_REGIONS: usize = 15;
/// The largest region, in bytes (256 TiB), so that sums over all regions cannot overflow.
pub const MAX_REGION_BYTES: u64 = 1 << 48;
/// The most names that a manifest may list, tensors and aliases together.
pub const MAX_NAMES: usize = 1_000_000;
/// The longest name of a tensor, an alias or an attribute, in bytes of UTF-8.
pub const MAX_NAME_BYTES: usize = 1024;
/// The most dimensions of a tensor.
pub const MAX_DIMS: usize = 8;
/// The most attributes.
pub const MAX_ATTRS: usize = 256;
/// The largest encoded manifest, in bytes (256 MiB).
pub const MAX_BYTES: usize = 256 << 20;

/// All tensors of one content: regions, tensors, aliases and attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    regions: Vec<Region>,
    /// In listed order: parameters, then buffers.
    tensors: Vec<Record>,
    aliases: Vec<Alias>,
    /// In ascending order of their names.
    attrs: Vec<Attr>,
    /// Entities (a tensor, or past the last tensor an alias) in ascending order of their names.
    index: Vec<u32>,
    /// Shape, then strides, of every tensor in listed order.
    dims: Vec<u64>,
    /// The names of the index in its order, then those of the attributes.
    names: String,
    /// One for each extent.
    checksums: Option<Vec<u64>>,
}

/// One device allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// How it is handed over. The regions that have a descriptor get theirs in listed order.
    pub handle: HandleKind,
    /// Its size in bytes, at most [`MAX_REGION_BYTES`].
    pub bytes: u64,
    /// The device whose memory it is.
    pub device: DeviceUuid,
    /// Present exactly for [`HandleKind::CudaIpc`].
    pub legacy: Option<LegacyHandle>,
}

/// A legacy CUDA IPC handle, which stands for a whole allocation of its publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LegacyHandle {
    /// What `cuIpcGetMemHandle` returned.
    pub handle: [u8; 64],
    /// Where the region starts in the allocation, in bytes.
    pub offset: u64,
}

/// What a tensor is to its model. The numbers are the wire's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorKind {
    /// A weight.
    Parameter = 0,
    /// State that is not a weight, for example a rotary embedding's frequencies.
    Buffer = 1,
}

impl Manifest {
    /// The regions, in the order in which tensors number them.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The tensors in listed order: parameters before buffers. Aliases are not among them.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.tensors.iter().map(|record| self.view(record))
    }

    /// Every alias with the tensor that it stands for, which goes by its own name.
    pub fn aliases(&self) -> impl ExactSizeIterator<Item = (&str, Tensor<'_>)> {
        let tensor = |alias: &Alias| self.view(&self.tensors[alias.of as usize]);
        self.aliases
            .iter()
            .map(move |alias| (self.name(alias.name), tensor(alias)))
    }

    /// The tensor that goes by this name, or that an alias of this name stands for.
    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        let found = self
            .index
            .binary_search_by(|&entity| self.name(self.entity_name(entity)).cmp(name));
        Some(self.entity_view(self.index[found.ok()?]))
    }

    /// Every name that starts with `prefix`, a tensor's or an alias's, in ascending order, with its
    /// tensor. It looks at these names alone, however many others there are.
    pub fn names_with_prefix<'a>(&'a self, prefix: &str) -> impl Iterator<Item = (&'a str, Tensor<'a>)> {
        let name = |entity: &u32| self.name(self.entity_name(*entity));
        let start = self.index.partition_point(|entity| name(entity) < prefix);
        // Names with one prefix are neighbours in the order of their bytes.
        let count = self.index[start..].partition_point(|entity| name(entity).starts_with(prefix));
        self.index[start..][..count]
            .iter()
            .map(move |entity| (name(entity), self.entity_view(*entity)))
    }

    /// The boolean attributes of the model, in ascending order of their names.
    pub fn attrs(&self) -> impl Iterator<Item = (&str, bool)> {
        self.attrs.iter().map(|attr| (self.name(attr.name), attr.value))
    }

    fn view(&self, record: &Record) -> Tensor<'_> {
        let start = record.dims as usize;
        let ndim = usize::from(record.ndim);
        let (shape, strides) = self.dims[start..start + 2 * ndim].split_at(ndim);
        Tensor {
            name: self.name(record.name),
            kind: record.kind,
            persistent: record.persistent,
            dtype: record.dtype,
            shape,
            strides,
            region: usize::from(record.region),
            offset: record.offset,
        }
    }

    fn entity_view(&self, entity: u32) -> Tensor<'_> {
        let entity = entity as usize;
        let tensor = match entity.checked_sub(self.tensors.len()) {
            None => entity,
            Some(alias) => self.aliases[alias].of as usize,
        };
        self.view(&self.tensors[tensor])
    }

    fn entity_name(&self, entity: u32) -> Name {
        let entity = entity as usize;
        match entity.checked_sub(self.tensors.len()) {
            None => self.tensors[entity].name,
            Some(alias) => self.aliases[alias].name,
        }
    }

    fn entity_name_mut(&mut self, entity: u32) -> &mut Name {
        let entity = entity as usize;
        match entity.checked_sub(self.tensors.len()) {
            None => &mut self.tensors[entity].name,
            Some(alias) => &mut self.aliases[alias].name,
        }
    }

    fn name(&self, name: Name) -> &str {
        name.of(&self.names)
    }
}

/// Where a name lies among the names, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Name {
    start: u32,
    len: u16,
}

impl Name {
    fn of(self, names: &str) -> &str {
        let start = self.start as usize;
        &names[start..start + usize::from(self.len)]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Record {
    offset: u64,
    name: Name,
    /// Where its shape starts among the dimensions; its strides follow.
    dims: u32,
    kind: TensorKind,
    persistent: bool,
    dtype: Dtype,
    ndim: u8,
    region: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Alias {
    name: Name,
    /// The number of its tensor.
    of: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Attr {
    name: Name,
    value: bool,
}
