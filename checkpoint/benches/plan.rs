//! How long it takes to open the largest checkpoints and to plan one rank of them; freeing both is not
//! counted.

mod giants;

use criterion::BatchSize::PerIteration;
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
    group.bench_function("open", |b| b.iter_batched(|| (), |()| open(), PerIteration));
    for case in giant.cases() {
        group.bench_function(case.name, |b| {
            b.iter_batched(|| (), |()| plan_one(&checkpoint, &case.options), PerIteration)
        });
        let open_and_plan = || {
            let checkpoint = open();
            (plan_one(&checkpoint, &case.options), checkpoint)
        };
        group.bench_function(format!("open and {}", case.name), |b| {
            b.iter_batched(|| (), |()| open_and_plan(), PerIteration)
        });
    }
    group.finish();
}

criterion_group!(benches, plan);
criterion_main!(benches);
