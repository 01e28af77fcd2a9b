//! A manifest over mapped memory.

use crate::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use weightd_core::content::Manifest;
use weightd_gpu::WeightsError;

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

/// One tensor `t` in a region of these bytes.
fn one(device: Device, memory: &[u8], spec: TensorSpec<'_>) -> Weights {
    let mut builder = ManifestBuilder::new();
    builder.region(region(device.uuid(), memory.len()));
    builder.tensor("t", spec);
    Weights::new(builder.finish().unwrap(), vec![mapping(device, memory)]).unwrap()
}

/// Experts 0 and 1, each with two rows of gate and two of up, of three bytes.
const EXPERTS: &[u8] = b"a0.a1.b0.b1.A0.A1.B0.B1.";

#[test]
fn a_part_of_a_fused_tensor_is_read_alone() {
    let weights = one(Device::host(0), EXPERTS, u8s(&[2, 4, 3], None, 0, 0));
    let fused = weights.get("t").unwrap();
    let expert = fused.index(1);
    assert_eq!(
        (expert.shape, expert.address()),
        (&[4, 3][..], fused.address() + 12)
    );
    let up = expert.narrow(0, 2..4);
    assert_eq!(up.view().contiguous(), Some(&b"B0.B1."[..]));
    let up_of_all = fused.narrow(1, 2..4);
    let up_of_all = up_of_all.view();
    assert_eq!((up_of_all.shape, up_of_all.extent()), (&[2, 2, 3][..], 18));
    assert_eq!(packed(&up_of_all), b"b0.b1.B0.B1.");
    let second = up_of_all.narrow(1, 1..2);
    assert_eq!(packed(&second.view().narrow(2, 0..2).view()), b"b1B1");
    assert_eq!(packed(&fused.narrow(0, 2..2).view()), b"");
    assert_eq!(up_of_all.duplicate().unwrap().bytes(), 18);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn only_the_part_is_copied_from_a_device() {
    let device = Device::cuda().expect("an NVIDIA GPU")[0];
    let memory: Vec<u8> = EXPERTS.iter().copied().cycle().take(2 << 20).collect();
    let weights = one(device, &memory, u8s(&[2, 4, 3], None, 0, 24));
    let fused = weights.get("t").unwrap();
    let expert = fused.index(1);
    let up = expert.narrow(0, 2..4);
    assert_eq!(up.view().fetch().unwrap()[..], b"B0.B1."[..]);
    assert!(up.view().place().is_some());
    let up_of_all = fused.narrow(1, 2..4);
    assert_eq!(up_of_all.view().fetch().unwrap().len(), 18);
    assert_eq!(packed(&up_of_all.view()), b"b0.b1.B0.B1.");
}

#[test]
#[should_panic(expected = "t of shape [2, 4, 3] has no 3..5 of dimension 1")]
fn a_range_outside_the_tensor_panics() {
    let weights = one(Device::host(0), EXPERTS, u8s(&[2, 4, 3], None, 0, 0));
    weights.get("t").unwrap().narrow(1, 3..5);
}

#[test]
#[should_panic(expected = "t of shape [] has no element 0 of dimension 0")]
fn a_scalar_has_no_elements_to_index() {
    let weights = one(Device::host(0), EXPERTS, u8s(&[], None, 0, 0));
    weights.get("t").unwrap().index(0);
}

#[test]
#[should_panic(expected = "a part of t with shape [1, 3] starts or ends inside a byte")]
fn a_cut_inside_a_byte_panics() {
    let spec = TensorSpec {
        dtype: Dtype::F4,
        ..u8s(&[2, 3], None, 0, 0)
    };
    let weights = one(Device::host(0), EXPERTS, spec);
    weights.get("t").unwrap().narrow(0, 0..1);
}

/// Where each element starts, in bits of the region, by its indices.
type Elements = Vec<(Vec<u64>, u64)>;

/// What a part has in row-major order; `None` where it does not lie in whole bytes.
fn expected(elements: &Elements, width: u64, memory: &[u8]) -> Option<Vec<u8>> {
    let bits: Vec<u64> = elements
        .iter()
        .flat_map(|(_, start)| *start..start + width)
        .collect();
    let byte = |bits: &[u64]| {
        let whole = bits[0].is_multiple_of(8) && bits.iter().copied().eq(bits[0]..bits[0] + 8);
        whole.then(|| memory[(bits[0] / 8) as usize])
    };
    bits.chunks(8).map(byte).collect()
}

/// Cuts a view as these fractions say, one dimension after the other, and compares every step.
fn cut(view: &TensorView<'_>, elements: Elements, cuts: &[(u64, u64, u64)], memory: &[u8]) {
    let width = view.dtype.bits();
    let Some((&(dim, from, to), later)) = cuts.split_first() else {
        return;
    };
    if view.shape.is_empty() {
        return;
    }
    let dim = dim as usize % view.shape.len();
    let from = from % (view.shape[dim] + 1);
    let to = from + to % (view.shape[dim] - from + 1);
    let kept = elements
        .into_iter()
        .filter(|(at, _)| (from..to).contains(&at[dim]));
    let kept: Elements = kept
        .map(|(mut at, start)| {
            at[dim] -= from;
            (at, start)
        })
        .collect();
    let part = catch_unwind(AssertUnwindSafe(|| view.narrow(dim, from..to)));
    let Some(bytes) = expected(&kept, width, memory) else {
        assert!(
            part.is_err(),
            "{:?} has no {from}..{to} of {dim} in whole bytes",
            view.shape
        );
        return;
    };
    let part = part.unwrap();
    assert_eq!(packed(&part.view()), bytes);
    assert_eq!(part.view().elements(), kept.len() as u64);
    cut(&part.view(), kept, later, memory);
}

proptest! {
    #[test]
    fn parts_are_the_elements_of_their_ranges(
        dims in prop::collection::vec((0u64..4, 0u64..14), 1..5),
        large in any::<prop::sample::Index>(),
        strided in any::<bool>(),
        dtype in prop::sample::select(&[Dtype::F4, Dtype::F6_E2M3, Dtype::U8, Dtype::BF16][..]),
        offset in 0u64..5,
        at in any::<prop::sample::Index>(),
        cuts in prop::collection::vec((0u64..4, 0u64..20, 0u64..20), 1..4),
    ) {
        let memory: Vec<u8> = (0..4096u32).map(|at| (at % 251) as u8).collect();
        let (mut shape, mut strides): (Vec<u64>, Vec<u64>) = dims.into_iter().unzip();
        // So that elements of less than a byte fill bytes.
        shape[large.index(strides.len())] *= 4;
        let width = dtype.bits();
        let strided = strided && width >= 8;
        let offset = offset * width.div_ceil(8);
        let given = strided.then_some(&strides[..]);
        let spec = TensorSpec { dtype, ..u8s(&shape, given, 0, offset) };
        let weights = one(Device::host(0), &memory, spec);
        let view = weights.get("t").unwrap();
        strides = view.strides.to_vec();

        let mut elements: Elements = vec![(vec![], offset * 8)];
        for (&size, stride) in shape.iter().zip(&strides) {
            elements = elements.into_iter().flat_map(|(at, start)| {
                (0..size).map(move |next| ([&at[..], &[next]].concat(), start + next * stride * width))
            }).collect();
        }
        prop_assert_eq!(Some(packed(&view)), expected(&elements, width, &memory));
        cut(&view, elements.clone(), &cuts, &memory);

        if shape[0] > 0 {
            let at = at.index(shape[0] as usize) as u64;
            let inner: Elements = elements.into_iter().filter(|(index, _)| index[0] == at)
                .map(|(index, start)| (index[1..].to_vec(), start)).collect();
            let indexed = catch_unwind(AssertUnwindSafe(|| view.index(at)));
            match expected(&inner, width, &memory) {
                None => prop_assert!(indexed.is_err()),
                Some(bytes) => {
                    let indexed = indexed.unwrap();
                    prop_assert_eq!(packed(&indexed), bytes);
                    prop_assert_eq!(indexed.shape, &shape[1..]);
                    cut(&indexed, inner, &cuts, &memory);
                }
            }
        }
    }

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
