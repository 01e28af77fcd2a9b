//! Tensors in mapped memory, or in memory of the engine's own.

mod backing;
mod missing;
mod module;
mod overwrite;
mod own;
mod part;
mod runs;
mod view;

pub(crate) use backing::Backing;
pub use missing::Missing;
pub use module::Module;
pub use overwrite::{Difference, OverwriteError, TensorForm};
pub use part::Part;
pub use runs::Runs;
pub use view::TensorView;

use crate::region::check_bounds;
use crate::{Mapping, MemoryError};
use std::collections::BTreeMap;
use std::ops::Range;
use weightd_core::content::manifest::Tensor;
use weightd_core::content::{DeviceUuid, Generation, Manifest};

/// A manifest over the memory of its regions. Views borrow from it, so none outlives the memory, and
/// dropping it frees and unmaps everything.
///
/// The memory is the daemon's, mapped read-only, until the engine asks for memory of its own: for some
/// tensors with [`make_writable`](Weights::make_writable), for all with
/// [`duplicate`](Weights::duplicate).
///
/// # Examples
///
/// What an engine does with weights that it attached to. Host memory stands for a GPU's here.
///
/// ```
/// use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
/// use weightd_core::content::{Dtype, HandleKind};
/// use weightd_gpu::{Device, Mapping, Weights};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // An engine gets manifest and mappings from its daemon: see the weightd-blocking crate.
/// let device = Device::host(0);
/// let region = device.allocate(512)?;
/// region.write(0, &[1, 2, 3, 4])?;
/// region.write(256, &[5, 6])?;
/// let export = region.export()?;
/// let mut builder = ManifestBuilder::new();
/// builder.region(Region {
///     handle: HandleKind::Memfd,
///     bytes: 512,
///     device: device.uuid(),
///     legacy: None,
/// });
/// let tensor = |shape, offset| TensorSpec {
///     kind: TensorKind::Parameter,
///     persistent: true,
///     dtype: Dtype::U8,
///     shape,
///     strides: None,
///     region: 0,
///     offset,
/// };
/// builder.tensor("layers.0.mlp.weight", tensor(&[2, 2], 0));
/// builder.tensor("layers.0.scale", tensor(&[2], 256));
/// let mapping = Mapping::import(export.handle, export.fd, export.bytes, device.uuid())?;
/// let mut weights = Weights::new(builder.finish()?, vec![mapping])?;
///
/// // Take the model apart, module by module.
/// let layer = weights.module("layers.0");
/// let weight = layer.module("mlp").get("weight").ok_or("no weight")?;
/// assert_eq!((weight.shape, weight.contiguous()), (&[2, 2][..], Some(&[1, 2, 3, 4][..])));
///
/// // Own what the engine writes; all else stays shared.
/// weights.make_writable(|name| name.ends_with(".scale"))?;
/// weights.get_mut("layers.0.scale").ok_or("not ours")?[0] = 7;
///
/// // Run on no tensor that has no data.
/// weights.require(["layers.0.mlp.weight", "layers.0.scale"])?;
///
/// // Or own all of it, and take over later weights of the same shapes in place.
/// let mut copy = weights.duplicate()?;
/// copy.get_mut("layers.0.mlp.weight").ok_or("not ours")?.fill(0);
/// copy.overwrite(&weights)?;
/// assert_eq!(copy.get("layers.0.mlp.weight").unwrap().host(), Some(&[1, 2, 3, 4][..]));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Weights {
    manifest: Manifest,
    /// One for each region, then those of clones.
    memories: Vec<Backing>,
    /// By its own name, each tensor that was cloned out of its region.
    clones: BTreeMap<Box<str>, Spot>,
    generation: Option<Generation>,
}

/// Where a tensor starts: which memory, and how many bytes into it.
#[derive(Clone, Copy, Debug)]
struct Spot {
    memory: usize,
    at: u64,
}

/// Why mappings are not those of a manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum WeightsError {
    /// Not one mapping per region.
    #[error("{mappings} mappings for the manifest's {regions} regions; import each region once, in order")]
    Count { mappings: usize, regions: usize },
    /// A mapping of another size than its region.
    #[error("region {region} has {stated} bytes and its mapping {actual}; import the regions in order")]
    Size { region: usize, stated: u64, actual: u64 },
    /// A mapping of memory of another device.
    #[error("region {region} is on device {stated} and its mapping on {actual}; import the regions in order")]
    Device {
        region: usize,
        stated: DeviceUuid,
        actual: DeviceUuid,
    },
}

impl Weights {
    /// Puts a manifest over one mapping per region, in the manifest's order.
    ///
    /// # Errors
    ///
    /// A mapping that differs from its region in size or device.
    pub fn new(manifest: Manifest, mappings: Vec<Mapping>) -> Result<Weights, WeightsError> {
        check(&manifest, &mappings)?;
        Ok(Weights {
            manifest,
            memories: mappings.into_iter().map(Backing::Mapped).collect(),
            clones: BTreeMap::new(),
            generation: None,
        })
    }

    /// Notes which content of the daemon this is.
    pub fn with_generation(mut self, generation: Generation) -> Weights {
        self.generation = Some(generation);
        self
    }

    /// Which content of the daemon this is, or was copied from, where that was noted.
    pub fn generation(&self) -> Option<Generation> {
        self.generation
    }

    /// The manifest: regions, attributes, and what else needs no memory.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The tensors in listed order: parameters before buffers.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorView<'_>> {
        self.manifest.tensors().map(|tensor| self.view(tensor))
    }

    /// Every alias with the tensor that it stands for.
    pub fn aliases(&self) -> impl ExactSizeIterator<Item = (&str, TensorView<'_>)> {
        self.manifest
            .aliases()
            .map(|(alias, tensor)| (alias, self.view(tensor)))
    }

    /// The tensor that goes by this name, or that an alias of this name stands for.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        self.manifest.get(name).map(|tensor| self.view(tensor))
    }

    /// The size of all regions, in bytes.
    pub fn bytes(&self) -> u64 {
        self.manifest.regions().iter().map(|region| region.bytes).sum()
    }

    /// Bytes of a region, whatever tensors they are of: where they lie, or copied from the device to `buffer`.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfBounds`], and [`MemoryError::Cuda`] when the device is lost.
    ///
    /// # Panics
    ///
    /// When the manifest has no such region.
    pub fn region_bytes<'a>(
        &'a self,
        region: usize,
        range: Range<u64>,
        buffer: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], MemoryError> {
        assert!(
            region < self.manifest.regions().len(),
            "there is no region {region}"
        );
        let memory = &self.memories[region];
        let count = range.end.saturating_sub(range.start);
        check_bounds(range.start, count, memory.bytes())?;
        if let Some(bytes) = memory.host() {
            return Ok(&bytes[range.start as usize..][..count as usize]);
        }
        buffer.resize(count as usize, 0);
        memory.read(range.start, buffer)?;
        Ok(buffer)
    }

    fn view<'a>(&'a self, tensor: Tensor<'a>) -> TensorView<'a> {
        let Spot { memory, at } = self.place(&tensor);
        TensorView::new(tensor, &self.memories[memory], at)
    }

    /// Where a tensor lies now. The manifest checked every tensor against its region, `new` the sizes
    /// of the regions, and a clone has room for its tensor: all of it is in that memory.
    fn place(&self, tensor: &Tensor<'_>) -> Spot {
        self.clones.get(tensor.name).copied().unwrap_or(Spot {
            memory: tensor.region,
            at: tensor.offset,
        })
    }
}

fn check(manifest: &Manifest, mappings: &[Mapping]) -> Result<(), WeightsError> {
    let (mappings_count, regions) = (mappings.len(), manifest.regions().len());
    if mappings_count != regions {
        return Err(WeightsError::Count {
            mappings: mappings_count,
            regions,
        });
    }
    for (number, (region, mapping)) in manifest.regions().iter().zip(mappings).enumerate() {
        let (stated, actual) = (region.bytes, mapping.bytes());
        if actual != stated {
            return Err(WeightsError::Size {
                region: number,
                stated,
                actual,
            });
        }
        let (stated, actual) = (region.device, mapping.device());
        if actual != stated {
            return Err(WeightsError::Device {
                region: number,
                stated,
                actual,
            });
        }
    }
    Ok(())
}
