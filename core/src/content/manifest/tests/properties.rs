//! What holds for every manifest, and for every sequence of bytes.

use super::{legacy, region};
use crate::content::manifest::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
struct Any {
    kind: TensorKind,
    persistent: bool,
    dtype: Dtype,
    shape: Vec<u64>,
    strides: Option<Vec<u64>>,
    region: usize,
    offset: u64,
}

impl Any {
    fn spec(&self) -> TensorSpec<'_> {
        TensorSpec {
            kind: self.kind,
            persistent: self.persistent,
            dtype: self.dtype,
            shape: &self.shape,
            strides: self.strides.as_deref(),
            region: self.region,
            offset: self.offset,
        }
    }

    /// One past its last byte, computed in a wider type than the code's.
    fn end(&self) -> u64 {
        end(self.dtype, &self.shape, self.strides.as_deref(), self.offset)
            .try_into()
            .unwrap()
    }
}

fn end(dtype: Dtype, shape: &[u64], strides: Option<&[u64]>, offset: u64) -> u128 {
    let wide = |&number: &u64| u128::from(number);
    let count: u128 = shape.iter().map(wide).product();
    let last: u128 = match strides {
        _ if count == 0 => return offset.into(),
        None => count - 1,
        Some(strides) => shape
            .iter()
            .zip(strides)
            .map(|(n, s)| u128::from(n - 1) * u128::from(*s))
            .sum(),
    };
    u128::from(offset) + ((last + 1) * u128::from(dtype.bits())).div_ceil(8)
}

fn any_tensor() -> impl Strategy<Value = Any> {
    let kind = prop_oneof![Just(TensorKind::Parameter), Just(TensorKind::Buffer)];
    let dims = prop::collection::vec((0u64..5, 0u64..40), 0..=4);
    let dtype = prop::sample::select(&Dtype::ALL[..]);
    let rest = (0usize..3, 0u64..4, any::<bool>(), any::<bool>());
    (kind, dtype, dims, rest).prop_map(|(kind, dtype, dims, (region, offset, persistent, strided))| {
        let (mut shape, strides): (Vec<_>, Vec<_>) = dims.into_iter().unzip();
        let packed = dtype.bits() < 8;
        if packed {
            shape.push(4);
        }
        let strides = (strided && !packed).then_some(strides);
        let offset = offset * dtype.bits().div_ceil(8);
        Any {
            kind,
            persistent,
            dtype,
            shape,
            strides,
            region,
            offset,
        }
    })
}

#[derive(Clone, Debug)]
struct Listing {
    tensors: BTreeMap<String, Any>,
    aliases: BTreeMap<String, String>,
    manifest: Manifest,
}

fn any_listing() -> impl Strategy<Value = Listing> {
    let name = "[a-cé]{1,4}";
    let tensors = prop::collection::btree_map(name, any_tensor(), 0..12);
    let aliases = prop::collection::btree_map("[a-cé]{5}", any::<prop::sample::Index>(), 0..6);
    let attrs = prop::collection::btree_map("[a-c]{1,3}", any::<bool>(), 0..4);
    (tensors, aliases, attrs, any::<bool>()).prop_map(|(tensors, aliases, attrs, summed)| {
        let mut builder = ManifestBuilder::new();
        for number in 0..3 {
            let inside = tensors.values().filter(|tensor| tensor.region == number);
            let bytes = inside.map(Any::end).max().unwrap_or(0);
            builder.region(if number == 1 { legacy(bytes) } else { region(bytes) });
        }
        let mut targets: Vec<&String> = tensors.keys().collect();
        let mut named = BTreeMap::new();
        for (alias, index) in aliases.iter().filter(|_| !tensors.is_empty()) {
            let of = targets[index.index(targets.len())];
            builder.alias(alias, of);
            named.insert(alias.clone(), of.clone());
            targets.push(alias);
        }
        tensors
            .iter()
            .for_each(|(name, tensor)| builder.tensor(name, tensor.spec()));
        attrs.iter().for_each(|(name, value)| builder.attr(name, *value));
        let mut manifest = builder.finish().unwrap();
        if summed {
            let sums = (1..).take(manifest.extents().len()).collect();
            manifest = manifest.with_checksums(sums).unwrap();
        }
        assert!(
            manifest
                .attrs()
                .eq(attrs.iter().map(|(name, value)| (name.as_str(), *value)))
        );
        Listing {
            tensors,
            aliases: named,
            manifest,
        }
    })
}

proptest! {
    #[test]
    fn every_name_is_found_with_the_view_it_was_listed_with(listing in any_listing()) {
        let Listing { tensors, aliases, manifest } = listing;
        prop_assert_eq!(manifest.tensors().len() + manifest.aliases().len(), tensors.len() + aliases.len());
        for name in tensors.keys().chain(aliases.keys()) {
            let mut own = name;
            while let Some(of) = aliases.get(own) {
                own = of;
            }
            let (listed, found) = (&tensors[own], manifest.get(name).unwrap());
            prop_assert_eq!((found.region, found.offset), (listed.region, listed.offset));
            prop_assert_eq!((found.dtype, found.shape), (listed.dtype, &listed.shape[..]));
            prop_assert_eq!(found.offset + found.extent(), listed.end());
            if let Some(strides) = &listed.strides {
                prop_assert_eq!(found.strides, &strides[..]);
            } else {
                prop_assert!(found.is_contiguous());
            }
        }
    }

    #[test]
    fn a_manifest_survives_the_round_trip(listing in any_listing()) {
        let bytes = listing.manifest.encode();
        prop_assert_eq!(Manifest::decode(&bytes), Ok(listing.manifest));
    }

    #[test]
    fn whatever_decodes_is_valid_and_encodes_to_the_same_bytes(
        listing in any_listing(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..4),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
        tail in prop::option::weighted(0.1, any::<u8>()),
    ) {
        let mut bytes = listing.manifest.encode();
        for (at, value, small) in changes {
            let at = at.index(bytes.len());
            bytes[at] = if small { bytes[at].wrapping_add(value % 3) } else { value };
        }
        bytes.truncate(cut.map_or(bytes.len(), |at| at.index(bytes.len())));
        bytes.extend(tail);
        match Manifest::decode(&bytes) {
            Err(error) => prop_assert!(!error.to_string().contains('\n')),
            Ok(manifest) => {
                prop_assert_eq!(manifest.encode(), bytes);
                let tensors: Vec<_> = manifest.tensors().collect();
                prop_assert!(tensors.is_sorted_by_key(|tensor| tensor.kind));
                for tensor in tensors {
                    prop_assert_eq!(manifest.get(tensor.name), Some(tensor));
                    let strides = (tensor.dtype.bits() >= 8).then_some(tensor.strides);
                    let end = end(tensor.dtype, tensor.shape, strides, tensor.offset);
                    prop_assert_eq!(end, u128::from(tensor.offset) + u128::from(tensor.extent()));
                    prop_assert!(end <= u128::from(manifest.regions()[tensor.region].bytes));
                }
                for (alias, tensor) in manifest.aliases() {
                    prop_assert_eq!(manifest.get(alias), Some(tensor));
                }
            }
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), header in any::<bool>()) {
        let mut bytes = bytes;
        if header && bytes.len() >= 40 {
            bytes[..12].copy_from_slice(b"\x89WDM\r\n\x1a\n\x01\0\0\0");
            (12..40).filter(|at| at % 4 != 0).for_each(|at| bytes[at] = 0);
        }
        if let Ok(manifest) = Manifest::decode(&bytes) {
            prop_assert_eq!(manifest.encode(), bytes);
        }
    }
}
