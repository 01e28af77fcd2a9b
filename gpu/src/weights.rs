//! Tensors in mapped memory.

mod part;

pub use part::Part;

use crate::cuda::Place;
use crate::{Mapping, MemoryError};
use std::borrow::Cow;
use std::ops::Deref;
use weightd_core::content::manifest::{MAX_DIMS, Tensor};
use weightd_core::content::{DeviceUuid, Manifest};

/// A manifest over the mappings of its regions. Views borrow from it, so none outlives the memory.
#[derive(Debug)]
pub struct Weights {
    manifest: Manifest,
    mappings: Vec<Mapping>,
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
        let regions = manifest.regions().len();
        if mappings.len() != regions {
            let mappings = mappings.len();
            return Err(WeightsError::Count { mappings, regions });
        }
        for (number, (region, mapping)) in manifest.regions().iter().zip(&mappings).enumerate() {
            let actual = mapping.bytes();
            if actual != region.bytes {
                let stated = region.bytes;
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
        Ok(Weights { manifest, mappings })
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

    pub(crate) fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    fn view<'a>(&'a self, tensor: Tensor<'a>) -> TensorView<'a> {
        TensorView {
            tensor,
            mapping: &self.mappings[tensor.region],
        }
    }
}

/// A tensor and its memory. The tensor's fields are reached through it: `view.shape`.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    tensor: Tensor<'a>,
    mapping: &'a Mapping,
}

impl<'a> Deref for TensorView<'a> {
    type Target = Tensor<'a>;

    fn deref(&self) -> &Tensor<'a> {
        &self.tensor
    }
}

impl<'a> TensorView<'a> {
    /// The address of the first element: on the host, or for the device. The views of an alias and of
    /// its tensor share it.
    pub fn address(&self) -> u64 {
        self.mapping.address() + self.offset
    }

    /// The first byte, for a device to read; `None` where it is host memory, or there is none.
    pub fn place(&self) -> Option<Place<'a>> {
        let readable = self.mapping.host().is_none() && self.extent() > 0;
        readable.then(|| Place::new(self.address()))
    }

    pub(crate) fn mapping(&self) -> &'a Mapping {
        self.mapping
    }

    /// The memory from the first element to the end of the last, where the host can read it.
    pub fn host(&self) -> Option<&'a [u8]> {
        // The manifest checked every view against its region, and `Weights::new` the regions' sizes.
        Some(&self.mapping.host()?[self.offset as usize..][..self.extent() as usize])
    }

    /// The elements in row-major order, where the host can read them and they lie so in memory.
    pub fn contiguous(&self) -> Option<&'a [u8]> {
        self.host().filter(|_| self.is_contiguous())
    }

    /// The memory from the first element to the end of the last, copied from the device where the
    /// host cannot read it.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfMemory`] when the host has no room for a copy, [`MemoryError::Cuda`] when the
    /// device is lost.
    pub fn fetch(&self) -> Result<Cow<'a, [u8]>, MemoryError> {
        if let Some(bytes) = self.host() {
            return Ok(Cow::Borrowed(bytes));
        }
        let mut copy = Vec::new();
        let (bytes, len) = (self.extent(), self.extent() as usize);
        let room = copy.try_reserve_exact(len);
        room.map_err(|error| MemoryError::OutOfMemory {
            bytes,
            why: error.to_string(),
        })?;
        copy.resize(len, 0);
        self.mapping.read(self.offset, &mut copy)?;
        Ok(Cow::Owned(copy))
    }

    /// The elements in row-major order, as the longest pieces that lie so in memory, all of one size.
    /// `memory` is what [`host`](TensorView::host) or [`fetch`](TensorView::fetch) gave.
    ///
    /// # Panics
    ///
    /// When `memory` is shorter than that.
    pub fn runs<'m>(&self, memory: &'m [u8]) -> Runs<'m> {
        Runs::new(self, memory)
    }
}

/// The dimensions that elements repeat over, with their strides.
fn dims<'a>(tensor: &Tensor<'a>) -> impl DoubleEndedIterator<Item = (u64, u64)> + use<'a> {
    let dims = tensor.shape.iter().zip(tensor.strides);
    dims.map(|(size, stride)| (*size, *stride))
        .filter(|(size, _)| *size != 1)
}

/// The longest packed pieces of a view that is not empty: how many elements each has, and over how
/// many of [`dims`] they repeat.
fn pieces(tensor: &Tensor<'_>) -> (u64, usize) {
    let (mut piece, mut outer) = (1, dims(tensor).count());
    for (size, stride) in dims(tensor).rev() {
        if stride != piece {
            break;
        }
        piece *= size;
        outer -= 1;
    }
    (piece, outer)
}

/// The pieces of a view in row-major order; see [`TensorView::runs`].
#[derive(Clone, Debug)]
pub struct Runs<'a> {
    bytes: &'a [u8],
    /// The size of each piece, in bytes.
    piece: usize,
    /// The dimensions over which pieces repeat, outermost first.
    outer: [Axis; MAX_DIMS],
    ndim: usize,
    /// Where the next piece starts, in bytes; `None` after the last.
    next: Option<usize>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Axis {
    size: u64,
    /// In bytes.
    stride: usize,
    /// Where the next piece is, of `size`.
    at: u64,
}

impl<'a> Runs<'a> {
    fn new(view: &TensorView<'_>, memory: &'a [u8]) -> Runs<'a> {
        let bytes = &memory[..view.extent() as usize];
        let mut runs = Runs {
            bytes,
            piece: bytes.len(),
            outer: [Axis::default(); MAX_DIMS],
            ndim: 0,
            next: (!bytes.is_empty()).then_some(0),
        };
        if view.is_contiguous() {
            return runs;
        }
        // Pieces and what is between them are whole bytes, also where an element is not.
        let bytes = |elements: u64| (elements * view.dtype.bits() / 8) as usize;
        let (piece, outer) = pieces(view);
        (runs.piece, runs.ndim) = (bytes(piece), outer);
        for (axis, (size, stride)) in runs.outer[..outer].iter_mut().zip(dims(view)) {
            *axis = Axis {
                size,
                stride: bytes(stride),
                at: 0,
            };
        }
        runs
    }
}

impl<'a> Iterator for Runs<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let start = self.next?;
        let mut next = start;
        // Counts up like an odometer: the innermost axis that is not at its end moves on.
        let moved = self.outer[..self.ndim].iter_mut().rev().any(|axis| {
            axis.at += 1;
            if axis.at < axis.size {
                next += axis.stride;
                return true;
            }
            next -= (axis.size - 1) as usize * axis.stride;
            axis.at = 0;
            false
        });
        self.next = moved.then_some(next);
        Some(&self.bytes[start..start + self.piece])
    }
}
