//! Weights from weightd's cache.

use crate::source::{DeviceAddress, Memory, Weight};
use crate::weights;
use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, DeviceLocation};
use candle_nn::VarBuilder;
use std::mem;
use std::path::Path;
use std::sync::Arc;
use weightd_blocking::{EngineRank, Loader, LoaderOptions};
use weightd_checkpoint::{Checkpoint, KeyOptions, Rank, ShardingOptions};
use weightd_core::content::Dtype;
use weightd_gpu::{TensorView, Weights};

/// Asks the daemon of this device for this checkpoint, whole and as it is stored: what `weightd preload
/// --model DIR` serves.
pub fn loader(model: &Path, device: &Device, options: &LoaderOptions) -> Result<Loader> {
    let device = match device.location() {
        DeviceLocation::Cpu => weightd_gpu::Device::host(0),
        // Both count the GPUs as the driver does.
        DeviceLocation::Cuda { gpu_id } => {
            let devices = weightd_gpu::Device::cuda()?;
            *devices.get(gpu_id).context("weightd does not see this GPU")?
        }
        other => bail!("there is no cache on {other:?}"),
    };
    let rank = EngineRank {
        device,
        slot: None,
        rank: Rank::default(),
        checkpoint: Arc::new(Checkpoint::open(model)?),
        keys: KeyOptions::new(ShardingOptions::default()),
        expert_load_balancing: false,
    };
    Ok(Loader::new(options, &rank)?)
}

/// Has `build` make a model of the cache's weights. It keeps their tensors in that model alone.
pub fn model<M>(
    weights: Weights,
    dtype: DType,
    device: &Device,
    build: impl FnOnce(VarBuilder<'static>) -> Result<M>,
) -> Result<M> {
    let built = tensors(&weights).and_then(|tensors| build(weights::from_cache(tensors, dtype, device)?));

    // On a GPU the model's tensors are these weights, but candle cannot know: to a tensor of its own the memory
    // is an address, and whoever has the model may clone tensors out of it. So weights that are in use are never
    // unmapped: they are leaked, on purpose, and go with the process, as the one model of an engine does.
    //
    // Where no model came of it there is no tensor left, and once the device has nothing more to do the weights
    // can go, so that none are held while others are loaded from disk. On the CPU all tensors are copies.
    let unused = device.is_cpu() || built.is_err() && device.synchronize().is_ok();
    match unused {
        true => drop(weights),
        false => mem::forget(weights),
    }
    built
}

/// All tensors, also by their other names.
fn tensors(weights: &Weights) -> Result<Vec<Weight<'_>>> {
    let own = weights.tensors().map(|view| (view.name, view));
    own.chain(weights.aliases())
        .map(|(name, view)| weight(name, view).with_context(|| format!("cannot use {name}")))
        .collect()
}

fn weight<'a>(name: &'a str, view: TensorView<'a>) -> Result<Weight<'a>> {
    ensure!(view.is_contiguous(), "its elements are not in row-major order");
    let dtype = match view.dtype {
        Dtype::BF16 => DType::BF16,
        Dtype::F16 => DType::F16,
        Dtype::F32 => DType::F32,
        other => bail!("this example knows no weights of {other:?}"),
    };
    let memory = match view.host() {
        Some(bytes) => Memory::Host(bytes),
        // SAFETY: the view is of that many elements. What is served is never written, and `model` unmaps it
        // only where no tensor is left.
        None => Memory::Device(unsafe { DeviceAddress::new(view.address()) }),
    };
    let shape = view.shape.iter().map(|size| Ok(usize::try_from(*size)?));
    Ok(Weight {
        name,
        dtype,
        shape: shape.collect::<Result<_>>()?,
        memory,
    })
}
