//! How long it takes to open the largest checkpoints and to plan one rank of them.

mod giants;

use criterion::{Criterion, criterion_group, criterion_main};
use giants::{Giant, deepseek, llama, plan_one};
use weightd_checkpoint::Checkpoint;

fn plan(c: &mut Criterion) {
    for giant in [llama(), deepseek()] {
        plan_giant(c, &giant);
    }
}

fn plan_giant(c: &mut Criterion, giant: &Giant) {
    let dir = tempfile::tempdir().unwrap();
    giant.write(dir.path());
    let open = || Checkpoint::open(dir.path()).unwrap();
    let checkpoint = open();
    let mut group = c.benchmark_group(giant.name);
    group.sample_size(20);
    group.bench_function("open", |b| b.iter_with_large_drop(open));
    for case in giant.cases() {
        group.bench_function(case.name, |b| {
            b.iter_with_large_drop(|| plan_one(&checkpoint, &case.options))
        });
        group.bench_function(format!("open and {}", case.name), |b| {
            b.iter_with_large_drop(|| {
                let checkpoint = open();
                (plan_one(&checkpoint, &case.options), checkpoint)
            })
        });
    }
    group.finish();
}

criterion_group!(benches, plan);
criterion_main!(benches);
