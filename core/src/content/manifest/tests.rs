//! One behaviour at a time; `properties` has what holds for all manifests.

use super::*;

mod properties;

const DEVICE: DeviceUuid = DeviceUuid([7; 16]);

fn region(bytes: u64) -> Region {
    Region {
        handle: HandleKind::Memfd,
        bytes,
        device: DEVICE,
        legacy: None,
    }
}

fn legacy(bytes: u64) -> Region {
    let legacy = Some(LegacyHandle {
        handle: [9; 64],
        offset: 512,
    });
    Region {
        handle: HandleKind::CudaIpc,
        bytes,
        device: DEVICE,
        legacy,
    }
}

fn spec<'a>(dtype: Dtype, shape: &'a [u64], strides: Option<&'a [u64]>, offset: u64) -> TensorSpec<'a> {
    let kind = TensorKind::Parameter;
    TensorSpec {
        kind,
        persistent: true,
        dtype,
        shape,
        strides,
        region: 0,
        offset,
    }
}

fn buffer<'a>(shape: &'a [u64], offset: u64) -> TensorSpec<'a> {
    let spec = spec(Dtype::F32, shape, None, offset);
    TensorSpec {
        kind: TensorKind::Buffer,
        persistent: false,
        ..spec
    }
}

/// A builder with one region of 100 bytes.
fn builder() -> ManifestBuilder {
    let mut builder = ManifestBuilder::new();
    builder.region(region(100));
    builder
}

fn view_error(dtype: Dtype, shape: &[u64], strides: Option<&[u64]>, offset: u64) -> Option<ViewError> {
    let mut builder = builder();
    builder.tensor("t", spec(dtype, shape, strides, offset));
    match builder.finish() {
        Ok(manifest) => {
            assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
            None
        }
        Err(ManifestError::View { tensor, source }) => {
            assert_eq!(tensor, "t");
            Some(source)
        }
        Err(error) => panic!("{error}"),
    }
}

fn names(manifest: &Manifest) -> Vec<&str> {
    manifest.tensors().map(|tensor| tensor.name).collect()
}

fn aliases(manifest: &Manifest) -> Vec<(&str, &str)> {
    manifest
        .aliases()
        .map(|(alias, tensor)| (alias, tensor.name))
        .collect()
}

#[test]
fn parameters_come_before_buffers_and_aliases_still_point_right() {
    let mut builder = builder();
    builder.tensor("b1", buffer(&[2], 0));
    builder.alias("a", "b1");
    builder.tensor("p1", spec(Dtype::U8, &[3], None, 8));
    builder.tensor("b2", buffer(&[2], 16));
    builder.tensor("p2", spec(Dtype::U8, &[3], None, 24));
    let manifest = builder.finish().unwrap();
    assert_eq!(names(&manifest), ["p1", "p2", "b1", "b2"]);
    assert_eq!(aliases(&manifest), [("a", "b1")]);
    assert_eq!(manifest.get("a").unwrap().name, "b1");
    assert!(!manifest.get("b2").unwrap().persistent);
    assert_eq!(manifest.get("p2").unwrap().offset, 24);
    assert_eq!(manifest.get("p3"), None);
}

#[test]
fn names_are_found_by_what_they_start_with() {
    let mut builder = builder();
    for (number, name) in ["l.10.w", "l.1.w", "k", "l.1", "l.1.a", "m"].iter().enumerate() {
        builder.tensor(name, spec(Dtype::U8, &[1], None, number as u64));
    }
    builder.alias("l.1.tied", "m");
    let manifest = builder.finish().unwrap();
    let from = |prefix| {
        let names = manifest.names_with_prefix(prefix);
        names
            .map(|(name, tensor)| (name, tensor.name))
            .collect::<Vec<_>>()
    };
    let expected = [("l.1.a", "l.1.a"), ("l.1.tied", "m"), ("l.1.w", "l.1.w")];
    assert_eq!(from("l.1."), expected);
    assert_eq!(from("l.10."), [("l.10.w", "l.10.w")]);
    assert_eq!(from("").len(), 7);
    assert_eq!(from("l.2"), []);
    assert_eq!(from("z"), []);
    assert!(from("").is_sorted());
}

#[test]
fn a_later_name_of_the_same_view_is_an_alias_of_the_first() {
    let mut builder = builder();
    let shared = spec(Dtype::F16, &[2, 3], None, 4);
    builder.tensor("embed", shared);
    builder.tensor("lm_head", shared);
    builder.tensor(
        "same_strides",
        TensorSpec {
            strides: Some(&[3, 1]),
            ..shared
        },
    );
    builder.tensor(
        "other_dtype",
        TensorSpec {
            dtype: Dtype::BF16,
            ..shared
        },
    );
    builder.tensor(
        "other_shape",
        TensorSpec {
            shape: &[3, 2],
            ..shared
        },
    );
    builder.tensor(
        "other_strides",
        TensorSpec {
            strides: Some(&[1, 2]),
            ..shared
        },
    );
    builder.tensor("other_offset", TensorSpec { offset: 6, ..shared });
    let manifest = builder.finish().unwrap();
    let own = [
        "embed",
        "other_dtype",
        "other_shape",
        "other_strides",
        "other_offset",
    ];
    assert_eq!(names(&manifest), own);
    assert_eq!(
        aliases(&manifest),
        [("lm_head", "embed"), ("same_strides", "embed")]
    );
}

#[test]
fn the_same_place_in_another_region_is_another_tensor() {
    let mut builder = builder();
    let second = builder.region(region(100));
    builder.tensor("a", spec(Dtype::U8, &[4], None, 0));
    builder.tensor(
        "b",
        TensorSpec {
            region: second,
            ..spec(Dtype::U8, &[4], None, 0)
        },
    );
    assert_eq!(builder.finish().unwrap().aliases().len(), 0);
}

#[test]
fn alias_chains_end_at_the_tensor_in_any_order_of_adding() {
    let mut builder = builder();
    builder.alias("c", "b");
    builder.alias("b", "a");
    builder.alias("a", "twin");
    builder.tensor("t", spec(Dtype::U8, &[4], None, 0));
    builder.tensor("twin", spec(Dtype::U8, &[4], None, 0));
    let manifest = builder.finish().unwrap();
    assert_eq!(names(&manifest), ["t"]);
    assert_eq!(
        aliases(&manifest),
        [("twin", "t"), ("c", "t"), ("b", "t"), ("a", "t")]
    );
}

#[test]
fn an_alias_that_leads_to_no_tensor_is_refused() {
    let mut missing = builder();
    missing.alias("a", "b");
    missing.alias("b", "c");
    let error = ManifestError::MissingCanonical {
        alias: "b".into(),
        of: "c".into(),
    };
    assert_eq!(missing.finish(), Err(error));

    let mut cycle = builder();
    cycle.tensor("t", spec(Dtype::U8, &[1], None, 0));
    cycle.alias("a", "b");
    cycle.alias("b", "a");
    assert!(matches!(cycle.finish(), Err(ManifestError::AliasCycle { .. })));
}

#[test]
fn empty_tensors_are_never_aliases_of_each_other() {
    let mut builder = builder();
    builder.tensor("a", spec(Dtype::F32, &[0, 4], None, 100));
    builder.tensor("b", spec(Dtype::F32, &[0, 4], None, 100));
    let manifest = builder.finish().unwrap();
    assert_eq!(names(&manifest), ["a", "b"]);
    assert_eq!(manifest.get("b").unwrap().strides, [4, 1]);
    assert_eq!(manifest.get("b").unwrap().extent(), 0);
}

#[test]
fn views_may_overlap_stride_and_repeat() {
    let mut builder = builder();
    builder.tensor("qkv", spec(Dtype::U8, &[10, 10], None, 0));
    builder.tensor("q", spec(Dtype::U8, &[10, 4], Some(&[10, 1]), 6));
    builder.tensor("window", spec(Dtype::F32, &[20, 6], Some(&[1, 1]), 0));
    builder.tensor("expanded", spec(Dtype::F64, &[1 << 40], Some(&[0]), 88));
    builder.tensor("one", spec(Dtype::F32, &[1, 5], Some(&[77, 1]), 0));
    builder.tensor("scalar", spec(Dtype::F64, &[], None, 88));
    let manifest = builder.finish().unwrap();
    let extent = |name| {
        let tensor = manifest.get(name).unwrap();
        (tensor.elements(), tensor.extent(), tensor.is_contiguous())
    };
    assert_eq!(extent("qkv"), (100, 100, true));
    assert_eq!(extent("q"), (40, 94, false));
    assert_eq!(extent("window"), (120, 100, false));
    assert_eq!(extent("expanded"), (1 << 40, 8, false));
    assert_eq!(
        extent("one"),
        (5, 20, true),
        "a stride over a size of 1 does not matter"
    );
    assert_eq!(extent("scalar"), (1, 8, true));
    assert_eq!(manifest.get("one").unwrap().strides, [77, 1], "but is kept");
}

#[test]
fn a_view_that_leaves_its_region_is_refused() {
    let overruns = |offset, end| {
        Some(ViewError::Overruns {
            offset,
            end,
            region_bytes: 100,
        })
    };
    assert_eq!(view_error(Dtype::F32, &[5, 5], None, 0), None);
    assert_eq!(view_error(Dtype::F32, &[5, 5], None, 4), overruns(4, 104));
    assert_eq!(view_error(Dtype::U8, &[2, 2], Some(&[98, 1]), 0), None);
    assert_eq!(
        view_error(Dtype::U8, &[2, 2], Some(&[99, 1]), 0),
        overruns(0, 101)
    );
    assert_eq!(view_error(Dtype::U8, &[0], None, 100), None);
    assert_eq!(view_error(Dtype::U8, &[0], None, 101), overruns(101, 101));
}

#[test]
fn sizes_that_overflow_are_refused() {
    let overflow = Some(ViewError::Overflow);
    const BIG: u64 = 1 << 33;
    assert_eq!(view_error(Dtype::U8, &[BIG, BIG], None, 0), overflow);
    assert_eq!(view_error(Dtype::U8, &[0, BIG, BIG], None, 0), overflow);
    assert_eq!(view_error(Dtype::F64, &[1 << 61], None, 0), overflow);
    assert_eq!(view_error(Dtype::U8, &[3], Some(&[u64::MAX]), 0), overflow);
    assert_eq!(view_error(Dtype::U8, &[2, 2], Some(&[u64::MAX, 1]), 0), overflow);
    assert_eq!(view_error(Dtype::U8, &[2], Some(&[u64::MAX]), 0), overflow);
    assert_eq!(view_error(Dtype::F64, &[2], Some(&[1 << 61]), 0), overflow);
    assert_eq!(view_error(Dtype::U8, &[1], None, u64::MAX), overflow);
}

#[test]
fn a_view_must_start_and_end_on_whole_elements() {
    let misaligned = |offset, align| Some(ViewError::Misaligned { offset, align });
    assert_eq!(view_error(Dtype::F32, &[1], None, 6), misaligned(6, 4));
    assert_eq!(view_error(Dtype::C64, &[1], None, 4), misaligned(4, 8));
    assert_eq!(view_error(Dtype::F4, &[2, 2], None, 3), None);
    assert_eq!(view_error(Dtype::F6_E2M3, &[4], None, 1), None);
    let partial = ViewError::PartialByte {
        dtype: Dtype::F6_E2M3,
        elements: 3,
    };
    assert_eq!(view_error(Dtype::F6_E2M3, &[3], None, 0), Some(partial));
    let strided = ViewError::StridedSubByte { dtype: Dtype::F4 };
    assert_eq!(view_error(Dtype::F4, &[2, 2], Some(&[4, 1]), 0), Some(strided));
    let dims = [1; MAX_DIMS + 1];
    assert_eq!(view_error(Dtype::U8, &dims[1..], None, 0), None);
    assert_eq!(
        view_error(Dtype::U8, &dims, None, 0),
        Some(ViewError::TooManyDims { ndim: 9 })
    );
    let count = ViewError::StrideCount { strides: 1, ndim: 2 };
    assert_eq!(view_error(Dtype::U8, &[2, 2], Some(&[1]), 0), Some(count));
}

#[test]
fn names_are_unique_and_of_sensible_length() {
    let named = |names: &[&str]| {
        let mut builder = builder();
        for (number, name) in names.iter().enumerate() {
            builder.tensor(name, spec(Dtype::U8, &[1], None, number as u64));
        }
        builder
    };
    assert!(named(&["é", "e", "ee"]).finish().is_ok());
    assert!(named(&[&"x".repeat(MAX_NAME_BYTES)]).finish().is_ok());
    let duplicate = Err(ManifestError::Duplicate { name: "e".into() });
    assert_eq!(named(&["e", "f", "e"]).finish(), duplicate);
    let mut aliased = named(&["e", "f"]);
    aliased.alias("e", "f");
    assert_eq!(aliased.finish(), duplicate);
    let mut attrs = named(&["e"]);
    attrs.attr("e", true);
    assert!(
        attrs.clone().finish().is_ok(),
        "attributes have names of their own"
    );
    attrs.attr("e", false);
    assert_eq!(attrs.finish(), duplicate);
    for bad in ["", &"x".repeat(MAX_NAME_BYTES + 1)] {
        assert!(matches!(
            named(&[bad]).finish(),
            Err(ManifestError::NameLength { .. })
        ));
    }
}

#[test]
fn caps_hold_when_building() {
    let mut regions = ManifestBuilder::new();
    (0..=MAX_REGIONS).for_each(|_| _ = regions.region(region(0)));
    assert!(matches!(
        regions.finish(),
        Err(ManifestError::TooMany { what: "regions", .. })
    ));
    let mut attrs = ManifestBuilder::new();
    (0..=MAX_ATTRS).for_each(|n| attrs.attr(&n.to_string(), true));
    assert!(matches!(
        attrs.finish(),
        Err(ManifestError::TooMany {
            what: "attributes",
            ..
        })
    ));
    let mut large = ManifestBuilder::new();
    large.region(region(MAX_REGION_BYTES + 1));
    assert!(matches!(
        large.finish(),
        Err(ManifestError::RegionTooLarge { region: 0, .. })
    ));
    let mut wrong = ManifestBuilder::new();
    wrong.region(Region {
        legacy: None,
        ..legacy(1)
    });
    assert_eq!(wrong.finish(), Err(ManifestError::LegacyHandle { region: 0 }));
    let mut nowhere = builder();
    nowhere.tensor(
        "t",
        TensorSpec {
            region: 1,
            ..spec(Dtype::U8, &[], None, 0)
        },
    );
    assert!(matches!(
        nowhere.finish(),
        Err(ManifestError::NoRegion {
            region: 1,
            regions: 1,
            ..
        })
    ));
}

#[test]
fn counts_are_refused_before_anything_is_allocated_for_them() {
    let bytes = builder().finish().unwrap().encode();
    let with = |at: usize, count: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + count.len()].copy_from_slice(count);
        Manifest::decode(&bytes)
    };
    for at in [12, 16, 20, 24] {
        let error = with(at, &u32::MAX.to_le_bytes());
        assert!(matches!(error, Err(ManifestError::TooMany { .. })), "{error:?}");
    }
    for (at, count) in [
        (12, 15),
        (16, MAX_NAMES),
        (20, MAX_NAMES),
        (24, MAX_ATTRS),
        (28, usize::MAX),
    ] {
        let error = with(at, &(count as u32).to_le_bytes());
        assert!(matches!(error, Err(ManifestError::Size { .. })), "{error:?}");
    }
    let error = with(32, &u64::MAX.to_le_bytes());
    assert!(matches!(error, Err(ManifestError::TooMany { .. })), "{error:?}");
    let error = with(40, &[1, 0, 0, 0, 255, 255, 255, 255]);
    assert!(matches!(error, Err(ManifestError::Size { .. })), "{error:?}");
    for flag in [[0, 0, 0, 0, 1, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0, 0]] {
        let error = with(40, &flag);
        assert!(matches!(error, Err(ManifestError::Field { .. })), "{error:?}");
    }
    assert_eq!(
        with(8, &[2, 0]),
        Err(ManifestError::Version { major: 2, minor: 0 })
    );
    assert_eq!(
        with(8, &[1, 0, 1]),
        Err(ManifestError::Version { major: 1, minor: 1 })
    );
    assert_eq!(
        Manifest::decode(b"garbage"),
        Err(ManifestError::NotAManifest { bytes: 7 })
    );
}

#[test]
fn the_encoding_is_the_documented_one() {
    let mut builder = ManifestBuilder::new();
    builder.region(Region {
        handle: HandleKind::CudaFd,
        ..region(0x0102)
    });
    builder.tensor(
        "w",
        TensorSpec {
            persistent: false,
            ..spec(Dtype::U8, &[2, 3], Some(&[1, 2]), 5)
        },
    );
    builder.tensor("b", buffer(&[1], 4));
    builder.alias("a", "w");
    builder.attr("t", true);
    let mut expected = b"\x89WDM\r\n\x1a\n\x01\0\0\0\x01\0\0\0\x02\0\0\0\x01\0\0\0\x01\0\0\0".to_vec();
    expected.extend(b"\x05\0\0\0\x04\0\0\0\0\0\0\0\x01\0\0\0\x01\0\0\0");
    expected.extend(b"\x01\0\0\0\0\0\0\0\x02\x01\0\0\0\0\0\0");
    expected.extend([[7; 16].as_slice(), &[0; 72]].concat());
    expected.extend(b"\0\x02\x04\x02\0\0\0\0\x05\0\0\0\0\0\0\0");
    expected.extend(b"\x01\0\x11\x01\0\0\0\0\x04\0\0\0\0\0\0\0");
    expected.extend([2u64, 3, 1, 2, 1].iter().flat_map(|dim| dim.to_le_bytes()));
    expected.extend(b"\x02\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0");
    expected.extend(b"\x01\0\0\0\x01\0\0\0");
    expected.extend(b"\0\0\0\0");
    expected.extend(b"\x08\x07\x06\x05\x04\x03\x02\x01");
    expected.extend(b"abwt");
    let manifest = builder.finish().unwrap();
    let manifest = manifest.with_checksums(vec![0x0102_0304_0506_0708]).unwrap();
    assert_eq!(manifest.encode(), expected);
    assert_eq!(Manifest::decode(&expected), Ok(manifest));
}
