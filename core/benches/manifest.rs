//! What a manifest costs: building (with alias dedup), encoding, decoding and finding a name.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{DeviceUuid, Dtype, HandleKind, Manifest};

/// A builder with this many names, shaped like a mixture of experts. Names of the same place are
/// twins, and every seventh place is a strided view.
fn builder(names: u64, place: impl Fn(u64) -> u64) -> ManifestBuilder {
    let mut builder = ManifestBuilder::new();
    let region = builder.region(Region {
        handle: HandleKind::Memfd,
        bytes: names * 4096,
        device: DeviceUuid([1; 16]),
        legacy: None,
    });
    for number in 0..names {
        let place = place(number);
        let spec = TensorSpec {
            kind: TensorKind::Parameter,
            persistent: true,
            dtype: Dtype::BF16,
            shape: &[32, 32],
            strides: place.is_multiple_of(7).then_some(&[64, 1]),
            region,
            offset: place * 4096,
        };
        builder.tensor(&name("model", number), spec);
    }
    builder
}

fn name(model: &str, number: u64) -> String {
    let (layer, expert) = (number / 512, number % 512);
    format!("{model}.layers.{layer}.mlp.experts.{expert}.down_proj.weight")
}

fn manifest(c: &mut Criterion) {
    for names in [1_000, 100_000] {
        // Every tenth name is a twin of the one before.
        let builder = builder(names, |number| number - u64::from(number % 10 == 9));
        let manifest = builder.clone().finish().expect("a valid manifest");
        let bytes = manifest.encode();
        let mut group = c.benchmark_group(format!("manifest/{names}"));
        group.throughput(Throughput::Elements(names));
        group.bench_function("build", |b| {
            b.iter_batched(
                || builder.clone(),
                |b| b.finish(),
                criterion::BatchSize::LargeInput,
            );
        });
        group.bench_function("encode", |b| b.iter(|| manifest.encode()));
        group.bench_function("decode", |b| b.iter(|| Manifest::decode(black_box(&bytes))));
        group.bench_function("get every name", |b| {
            b.iter(|| {
                manifest
                    .tensors()
                    .filter_map(|tensor| manifest.get(tensor.name))
                    .count()
            });
        });
        group.finish();
    }
}

/// How finding aliases grows with their number: views that are found equal, and names that are
/// stated to be aliases, of tensors or of the next alias in one chain.
fn aliases(c: &mut Criterion) {
    let mut group = c.benchmark_group("aliases");
    for names in [10_000, 100_000] {
        let half = builder(names, |number| number % (names / 2));
        let mut flat = builder(1_000, |number| number);
        let mut chain = builder(1, |number| number);
        for number in 0..names {
            let alias = name("draft", number);
            flat.alias(&alias, &name("model", number % 1_000));
            let last = number + 1 == names;
            let next = if last {
                name("model", 0)
            } else {
                name("draft", number + 1)
            };
            chain.alias(&alias, &next);
        }
        group.throughput(Throughput::Elements(names));
        for (what, builder, expected) in [
            ("half the names are twins", half, names / 2),
            ("of tensors", flat, names),
            ("in one chain", chain, names),
        ] {
            let manifest = builder.clone().finish().expect("a valid manifest");
            assert_eq!(manifest.aliases().len() as u64, expected);
            group.bench_function(format!("{what}/{names}"), |b| {
                b.iter_batched(
                    || builder.clone(),
                    |b| b.finish(),
                    criterion::BatchSize::LargeInput,
                );
            });
        }
    }
    group.finish();
}

criterion_group!(benches, manifest, aliases);
criterion_main!(benches);
