//! Weights of an engine's own making, laid out in one region.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use thiserror::Error;
use weightd_core::content::manifest::{
    ManifestBuilder, ManifestError, Region, Tensor, TensorKind, TensorSpec,
};
use weightd_core::content::{DeviceUuid, Dtype, HandleKind, Manifest};
use weightd_core::plan::region::{RegionLayout, RegionTooLarge};
use weightd_gpu::{Device, DeviceKind, MemoryError};

/// The tensors that an engine publishes: what they are, before any memory is asked for.
///
/// ```
/// use weightd_blocking::Contents;
/// use weightd_core::content::Dtype;
///
/// let mut contents = Contents::new();
/// contents.parameter("model.embed_tokens.weight", Dtype::BF16, &[512, 64])?;
/// contents.parameter("model.layers.0.qkv_proj.weight", Dtype::F8_E4M3, &[96, 64])?;
/// contents.parameter("model.layers.0.qkv_proj.scale", Dtype::F32, &[])?;
/// contents.alias("lm_head.weight", "model.embed_tokens.weight");
/// contents.attr("has_own_lm_head", false);
/// assert_eq!(contents.bytes(), 65536 + 6144 + 4);
/// # Ok::<(), weightd_blocking::ContentsError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Contents {
    layout: RegionLayout,
    tensors: Vec<Listed>,
    aliases: Vec<(String, String)>,
    attrs: Vec<(String, bool)>,
    /// The number of each tensor.
    numbers: HashMap<String, usize>,
}

#[derive(Clone, Debug)]
struct Listed {
    name: String,
    kind: TensorKind,
    persistent: bool,
    dtype: Dtype,
    shape: Vec<u64>,
    strides: Option<Vec<u64>>,
    offset: u64,
}

/// Why tensors cannot be laid out.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum ContentsError {
    /// Its bytes do not fit 64 bits, or do not end with a whole byte.
    #[error(
        "{name} of shape {shape:?} has no whole number of bytes that fits 64 bits; check its shape and dtype"
    )]
    Shape { name: String, shape: Vec<u64> },
    /// All together are too large.
    #[error(transparent)]
    TooLarge(#[from] RegionTooLarge),
    /// A view of a tensor that was not added.
    #[error("{name} is a view of {of}, which was not added; add that first")]
    NoBase { name: String, of: String },
    /// What a manifest does not allow, for example a name that is used twice.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
}

/// Strides and start of a view, in elements of its own dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View<'a> {
    /// The element type.
    pub dtype: Dtype,
    /// The size of each dimension, outermost first.
    pub shape: &'a [u64],
    /// For each dimension, the distance between neighbours; `None` for elements packed in row-major order.
    pub strides: Option<&'a [u64]>,
    /// Where the first element is, from the start of what is viewed, in bytes.
    pub offset: u64,
}

impl Contents {
    /// None yet.
    pub fn new() -> Contents {
        Contents::default()
    }

    /// Adds a parameter, packed in row-major order.
    ///
    /// # Errors
    /// A shape without a size in bytes.
    pub fn parameter(&mut self, name: &str, dtype: Dtype, shape: &[u64]) -> Result<(), ContentsError> {
        self.add(name, TensorKind::Parameter, true, dtype, shape)
    }

    /// Adds a buffer, packed in row-major order; `persistent` where it belongs to the state dictionary.
    ///
    /// # Errors
    /// A shape without a size in bytes.
    pub fn buffer(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: &[u64],
        persistent: bool,
    ) -> Result<(), ContentsError> {
        self.add(name, TensorKind::Buffer, persistent, dtype, shape)
    }

    /// Adds another tensor over the bytes of one that is there, as `q` is over a fused `qkv`.
    ///
    /// # Errors
    /// Nothing is there by the name `of`. Whether the view lies inside the region is found at the end.
    pub fn view(&mut self, name: &str, of: &str, view: View<'_>) -> Result<(), ContentsError> {
        let Some(base) = self.numbers.get(of).map(|number| &self.tensors[*number]) else {
            return Err(ContentsError::NoBase {
                name: name.to_owned(),
                of: of.to_owned(),
            });
        };
        let viewed = Listed {
            name: name.to_owned(),
            dtype: view.dtype,
            shape: view.shape.to_owned(),
            strides: view.strides.map(<[u64]>::to_owned),
            offset: base.offset.saturating_add(view.offset),
            ..base.clone()
        };
        self.list(viewed);
        Ok(())
    }

    /// Adds another name for a tensor.
    pub fn alias(&mut self, name: &str, of: &str) {
        self.aliases.push((name.to_owned(), of.to_owned()));
    }

    /// Adds a boolean attribute of the model.
    pub fn attr(&mut self, name: &str, value: bool) {
        self.attrs.push((name.to_owned(), value));
    }

    /// The size of the region, in bytes.
    pub fn bytes(&self) -> u64 {
        self.layout.bytes()
    }

    fn add(
        &mut self,
        name: &str,
        kind: TensorKind,
        persistent: bool,
        dtype: Dtype,
        shape: &[u64],
    ) -> Result<(), ContentsError> {
        let elements = shape
            .iter()
            .try_fold(1u64, |elements, size| elements.checked_mul(*size));
        let bits = elements.and_then(|elements| elements.checked_mul(dtype.bits()));
        let Some(bits) = bits.filter(|bits| bits.is_multiple_of(8)) else {
            return Err(ContentsError::Shape {
                name: name.to_owned(),
                shape: shape.to_owned(),
            });
        };
        let offset = self.layout.place(bits / 8)?;
        self.list(Listed {
            name: name.to_owned(),
            kind,
            persistent,
            dtype,
            shape: shape.to_owned(),
            strides: None,
            offset,
        });
        Ok(())
    }

    /// A name that is used twice is refused with the manifest.
    fn list(&mut self, tensor: Listed) {
        self.numbers.insert(tensor.name.clone(), self.tensors.len());
        self.tensors.push(tensor);
    }

    /// The manifest of these tensors in one region of `device`, whose size is what the device gives.
    pub(crate) fn manifest(&self, device: &Device, bytes: u64) -> Result<Manifest, ContentsError> {
        let mut builder = ManifestBuilder::new();
        let region = builder.region(self.region(device.kind(), device.uuid(), bytes));
        for tensor in &self.tensors {
            let spec = TensorSpec {
                kind: tensor.kind,
                persistent: tensor.persistent,
                dtype: tensor.dtype,
                shape: &tensor.shape,
                strides: tensor.strides.as_deref(),
                region,
                offset: tensor.offset,
            };
            builder.tensor(&tensor.name, spec);
        }
        for (name, of) in &self.aliases {
            builder.alias(name, of);
        }
        for (name, value) in &self.attrs {
            builder.attr(name, *value);
        }
        Ok(builder.finish()?)
    }

    fn region(&self, kind: DeviceKind, device: DeviceUuid, bytes: u64) -> Region {
        let handle = match kind {
            DeviceKind::Cpu => HandleKind::Memfd,
            DeviceKind::Cuda => HandleKind::CudaFd,
        };
        Region {
            handle,
            bytes,
            device,
            legacy: None,
        }
    }
}

/// The memory that a publisher copies its tensors into, by their names.
#[derive(Debug)]
pub struct Filling {
    pub(crate) manifest: Manifest,
    pub(crate) region: weightd_gpu::Region,
    /// What was written, or asked for to be written.
    filled: Mutex<Vec<Range<u64>>>,
}

/// Why a tensor could not be filled.
#[derive(Debug, Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum FillError {
    /// Nothing goes by this name.
    #[error("there is no tensor {name} in what is published; add it to the contents first")]
    NoTensor { name: String },
    /// The tensor's elements do not lie one after another, or are of another size.
    #[error(
        "{name} takes {expected} bytes in row-major order, and {given} were given; check shape and dtype, and fill a fused tensor instead of its views"
    )]
    Bytes { name: String, expected: u64, given: u64 },
    /// The device.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl Filling {
    pub(crate) fn new(manifest: Manifest, region: weightd_gpu::Region) -> Filling {
        Filling {
            manifest,
            region,
            filled: Mutex::default(),
        }
    }

    /// The tensors of which not every byte was filled.
    pub(crate) fn unfilled(&self) -> Vec<String> {
        let mut filled = self.filled.lock().unwrap_or_else(PoisonError::into_inner).clone();
        filled.sort_unstable_by_key(|range| range.start);
        let mut runs: Vec<Range<u64>> = Vec::new();
        for range in filled {
            match runs.last_mut() {
                Some(run) if range.start <= run.end => run.end = run.end.max(range.end),
                _ => runs.push(range),
            }
        }
        let is_filled = |tensor: &Tensor<'_>| {
            let (start, end) = (tensor.offset, tensor.offset + tensor.extent());
            let run = runs.partition_point(|run| run.start <= start).checked_sub(1);
            start == end || run.is_some_and(|run| end <= runs[run].end)
        };
        let tensors = self.manifest.tensors().filter(|tensor| !is_filled(tensor));
        tensors.map(|tensor| tensor.name.to_owned()).collect()
    }

    /// Writes a tensor: its elements in row-major order. Several threads may write at once.
    ///
    /// # Errors
    /// See [`FillError`].
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), FillError> {
        let offset = self.offset(name, bytes.len() as u64)?;
        Ok(self.region.write(offset, bytes)?)
    }

    /// Where a tensor of `bytes` bytes starts in the [`region`](Filling::region): for one that is on the
    /// device already, and is copied there with [`copy_from_device`](weightd_gpu::Region::copy_from_device).
    /// Who asks fills it: a tensor that was neither written nor asked for fails the publication.
    ///
    /// # Errors
    /// [`FillError::NoTensor`] and [`FillError::Bytes`].
    pub fn offset(&self, name: &str, bytes: u64) -> Result<u64, FillError> {
        let Some(tensor) = self.manifest.get(name) else {
            return Err(FillError::NoTensor {
                name: name.to_owned(),
            });
        };
        let expected = tensor.extent();
        if !tensor.is_contiguous() || expected != bytes {
            return Err(FillError::Bytes {
                name: name.to_owned(),
                expected,
                given: bytes,
            });
        }
        let mut filled = self.filled.lock().unwrap_or_else(PoisonError::into_inner);
        filled.push(tensor.offset..tensor.offset + bytes);
        Ok(tensor.offset)
    }

    /// The memory, all of it.
    pub fn region(&self) -> &weightd_gpu::Region {
        &self.region
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `qkv` of 512 bytes, with `q`, `k` and `v` over it, then `next`.
    fn fused() -> Filling {
        let mut contents = Contents::new();
        contents.parameter("qkv", Dtype::U8, &[512]).unwrap();
        for (name, offset, bytes) in [("q", 0, 200), ("k", 200, 56), ("v", 256, 256)] {
            let view = View {
                dtype: Dtype::U8,
                shape: &[bytes],
                strides: None,
                offset,
            };
            contents.view(name, "qkv", view).unwrap();
        }
        contents.parameter("next", Dtype::U8, &[100]).unwrap();
        contents.parameter("empty", Dtype::U8, &[0]).unwrap();
        let device = Device::host(0);
        let region = device.allocate(contents.bytes()).unwrap();
        let manifest = contents.manifest(&device, region.bytes()).unwrap();
        Filling::new(manifest, region)
    }

    #[test]
    fn what_nobody_wrote_is_named_also_between_the_parts_of_a_fused_tensor() {
        let bytes = [7; 512];
        for (writes, unfilled) in [
            (&[][..], &["qkv", "q", "k", "v", "next"][..]),
            (&["q", "v", "next"], &["qkv", "k"]),
            (&["q", "k", "next"], &["qkv", "v"]),
            (&["qkv"], &["next"]),
            (&["v", "next", "k", "q"], &[]),
            (&["next", "qkv"], &[]),
        ] {
            let filling = fused();
            for name in writes {
                let len = filling.manifest.get(name).unwrap().extent() as usize;
                filling.write(name, &bytes[..len]).unwrap();
            }
            assert_eq!(filling.unfilled(), unfilled, "{writes:?}");
        }
    }

    #[test]
    fn what_does_not_fit_a_tensor_is_refused_and_writes_nothing() {
        let filling = fused();
        let refused = filling.write("next", &[7; 99]).unwrap_err();
        assert!(matches!(
            refused,
            FillError::Bytes {
                expected: 100,
                given: 99,
                ..
            }
        ));
        assert!(matches!(
            filling.write("other", &[7]),
            Err(FillError::NoTensor { .. })
        ));
        assert!(filling.unfilled().contains(&"next".to_owned()));
    }
}
