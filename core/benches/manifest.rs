//! What a manifest costs: building (with alias dedup), encoding, decoding and finding a name.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{DeviceUuid, Dtype, HandleKind, Manifest};

/// A builder with this many names, shaped like a mixture of experts; every tenth name is a twin of
/// the one before, every seventh a strided view.
fn builder(names: u64) -> ManifestBuilder {
    let mut builder = ManifestBuilder::new();
    let region = builder.region(Region {
        handle: HandleKind::Memfd,
        bytes: names * 4096,
        device: DeviceUuid([1; 16]),
        legacy: None,
    });
    for number in 0..names {
        let (layer, expert) = (number / 512, number % 512);
        let place = if number % 10 == 9 { number - 1 } else { number };
        let spec = TensorSpec {
            kind: TensorKind::Parameter,
            persistent: true,
            dtype: Dtype::BF16,
            shape: &[32, 32],
            strides: (place % 7 == 0).then_some(&[64, 1]),
            region,
            offset: place * 4096,
        };
        let name = format!("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight");
        builder.tensor(&name, spec);
    }
    builder
}

fn manifest(c: &mut Criterion) {
    for names in [1_000, 100_000] {
        let builder = builder(names);
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

criterion_group!(benches, manifest);
criterion_main!(benches);
