//! Checksums that are taken while loading are those of what is mapped, and tell of every other byte.

use super::made::generated::cases;
use super::{map, try_load};
use proptest::prelude::*;
use weightd_checkpoint::{DigestAlong, FloatDtype, LoadOptions, ScrubError, Scrubbed, scrub};
use weightd_core::content::Manifest;
use weightd_gpu::{Device, Mapping, Weights};

fn options(digest: DigestAlong) -> LoadOptions {
    LoadOptions {
        chunk_bytes: 4 << 10,
        digest,
        checksums: true,
        ..LoadOptions::default()
    }
}

/// These bytes, mapped as the region of this manifest.
fn remapped(manifest: &Manifest, bytes: &[u8]) -> Weights {
    let region = Device::host(0).allocate(bytes.len() as u64).unwrap();
    region.write(0, bytes).unwrap();
    let device = manifest.regions()[0].device;
    let export = region.export().unwrap();
    let mapping = Mapping::import(export.handle, export.fd, export.bytes, device).unwrap();
    Weights::new(manifest.clone(), vec![mapping]).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn what_is_loaded_has_its_checksums_and_no_other_byte_does(
        mut case in cases(), dtype in prop::sample::select(vec![FloatDtype::Auto, FloatDtype::Float16, FloatDtype::Float32]),
        digest in prop::sample::select(vec![DigestAlong::Never, DigestAlong::Always]), at in any::<prop::sample::Index>(), bit in 0u8..8,
    ) {
        case.options.dtype = dtype;
        let made = case.make();
        let checkpoint = made.open();
        for (_, weights) in map(try_load(&checkpoint, &case.options, &options(digest)).unwrap()) {
            let manifest = weights.manifest();
            let extents = manifest.extents();
            let expected = Scrubbed {
                tensors: manifest.tensors().filter(|tensor| tensor.elements() > 0).count(),
                bytes: extents.iter().map(|extent| extent.bytes).sum(),
            };
            prop_assert_eq!(scrub(&weights).unwrap(), expected);
            let copy = weights.duplicate().unwrap();
            prop_assert!(matches!(scrub(&copy), Err(ScrubError::NoChecksums)), "the engine may write to it");
            let mut region = weights.region_bytes(0, 0..weights.bytes(), &mut Vec::new()).unwrap().to_vec();
            prop_assert_eq!(scrub(&remapped(manifest, &region)).unwrap(), expected);

            let at = at.index(region.len());
            region[at] ^= 1 << bit;
            let extent = extents.iter().find(|extent| (extent.offset..extent.end()).contains(&(at as u64)));
            match (scrub(&remapped(manifest, &region)), extent) {
                (Ok(scrubbed), None) => prop_assert_eq!(scrubbed, expected),
                (Err(ScrubError::Damaged { names, of }), Some(extent)) => {
                    let there = manifest.tensors().filter(|tensor| {
                        tensor.extent() > 0 && (extent.offset..extent.end()).contains(&tensor.offset)
                    });
                    let there: Vec<_> = there.map(|tensor| tensor.name.to_owned()).collect();
                    prop_assert_eq!((names, of), (there, expected.tensors));
                }
                (scrubbed, extent) => prop_assert!(false, "byte {} in {:?}: {:?}", at, extent, scrubbed),
            }
        }
    }
}

#[test]
fn without_checksums_nothing_can_be_said() {
    let checkpoint = weightd_checkpoint::Checkpoint::open(&super::data("llama")).unwrap();
    let (_, weights) = super::mapped(&checkpoint, 1).remove(0);
    assert!(matches!(scrub(&weights), Err(ScrubError::NoChecksums)));
}
