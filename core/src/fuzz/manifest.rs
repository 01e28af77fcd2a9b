//! Manifests: as bytes of anybody, and as somebody builds them.

use super::Input;
use crate::content::manifest::{
    LegacyHandle, MAX_NAMES, MAX_REGIONS, Manifest, ManifestBuilder, Region, Tensor, TensorKind, TensorSpec,
};
use crate::content::{DeviceUuid, Dtype, HandleKind};

/// An odd first byte has a manifest built, anything else decodes the rest as it is. Checks that
///
/// * nothing panics, and what decodes encodes to the same bytes;
/// * what was built decodes to the same manifest, also with a changed byte where that decodes at all;
/// * every view, by its own name, an alias or a prefix, lies inside its region, and in one extent;
/// * extents are apart, ascend, lie inside their regions, and are as many as the checksums.
pub fn manifest(input: &[u8]) {
    let mut input = Input::new(input);
    if !input.flag() {
        decode(input.rest());
    } else if let Some((manifest, change)) = build(&mut input) {
        let mut bytes = manifest.encode();
        assert_eq!(Manifest::decode(&bytes).as_ref(), Ok(&manifest));
        keeps_its_word(&manifest);
        let at = change.0 as usize % bytes.len();
        bytes[at] ^= change.1;
        decode(&bytes);
    }
}

fn decode(bytes: &[u8]) {
    if let Ok(manifest) = Manifest::decode(bytes) {
        assert_eq!(manifest.encode(), bytes, "there is one encoding of a manifest");
        keeps_its_word(&manifest);
    }
}

fn keeps_its_word(manifest: &Manifest) {
    let (tensors, aliases) = (manifest.tensors().len(), manifest.aliases().len());
    assert!(manifest.regions().len() <= MAX_REGIONS && tensors + aliases <= MAX_NAMES);
    let extents = manifest.extents();
    for pair in extents.windows(2) {
        let apart = pair[0].region < pair[1].region || pair[0].end() <= pair[1].offset;
        assert!(apart, "extents ascend, and share no byte");
    }
    for extent in &extents {
        assert!(extent.bytes > 0 && extent.end() <= manifest.regions()[extent.region].bytes);
        assert!(
            manifest
                .tensors()
                .any(|tensor| (tensor.region, tensor.offset) == (extent.region, extent.offset)),
            "it starts with a tensor"
        );
    }
    if let Some(checksums) = manifest.checksums() {
        assert_eq!(checksums.len(), extents.len());
    }
    for tensor in manifest.tensors() {
        assert_eq!(manifest.get(tensor.name), Some(tensor));
        lies_inside(manifest, &tensor);
        let holds = extents.iter().filter(|extent| {
            let (start, end) = (tensor.offset, tensor.offset + tensor.extent());
            extent.region == tensor.region && extent.offset <= start && end <= extent.end()
        });
        assert!(tensor.extent() == 0 || holds.count() == 1, "in one extent");
    }
    for (alias, tensor) in manifest.aliases() {
        assert_eq!(manifest.get(alias), Some(tensor));
    }
    let all: Vec<&str> = manifest.names_with_prefix("").map(|(name, _)| name).collect();
    assert!(all.len() == tensors + aliases && all.windows(2).all(|pair| pair[0] < pair[1]));
    for name in &all {
        let prefix = &name[..name.chars().next().map_or(0, char::len_utf8)];
        let found = manifest
            .names_with_prefix(prefix)
            .any(|(found, _)| found == *name);
        assert!(found, "a name has its first character");
    }
    let attrs: Vec<&str> = manifest.attrs().map(|(name, _)| name).collect();
    assert!(attrs.windows(2).all(|pair| pair[0] < pair[1]));
}

/// Its last element, computed in a wider type than the code's.
fn lies_inside(manifest: &Manifest, tensor: &Tensor<'_>) {
    let region = u128::from(manifest.regions()[tensor.region].bytes);
    let wide = |number: &u64| u128::from(*number);
    assert!(u128::from(tensor.offset) <= region);
    if tensor.shape.contains(&0) {
        return assert_eq!((tensor.elements(), tensor.extent()), (0, 0));
    }
    let steps = tensor.shape.iter().zip(tensor.strides);
    let steps: u128 = steps.map(|(size, stride)| (wide(size) - 1) * wide(stride)).sum();
    let bits = (steps + 1) * u128::from(tensor.dtype.bits());
    // Packed elements are counted by what they are, and not by strides that nothing is multiplied with.
    assert_eq!(u128::from(tensor.extent()), bits / 8);
    assert!(u128::from(tensor.offset) + bits.div_ceil(8) <= region);
}

/// A manifest, where these parts are one, and how to change a byte of it.
fn build(input: &mut Input<'_>) -> Option<(Manifest, (u64, u8))> {
    let change = (input.short(), input.byte());
    let mut builder = ManifestBuilder::new();
    for _ in 0..input.below(4) {
        let handle = input.one_of(&[HandleKind::Memfd, HandleKind::CudaFd, HandleKind::CudaIpc]);
        let legacy = LegacyHandle {
            handle: [input.byte(); 64],
            offset: input.number(),
        };
        // Now and then what is not there, or should not be.
        let has_legacy = (handle == HandleKind::CudaIpc) ^ (legacy.handle[0] == 255);
        builder.region(Region {
            handle,
            bytes: input.number() << input.below(4),
            device: DeviceUuid([input.byte(); 16]),
            legacy: has_legacy.then_some(legacy),
        });
    }
    while !input.is_empty() {
        match input.below(8) {
            0 => builder.attr(&name(input), input.flag()),
            1 => builder.alias(&name(input), &name(input)),
            more => add_tensor(&mut builder, input, more == 2),
        }
    }
    let manifest = builder.finish().ok()?;
    let count = manifest.extents().len();
    if change.1 & 1 == 0 {
        return Some((manifest, change));
    }
    let wrong = manifest.clone().with_checksums(vec![0; count + 1]);
    assert!(wrong.is_err(), "one for each extent");
    let checksums = (0..count as u64).collect();
    Some((manifest.with_checksums(checksums).expect("small"), change))
}

fn add_tensor(builder: &mut ManifestBuilder, input: &mut Input<'_>, strided: bool) {
    let name = name(input);
    let dims = input.below(10);
    let shape: Vec<u64> = (0..dims).map(|_| input.number() % 1025).collect();
    let strides: Vec<u64> = (0..dims)
        .map(|_| if strided { input.number() } else { 0 })
        .collect();
    builder.tensor(
        &name,
        TensorSpec {
            kind: input.one_of(&[TensorKind::Parameter, TensorKind::Buffer]),
            persistent: input.flag(),
            dtype: input.one_of(&Dtype::ALL),
            shape: &shape,
            strides: strided.then_some(strides.as_slice()),
            region: input.below(4),
            offset: input.number(),
        },
    );
}

/// A short name, so that two are the same now and then, or one of any length.
fn name(input: &mut Input<'_>) -> String {
    let letters = ["a", "b", ".", "weight", "é"];
    match input.byte() {
        255 => "x".repeat(input.short() as usize % 1100),
        length => (0..length % 4).map(|_| input.one_of(&letters)).collect(),
    }
}
