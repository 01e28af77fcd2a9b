//! Weights of the engine's own on the device: copies, clones and taking over in place.

use crate::*;
use weightd_gpu::{Difference, OverwriteError, TensorView};

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

/// The orders in which three dimensions may lie, innermost first.
const ORDERS: [[usize; 3]; 6] = [[2, 1, 0], [2, 0, 1], [1, 2, 0], [1, 0, 2], [0, 1, 2], [0, 2, 1]];

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn bytes_come_by_name_whatever_the_layouts_are() {
    const SHAPE: [u64; 3] = [5, 17, 33];
    let layouts: Vec<(Vec<u64>, u64)> = ORDERS
        .iter()
        .flat_map(|order| [0, 3].map(|gap| (order, gap)))
        .map(|(order, gap)| {
            let (mut strides, mut next) = (vec![0; 3], 1);
            for &dim in order {
                strides[dim] = next;
                next = next * SHAPE[dim] + gap;
            }
            (strides, next)
        })
        .collect();
    let memory = |salt: u8| bytes(2 << 20).iter().map(|byte| byte ^ salt).collect::<Vec<u8>>();
    // One tensor for each pair of layouts: in the first one here and in the second one there.
    let pairs: Vec<_> = layouts
        .iter()
        .flat_map(|here| layouts.iter().map(move |there| (here, there)))
        .collect();
    let add = |builder: &mut ManifestBuilder, ours: bool| {
        for (number, (here, there)) in pairs.iter().enumerate() {
            let (strides, size) = if ours { here } else { there };
            assert!(size * 2 <= 10_000);
            let spec = spec(Dtype::BF16, &SHAPE, Some(strides), number as u64 * 10_000);
            builder.tensor(&format!("t{number}"), spec);
        }
    };
    let (old, new) = (memory(0), memory(77));
    assert!(pairs.len() * 10_000 <= old.len());
    let mut results = Vec::new();
    for device in [Device::host(0), device()] {
        let mut own = mapped(device, &old, |builder| add(builder, true))
            .duplicate()
            .unwrap();
        let new = mapped(device, &new, |builder| add(builder, false));
        let addresses: Vec<u64> = own.tensors().map(|view| view.address()).collect();
        own.overwrite(&new).unwrap();
        assert!(own.tensors().map(|view| view.address()).eq(addresses));
        for (number, tensor) in own.tensors().enumerate() {
            assert!(
                packed(&tensor) == elements(&new, tensor.name),
                "{:?}",
                pairs[number]
            );
        }
        // What lies between the elements is on both devices as it was.
        results.push(
            own.tensors()
                .map(|view| view.fetch().unwrap().into_owned())
                .collect::<Vec<_>>(),
        );
    }
    assert!(results[0] == results[1]);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn fused_weights_are_taken_over_with_their_parts_or_not_at_all() {
    let device = device();
    let (old, new) = (bytes(3 << 20), bytes(4 << 20).split_off(1 << 20));
    let mut own = model(device, &old, 0).duplicate().unwrap();
    own.overwrite(&model(device, &new, 1024)).unwrap();
    let expected = model(device, &new, 1024);
    for name in ["qkv", "q", "k", "v", "norm", "scale"] {
        assert!(elements(&own, name) == elements(&expected, name), "{name}");
    }
    let mut apart = model(device, &old, 0);
    apart.make_writable(|name| name == "q").unwrap();
    let error = own.overwrite(&apart).unwrap_err();
    let OverwriteError::Differ { differences } = &error else {
        panic!("{error}");
    };
    assert!(
        matches!(&differences[..], [Difference::Shared { name, .. }] if name == "q"),
        "{error}"
    );
    assert!(elements(&own, "qkv") == elements(&expected, "qkv"));
    // Own memory for each tensor takes any layout.
    apart.make_writable(|_| true).unwrap();
    apart.overwrite(&expected).unwrap();
    assert!(elements(&apart, "q") == elements(&expected, "q"));
    assert!(elements(&apart, "qkv") == elements(&expected, "qkv"));
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_further_apart_than_a_pitch_may_be_come_too() {
    let device = device();
    const APART: u64 = 5 << 29;
    let region = device.allocate(APART + 100).unwrap();
    region.write(0, b"first").unwrap();
    region.write(APART, b"later").unwrap();
    let far = over(device, region, |builder| {
        builder.tensor("t", spec(Dtype::U8, &[2, 5], Some(&[APART, 1]), 0));
    });
    let near = |memory| {
        mapped(device, memory, |builder| {
            builder.tensor("t", spec(Dtype::U8, &[2, 5], None, 0))
        })
    };
    let mut own = near(b"..........").duplicate().unwrap();
    own.overwrite(&far).unwrap();
    assert_eq!(elements(&own, "t"), b"firstlater");
    let mut own = far.duplicate().unwrap();
    own.overwrite(&near(b"abcdeABCDE")).unwrap();
    let t = own.get("t").unwrap();
    assert_eq!(
        (packed(&t.index(0)), packed(&t.index(1))),
        (b"abcde".to_vec(), b"ABCDE".to_vec())
    );
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn weights_of_another_device_are_not_taken_over() {
    let (device, host) = (device(), Device::host(0));
    let memory = bytes(3 << 20);
    let (mut own, mut hosted) = (
        model(device, &memory, 0).duplicate().unwrap(),
        model(host, &memory, 0).duplicate().unwrap(),
    );
    for error in [
        own.overwrite(&model(host, &memory, 256)).unwrap_err(),
        hosted.overwrite(&model(device, &memory, 256)).unwrap_err(),
    ] {
        let OverwriteError::Differ { differences } = &error else {
            panic!("{error}");
        };
        let other = |difference: &Difference| matches!(difference, Difference::Device { .. });
        assert!(differences.len() == 5 && differences.iter().all(other), "{error}");
    }
    assert!(elements(&own, "qkv") == elements(&hosted, "qkv"));
}
