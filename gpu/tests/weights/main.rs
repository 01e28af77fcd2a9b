//! `Weights`, over host memory: reading, taking apart, owning and taking over.

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags};
use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{DeviceUuid, Dtype, HandleKind};
use weightd_gpu::{Device, Mapping, TensorView, Weights};

mod modules;
mod overwrite;
mod own;
mod views;

/// Bytes in a region of a host device, as another process maps them.
fn mapping(device: Device, bytes: &[u8]) -> Mapping {
    let region = device.allocate(bytes.len() as u64).unwrap();
    region.write(0, bytes).unwrap();
    let export = region.export().unwrap();
    Mapping::import(export.handle, export.fd, export.bytes, device.uuid()).unwrap()
}

fn region(device: DeviceUuid, bytes: usize) -> Region {
    Region {
        handle: HandleKind::Memfd,
        bytes: bytes as u64,
        device,
        legacy: None,
    }
}

fn u8s<'a>(shape: &'a [u64], strides: Option<&'a [u64]>, region: usize, offset: u64) -> TensorSpec<'a> {
    let (kind, dtype) = (TensorKind::Parameter, Dtype::U8);
    TensorSpec {
        kind,
        persistent: true,
        dtype,
        shape,
        strides,
        region,
        offset,
    }
}

/// Mapped weights: regions of these bytes, and the tensors that are added to them.
fn mapped(regions: &[&[u8]], add: impl FnOnce(&mut ManifestBuilder)) -> Weights {
    let (mut builder, host) = (ManifestBuilder::new(), Device::host(0));
    for bytes in regions {
        builder.region(region(host.uuid(), bytes.len()));
    }
    add(&mut builder);
    let mappings = regions.iter().map(|bytes| mapping(host, bytes)).collect();
    Weights::new(builder.finish().unwrap(), mappings).unwrap()
}

/// The elements in row-major order.
fn packed(view: &TensorView<'_>) -> Vec<u8> {
    view.runs(&view.fetch().unwrap()).collect::<Vec<_>>().concat()
}

fn elements(weights: &Weights, name: &str) -> Vec<u8> {
    packed(&weights.get(name).unwrap())
}

/// A region that promises more bytes than it takes, mapped.
fn sparse(bytes: u64) -> Mapping {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("sparse", flags).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    Mapping::import(HandleKind::Memfd, fd, bytes, Device::host(0).uuid()).unwrap()
}
