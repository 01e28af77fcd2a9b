//! Memory of the engine's own: copies of all weights, and of tensors that the engine writes.

use crate::*;
use weightd_core::content::Generation;
use weightd_gpu::MemoryError;

/// A fused tensor of two rows, parts of it, one with an alias, and a tensor in another region.
fn model() -> Weights {
    mapped(&[b"qqkvQQKV", b"__norm"], |builder| {
        builder.tensor("qkv", u8s(&[2, 4], None, 0, 0));
        builder.tensor("q", u8s(&[2, 2], Some(&[4, 1]), 0, 0));
        builder.tensor("v", u8s(&[2, 1], Some(&[4, 1]), 0, 3));
        builder.tensor("norm", u8s(&[4], None, 1, 2));
        builder.tensor("none", u8s(&[0], None, 1, 2));
        builder.alias("query", "q");
        builder.attr("tied", true);
    })
}

const GENERATION: Generation = Generation { epoch: 7, number: 1 };

#[test]
fn a_copy_is_the_same_weights_in_memory_of_its_own() {
    let mapped = model().with_generation(GENERATION);
    let mut copy = mapped.duplicate().unwrap();
    assert_eq!(copy.manifest(), mapped.manifest());
    assert_eq!((copy.bytes(), copy.generation()), (14, Some(GENERATION)));
    assert!(copy.tensors().all(|view| view.is_writable()));
    assert_eq!(
        copy.get("query").unwrap().address(),
        copy.get("qkv").unwrap().address()
    );
    assert_ne!(
        copy.get("qkv").unwrap().address(),
        mapped.get("qkv").unwrap().address()
    );
    // Parts stay parts of what they are in.
    copy.get_mut("qkv").unwrap()[3] = b'!';
    assert_eq!(elements(&copy, "v"), b"!V");
    assert_eq!(elements(&mapped, "v"), b"vV");
    drop(mapped);
    assert_eq!(elements(&copy, "norm"), b"norm");
    assert_eq!(elements(&copy.duplicate().unwrap(), "qkv"), b"qqk!QQKV");
}

#[test]
fn what_the_engine_writes_is_cloned_and_all_else_stays_mapped() {
    let mut weights = model();
    let before: Vec<u64> = weights.tensors().map(|view| view.address()).collect();
    weights
        .make_writable(|name| ["query", "norm", "none"].contains(&name))
        .unwrap();
    let writable = |weights: &Weights, name: &str| weights.get(name).unwrap().is_writable();
    for (name, own) in [
        ("q", true),
        ("query", true),
        ("norm", true),
        ("none", true),
        ("qkv", false),
        ("v", false),
    ] {
        assert_eq!(writable(&weights, name), own, "{name}");
    }
    let moved = weights
        .tensors()
        .zip(&before)
        .filter(|(view, before)| view.address() != **before);
    assert_eq!(
        moved.map(|(view, _)| view.name).collect::<Vec<_>>(),
        ["q", "norm"]
    );
    assert_eq!(
        weights.get("query").unwrap().address(),
        weights.get("q").unwrap().address()
    );
    assert_eq!(
        weights.aliases().next().unwrap().1.address(),
        weights.get("q").unwrap().address()
    );

    // Strides stay: the second row starts at byte 4.
    weights.get_mut("query").unwrap()[4] = b'!';
    weights.get_mut("norm").unwrap().fill(b'N');
    assert_eq!(elements(&weights, "q"), b"qq!Q");
    let q = weights.get("q").unwrap();
    assert_eq!((q.strides, q.region, q.offset), (&[4, 1][..], 0, 0));
    assert_eq!(packed(&q.narrow(1, 1..2).view()), b"qQ");
    assert_eq!(packed(&q.index(1)), b"!Q");
    assert_eq!(elements(&weights, "norm"), b"NNNN");
    assert_eq!(
        elements(&weights, "qkv"),
        b"qqkvQQKV",
        "it does not follow its part"
    );
}

#[test]
fn what_is_the_engines_own_already_stays_where_it_is() {
    let mut weights = model();
    weights.make_writable(|name| name == "q").unwrap();
    weights.get_mut("q").unwrap()[0] = b'!';
    let address = weights.get("q").unwrap().address();
    weights.make_writable(|name| name == "q" || name == "v").unwrap();
    assert_eq!(weights.get("q").unwrap().address(), address);
    assert_eq!(elements(&weights, "q"), b"!qQQ");
    weights.get_mut("v").unwrap()[0] = b'?';
    assert_eq!(
        (elements(&weights, "v"), elements(&weights, "q")),
        (b"?V".to_vec(), b"!qQQ".to_vec())
    );

    let mut copy = weights.duplicate().unwrap();
    assert_eq!(
        (elements(&copy, "q"), elements(&copy, "v")),
        (b"!qQQ".to_vec(), b"?V".to_vec())
    );
    assert_eq!(elements(&copy, "qkv"), b"qqkvQQKV");
    let addresses: Vec<u64> = copy.tensors().map(|view| view.address()).collect();
    copy.make_writable(|_| true).unwrap();
    assert!(copy.tensors().map(|view| view.address()).eq(addresses));
}

#[test]
fn only_what_is_owned_is_given_to_write() {
    let mut weights = model();
    assert_eq!(weights.get_mut("norm"), None);
    assert_eq!(weights.get_mut("missing"), None);
    assert_eq!(weights.get_mut("none"), Some(&mut [][..]));
    weights.make_writable(|_| true).unwrap();
    assert_eq!(weights.get_mut("norm"), Some(&mut { *b"norm" }[..]));
    assert_eq!(weights.get_mut("q").unwrap().len(), 6);
    let one = weights.get("v").unwrap().duplicate().unwrap();
    assert_eq!((one.bytes(), one.device()), (5, Device::host(0).uuid()));
}

#[test]
fn clones_and_copies_are_aligned_as_regions_are() {
    let mut weights = model();
    weights.make_writable(|name| name == "q" || name == "v").unwrap();
    let aligned = |weights: &Weights, name: &str| weights.get(name).unwrap().address().is_multiple_of(256);
    assert!(aligned(&weights, "q") && aligned(&weights, "v"));
    assert!(aligned(&weights.duplicate().unwrap(), "qkv"));
}

/// Two tensors, each of which fits into what is available and not both.
fn large() -> Weights {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let field = |name: &str| -> u64 {
        let line = meminfo.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let half = (field("MemAvailable:") + field("SwapFree:")) * 1024 / 4 * 3;
    let (mut builder, host) = (ManifestBuilder::new(), Device::host(0));
    for number in 0..2 {
        builder.region(region(host.uuid(), half as usize));
        builder.tensor(&number.to_string(), u8s(&[half], None, number, 0));
    }
    builder.alias("one", "1");
    Weights::new(builder.finish().unwrap(), vec![sparse(half), sparse(half)]).unwrap()
}

#[test]
fn what_does_not_fit_together_is_refused_before_anything_is_copied() {
    let mut weights = large();
    let before: Vec<u64> = weights.tensors().map(|view| view.address()).collect();
    let error = weights.duplicate().unwrap_err();
    assert!(
        matches!(error, MemoryError::OutOfMemory { bytes, .. } if bytes == weights.bytes()),
        "{error}"
    );
    let error = weights
        .make_writable(|name| name == "0" || name == "one")
        .unwrap_err();
    assert!(
        matches!(error, MemoryError::OutOfMemory { bytes, .. } if bytes == weights.bytes()),
        "{error}"
    );
    assert!(
        weights.tensors().map(|view| view.address()).eq(before),
        "nothing is kept"
    );
    assert!(!weights.tensors().any(|view| view.is_writable()));
}
