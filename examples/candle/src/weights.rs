//! The two ways to weights: read from disk, or borrowed from a cache.

use crate::source::{Memory, Weight};
use anyhow::{Context, Result, bail};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// What is read from the files of a checkpoint: candle maps them, and copies each tensor to the device when
/// the model asks for it.
pub fn from_disk(model: &Path, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
    let files = safetensors_of(model)?;
    // SAFETY: nobody writes to a checkpoint that is in use.
    Ok(unsafe { VarBuilder::from_mmaped_safetensors(&files, dtype, device) }?)
}

/// What a cache holds. On a GPU the tensors are the cache's own memory, and nothing is copied here or later:
/// candle's layers keep the tensors that they are given, and their transposes are views.
///
/// On the CPU each tensor is copied: a CPU tensor of candle owns a `Vec`, and there is no way to lend it memory.
pub fn from_cache<'a>(
    weights: impl IntoIterator<Item = Weight<'a>>,
    dtype: DType,
    device: &Device,
) -> Result<VarBuilder<'static>> {
    let tensors = weights.into_iter().map(|weight| {
        let tensor = tensor(&weight, device).with_context(|| format!("cannot use {}", weight.name))?;
        Ok((weight.name.to_owned(), tensor))
    });
    let tensors = tensors.collect::<Result<HashMap<_, _>>>()?;
    Ok(VarBuilder::from_tensors(tensors, dtype, device))
}

fn tensor(weight: &Weight<'_>, device: &Device) -> Result<Tensor> {
    match (weight.memory, device) {
        (Memory::Host(bytes), Device::Cpu) => Ok(Tensor::from_raw_buffer(
            bytes,
            weight.dtype,
            &weight.shape,
            device,
        )?),
        #[cfg(feature = "cuda")]
        (Memory::Device(address), Device::Cuda(device)) => borrowed(weight, address, device),
        (memory, device) => bail!("it is at {memory:?} and wanted on {:?}", device.location()),
    }
}

/// A tensor whose elements are the cache's memory.
#[cfg(feature = "cuda")]
fn borrowed(
    weight: &Weight<'_>,
    address: crate::source::DeviceAddress,
    device: &candle_core::CudaDevice,
) -> Result<Tensor> {
    use candle_core::cuda::CudaStorageSlice;
    use candle_core::op::BackpropOp;
    use candle_core::{CudaStorage, Storage};

    let (stream, address) = (device.cuda_stream(), address.get());
    let elements = weight.shape.iter().product();
    // SAFETY: that many elements are there for as long as the tensor is used, says the address. The owner that
    // these calls make would free the memory when it goes; below it is kept from going.
    let slice = unsafe {
        match weight.dtype {
            DType::BF16 => CudaStorageSlice::BF16(stream.upgrade_device_ptr(address, elements)),
            DType::F16 => CudaStorageSlice::F16(stream.upgrade_device_ptr(address, elements)),
            DType::F32 => CudaStorageSlice::F32(stream.upgrade_device_ptr(address, elements)),
            other => bail!("this example knows no weights of {other:?}"),
        }
    };
    let storage = Storage::Cuda(CudaStorage {
        slice,
        device: device.clone(),
    });
    let tensor = Tensor::from_storage(storage, weight.shape.as_slice(), BackpropOp::none(), false);
    // Tensors share their storage, and the last of them drops it, which frees the memory. This one is never
    // dropped, so none is the last; nor can anybody reach it.
    std::mem::forget(tensor.clone());
    Ok(tensor)
}

/// The files that hold a checkpoint's tensors, in order of their names.
pub fn safetensors_of(model: &Path) -> Result<Vec<PathBuf>> {
    let unreadable = || format!("cannot read the folder {}", model.display());
    let entries = model.read_dir().with_context(unreadable)?;
    let paths = entries.map(|entry| Ok(entry?.path()));
    let mut files = paths.collect::<Result<Vec<_>>>().with_context(unreadable)?;
    files.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "safetensors")
    });
    if files.is_empty() {
        bail!("no *.safetensors in {}", model.display());
    }
    files.sort();
    Ok(files)
}
