//! A manifest over mapped memory.

use proptest::prelude::*;
use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{DeviceUuid, Dtype, HandleKind, Manifest};
use weightd_gpu::{Device, Mapping, Weights, WeightsError};

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

/// Two regions of 4 and 6 bytes.
fn two_regions() -> Manifest {
    let mut builder = ManifestBuilder::new();
    let uuid = Device::host(0).uuid();
    let first = builder.region(region(uuid, 4));
    let second = builder.region(region(uuid, 6));
    let state = TensorSpec {
        kind: TensorKind::Buffer,
        persistent: false,
        ..u8s(&[0], None, first, 4)
    };
    builder.tensor("state", state);
    builder.tensor("embed", u8s(&[2, 3], None, second, 0));
    builder.tensor("column", u8s(&[2, 1], Some(&[3, 1]), second, 1));
    builder.tensor("norm", u8s(&[2], None, first, 2));
    builder.alias("lm_head", "embed");
    builder.attr("has_own_lm_head", false);
    builder.finish().unwrap()
}

fn over(mappings: Vec<Mapping>) -> Result<Weights, WeightsError> {
    Weights::new(two_regions(), mappings)
}

#[test]
fn every_tensor_is_read_at_its_place() {
    let host = Device::host(0);
    let weights = over(vec![mapping(host, b"0123"), mapping(host, b"abcdef")]).unwrap();
    let names: Vec<_> = weights.tensors().map(|view| view.name).collect();
    assert_eq!(names, ["embed", "column", "norm", "state"]);
    let bytes = |name| weights.get(name).unwrap().contiguous();
    assert_eq!(bytes("embed"), Some(&b"abcdef"[..]));
    assert_eq!(bytes("norm"), Some(&b"23"[..]));
    assert_eq!(bytes("state"), Some(&b""[..]));
    assert_eq!(bytes("column"), None);
    let column = weights.get("column").unwrap();
    assert_eq!(
        column.runs(&column.fetch().unwrap()).collect::<Vec<_>>().concat(),
        b"be"
    );
    let state = weights.get("state").unwrap();
    assert_eq!((state.kind, state.persistent), (TensorKind::Buffer, false));
    assert_eq!(state.runs(state.host().unwrap()).count(), 0);
    assert_eq!(weights.bytes(), 10);
    assert!(weights.get("missing").is_none());
    assert!(weights.manifest().attrs().eq([("has_own_lm_head", false)]));
}

#[test]
fn an_alias_is_at_the_address_of_its_tensor() {
    let host = Device::host(0);
    let weights = over(vec![mapping(host, b"0123"), mapping(host, b"abcdef")]).unwrap();
    let embed = weights.get("embed").unwrap();
    assert_eq!(weights.get("lm_head").unwrap().address(), embed.address());
    let aliases: Vec<_> = weights
        .aliases()
        .map(|(name, view)| (name, view.address()))
        .collect();
    assert_eq!(aliases, [("lm_head", embed.address())]);
    assert_eq!(weights.get("column").unwrap().address(), embed.address() + 1);
}

#[test]
fn mappings_that_are_not_the_manifests_are_refused() {
    let (host, other) = (Device::host(0), Device::host(1));
    let four = || mapping(host, b"0123");
    let error = over(vec![four()]).unwrap_err();
    assert_eq!(
        error,
        WeightsError::Count {
            mappings: 1,
            regions: 2
        }
    );
    let error = over(vec![four(), four()]).unwrap_err();
    assert_eq!(
        error,
        WeightsError::Size {
            region: 1,
            stated: 6,
            actual: 4
        }
    );
    let error = over(vec![four(), mapping(other, b"abcdef")]).unwrap_err();
    let (stated, actual) = (host.uuid(), other.uuid());
    assert_eq!(
        error,
        WeightsError::Device {
            region: 1,
            stated,
            actual
        }
    );
}

#[test]
fn weights_are_read_by_several_threads() {
    let host = Device::host(0);
    let weights = over(vec![mapping(host, b"0123"), mapping(host, b"abcdef")]).unwrap();
    let weights = std::sync::Arc::new(weights);
    let readers: Vec<_> = (0..4)
        .map(|_| {
            let weights = weights.clone();
            std::thread::spawn(move || weights.get("embed").unwrap().contiguous().map(<[u8]>::to_vec))
        })
        .collect();
    for reader in readers {
        assert_eq!(reader.join().unwrap(), Some(b"abcdef".to_vec()));
    }
}

proptest! {
    #[test]
    fn runs_are_the_elements_in_row_major_order(
        dims in prop::collection::vec((0u64..4, 0u64..14), 0..5),
        packed in any::<bool>(),
        offset in 0u64..5,
        dtype in prop::sample::select(&[Dtype::U8, Dtype::BF16, Dtype::F64][..]),
    ) {
        let (shape, mut strides): (Vec<u64>, Vec<u64>) = dims.into_iter().unzip();
        if packed && let Some(at) = shape.len().checked_sub(2) {
            // The two innermost dimensions lie packed, the others anyhow.
            strides[at..].copy_from_slice(&[shape[at + 1], 1]);
        }
        let memory: Vec<u8> = (0..4096u32).map(|at| (at % 251) as u8).collect();
        let host = Device::host(0);
        let mut builder = ManifestBuilder::new();
        let region = builder.region(region(host.uuid(), memory.len()));
        let width = dtype.bits() / 8;
        let offset = offset * width;
        builder.tensor("t", TensorSpec { dtype, ..u8s(&shape, Some(&strides), region, offset) });
        let weights = Weights::new(builder.finish().unwrap(), vec![mapping(host, &memory)]).unwrap();

        let mut expected = Vec::new();
        for number in 0..shape.iter().product::<u64>() {
            let (mut rest, mut at) = (number, offset);
            for (size, stride) in shape.iter().zip(&strides).rev() {
                at += rest % size * stride * width;
                rest /= size;
            }
            expected.extend_from_slice(&memory[at as usize..][..width as usize]);
        }
        let view = weights.get("t").unwrap();
        prop_assert_eq!(view.runs(view.host().unwrap()).collect::<Vec<_>>().concat(), expected.clone());
        if let Some(bytes) = view.contiguous() {
            prop_assert_eq!(bytes, expected);
        }
    }
}
