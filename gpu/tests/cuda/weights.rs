//! Weights of the engine's own on the device: copies and clones.

use crate::*;
use weightd_gpu::TensorView;

/// Mapped weights in one region of these bytes.
fn mapped(device: Device, memory: &[u8], add: impl FnOnce(&mut ManifestBuilder)) -> Weights {
    let region = device.allocate(memory.len() as u64).unwrap();
    region.write(0, memory).unwrap();
    over(device, region, add)
}

fn over(device: Device, region: weightd_gpu::Region, add: impl FnOnce(&mut ManifestBuilder)) -> Weights {
    let export = region.export().unwrap();
    let mut builder = ManifestBuilder::new();
    builder.region(Region {
        handle: export.handle,
        bytes: export.bytes,
        device: device.uuid(),
        legacy: None,
    });
    add(&mut builder);
    let mapping = Mapping::import(export.handle, export.fd, export.bytes, device.uuid()).unwrap();
    Weights::new(builder.finish().unwrap(), vec![mapping]).unwrap()
}

fn spec<'a>(dtype: Dtype, shape: &'a [u64], strides: Option<&'a [u64]>, offset: u64) -> TensorSpec<'a> {
    TensorSpec {
        kind: TensorKind::Parameter,
        persistent: true,
        dtype,
        shape,
        strides,
        region: 0,
        offset,
    }
}

fn packed(view: &TensorView<'_>) -> Vec<u8> {
    view.runs(&view.fetch().unwrap()).collect::<Vec<_>>().concat()
}

fn elements(weights: &Weights, name: &str) -> Vec<u8> {
    packed(&weights.get(name).unwrap())
}

/// `qkv` of 300 rows with its parts, a norm that also goes by another name, and nothing.
fn model(device: Device, memory: &[u8], offset: u64) -> Weights {
    mapped(device, memory, |builder| {
        builder.tensor("qkv", spec(Dtype::U8, &[300, 640], None, offset));
        builder.tensor("q", spec(Dtype::U8, &[300, 384], Some(&[640, 1]), offset));
        builder.tensor("k", spec(Dtype::U8, &[300, 128], Some(&[640, 1]), offset + 384));
        builder.tensor("v", spec(Dtype::U8, &[300, 128], Some(&[640, 1]), offset + 512));
        builder.tensor("norm", spec(Dtype::F32, &[1000], None, offset + (1 << 20)));
        builder.tensor("none", spec(Dtype::U8, &[0], None, 0));
        builder.alias("scale", "norm");
    })
}

/// What an engine's kernel does to a tensor of its own.
fn fill(view: &TensorView<'_>, byte: u8) {
    assert!(view.is_writable());
    let _opened = device().open().unwrap();
    let mut context = std::ptr::null_mut();
    // SAFETY: the view is memory of this process on device 0, which may be written, and nobody else uses
    // it. The primary context is retained and released once, and current in between.
    unsafe {
        let results = [
            sys::cuDevicePrimaryCtxRetain(&mut context, 0),
            sys::cuCtxPushCurrent_v2(context),
            sys::cuMemsetD8_v2(view.address(), byte, view.extent() as usize),
            sys::cuCtxSynchronize(),
            sys::cuCtxPopCurrent_v2(&mut context),
            sys::cuDevicePrimaryCtxRelease_v2(0),
        ];
        assert_eq!(results, [sys::CUresult::CUDA_SUCCESS; 6]);
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_copy_is_the_same_weights_and_needs_nothing_of_the_daemons() {
    let device = device();
    let memory = bytes(3 << 20);
    let mapped = model(device, &memory, 256);
    let copy = mapped.duplicate().unwrap();
    assert_eq!(copy.manifest(), mapped.manifest());
    assert!(
        copy.tensors()
            .all(|view| view.is_writable() && view.host().is_none() || view.extent() == 0)
    );
    let expected: Vec<Vec<u8>> = mapped.tensors().map(|view| packed(&view)).collect();
    assert_eq!(expected[0], memory[256..256 + 300 * 640]);
    drop(mapped);
    assert!(copy.tensors().map(|view| packed(&view)).eq(expected));
    let touch = weightd_gpu::cuda::Touch::new(device.uuid()).unwrap();
    let v = copy.get("v").unwrap();
    assert_eq!(touch.read(&[v.place().unwrap()]).unwrap(), [memory[256 + 512]]);
    fill(&copy.get("norm").unwrap(), 9);
    assert_eq!(elements(&copy, "scale"), vec![9; 4000]);
    assert!(elements(&copy.duplicate().unwrap(), "scale") == vec![9; 4000]);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn what_the_engine_writes_is_cloned_and_all_else_stays_mapped() {
    let device = device();
    let memory = bytes(3 << 20);
    let mut weights = model(device, &memory, 0);
    let before: Vec<(String, u64)> = weights
        .tensors()
        .map(|view| (view.name.to_owned(), view.address()))
        .collect();
    let (k, qkv, norm) = (
        elements(&weights, "k"),
        elements(&weights, "qkv"),
        elements(&weights, "norm"),
    );
    weights
        .make_writable(|name| name == "k" || name == "scale")
        .unwrap();
    for (name, address) in &before {
        let moved = name == "k" || name == "norm";
        assert_eq!(weights.get(name).unwrap().address() != *address, moved, "{name}");
    }
    let address = |name| weights.get(name).unwrap().address();
    assert_eq!(address("scale"), address("norm"));
    assert!(address("k").is_multiple_of(256) && address("norm").is_multiple_of(256));
    assert!(elements(&weights, "k") == k && elements(&weights, "scale") == norm);
    assert_eq!(weights.get_mut("k"), None, "only the device writes it");

    fill(&weights.get("scale").unwrap(), 1);
    fill(&weights.get("k").unwrap(), 2);
    assert!(elements(&weights, "norm") == vec![1; 4000]);
    assert!(elements(&weights, "k") == vec![2; 300 * 128]);
    assert!(elements(&weights, "qkv") == qkv, "it does not follow its part");
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn clones_that_do_not_fit_together_are_refused_before_the_first_byte() {
    let device = device();
    let _opened = device.open().unwrap();
    let (free, _) = device.memory().unwrap().unwrap();
    let half = free / 10 * 3 / 256 * 256;
    let region = device.allocate(2 * half).unwrap();
    let mut weights = over(device, region, |builder| {
        builder.tensor("a", spec(Dtype::U8, &[half], None, 0));
        builder.tensor("b", spec(Dtype::U8, &[half], None, half));
    });
    let (before, addresses) = (used(&device), |weights: &Weights| {
        weights.tensors().map(|view| view.address()).collect::<Vec<_>>()
    });
    let mapped = addresses(&weights);
    let error = weights.make_writable(|_| true).unwrap_err();
    assert!(
        matches!(error, MemoryError::OutOfMemory { bytes, .. } if bytes == 2 * half),
        "{error}"
    );
    assert_eq!((used(&device), addresses(&weights)), (before, mapped));
    // One of them fits.
    weights.make_writable(|name| name == "b").unwrap();
    assert!(weights.get("b").unwrap().is_writable());
}
