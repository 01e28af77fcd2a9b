//! How long a load takes, of one rank and of four, against a plain parallel read of the same files
//! from the page cache.
//!
//! `pread` reads every file once into small buffers that are reused: the least that any loader
//! does. `fresh` puts the bytes into memory that was never touched, which a loader has to as well.

#[path = "../tests/made/mod.rs"]
mod made;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use made::{Decoder, ranks, tensor_parallel};
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use weightd_checkpoint::{
    Checkpoint, Layout, LoadOptions, NodePlan, Progress, Sharding, ShardingOptions, load,
};
use weightd_core::content::HandleKind;
use weightd_gpu::{Device, DeviceKind};

/// The shapes of Llama 3.1 8B, three of its layers and a sixteenth of its vocabulary: 1.4 GB.
const MODEL: Decoder = Decoder {
    architecture: "LlamaForCausalLM",
    layers: 3,
    hidden: 4096,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    intermediate: 14336,
    vocabulary: 8192,
};

fn loads(c: &mut Criterion) {
    let made = MODEL.make();
    let checkpoint = made.open();
    let default = LoadOptions::of(DeviceKind::Cpu);
    let load = |tp: u32, layout: Layout| load_once(&checkpoint, tp, layout, &default);
    let ways: [(&str, &dyn Fn() -> Duration); 5] = [
        ("pread", &|| pread(&checkpoint, default.workers.get())),
        ("fresh", &|| fresh(&checkpoint)),
        ("tp 1", &|| load(1, Layout::Checkpoint)),
        ("tp 4", &|| load(4, Layout::Checkpoint)),
        ("tp 4, vllm", &|| load(4, Layout::Vllm)),
    ];
    in_turns(&ways);
    let mut group = c.benchmark_group("load");
    group
        .throughput(Throughput::Bytes(stored_bytes(&checkpoint)))
        .sample_size(10)
        .measurement_time(Duration::from_secs(10));
    for (name, way) in ways {
        group.bench_function(name, |b| b.iter_custom(|times| (0..times).map(|_| way()).sum()));
    }
    for (workers, kib) in [(1, 1024), (2, 128), (2, 1024), (2, 4096), (2, 16384), (4, 1024)] {
        group.bench_function(format!("tp 4, {workers} workers, {kib} KiB"), |b| {
            let options = LoadOptions {
                workers: NonZero::new(workers).unwrap(),
                chunk_bytes: kib << 10,
                ..default
            };
            let once = |_| load_once(&checkpoint, 4, Layout::Checkpoint, &options);
            b.iter_custom(|times| (0..times).map(once).sum());
        });
    }
    group.finish();
}

/// Prints how long each way takes beside the load of one rank. They take turns, since what else the
/// machine does changes more from minute to minute than they differ.
fn in_turns(ways: &[(&str, &dyn Fn() -> Duration)]) {
    const ROUNDS: usize = 15;
    let mut times = vec![Vec::new(); ways.len()];
    for _ in 0..ROUNDS {
        for ((_, way), times) in ways.iter().zip(&mut times) {
            times.push(way());
        }
    }
    let medians = times.iter_mut().map(|times| {
        times.sort();
        times[ROUNDS / 2]
    });
    let medians: Vec<Duration> = medians.collect();
    let one = ways.iter().position(|(name, _)| *name == "tp 1").unwrap();
    for ((name, _), median) in ways.iter().zip(&medians) {
        let ratio = median.as_secs_f64() / medians[one].as_secs_f64();
        println!("{name}: {median:.0?}, {ratio:.2} times tp 1 (median of {ROUNDS} in turns)");
    }
}

fn pread(checkpoint: &Checkpoint, workers: usize) -> Duration {
    let start = Instant::now();
    let mut buffers = vec![vec![0; 1 << 20]; workers];
    let buffers: Vec<&mut [u8]> = buffers.iter_mut().map(|buffer| &mut buffer[..]).collect();
    read_all(checkpoint, buffers, |_| 0);
    start.elapsed()
}

fn fresh(checkpoint: &Checkpoint) -> Duration {
    let pieces = checkpoint
        .files()
        .iter()
        .map(|file| file.bytes.next_multiple_of(1 << 20));
    let all = pieces.sum::<u64>() as usize;
    let start = Instant::now();
    let mut memory = vec![0; all];
    let half = (all / 2).next_multiple_of(1 << 20);
    let (first, second) = memory.split_at_mut(half);
    read_all(checkpoint, vec![first, second], |turn| turn << 20);
    start.elapsed()
}

fn stored_bytes(checkpoint: &Checkpoint) -> u64 {
    checkpoint.tensors().values().map(|tensor| tensor.bytes).sum()
}

/// Loads all ranks, and sees to it that each byte was read once.
fn load_once(checkpoint: &Checkpoint, tp: u32, layout: Layout, options: &LoadOptions) -> Duration {
    let sharding = ShardingOptions {
        layout,
        ..tensor_parallel(tp)
    };
    let devices: Vec<Device> = (0..tp).map(Device::host).collect();
    let ranks: Vec<_> = ranks(&sharding.parallel)
        .into_iter()
        .zip(&devices)
        .map(|((rank, _), device)| (rank, device.uuid()))
        .collect();
    let plan = NodePlan::new(
        &Sharding::new(checkpoint, &sharding).unwrap(),
        &ranks,
        HandleKind::Memfd,
    )
    .unwrap();
    let loaded = load(checkpoint, &plan, &devices, options, None, &Progress::new(&plan)).unwrap();
    assert_eq!(
        loaded.stats.bytes_read,
        stored_bytes(checkpoint),
        "each byte is read once"
    );
    loaded.stats.duration
}

/// Reads all files in pieces of 1 MiB, each to where `place` puts the piece in its thread's memory.
fn read_all(checkpoint: &Checkpoint, memory: Vec<&mut [u8]>, place: impl Fn(usize) -> usize + Sync) {
    let pieces: Vec<(usize, u64)> = checkpoint
        .files()
        .iter()
        .enumerate()
        .flat_map(|(file, source)| {
            (0..source.bytes)
                .step_by(1 << 20)
                .map(move |offset| (file, offset))
        })
        .collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for memory in memory {
            scope.spawn(|| {
                let memory = memory;
                for turn in 0.. {
                    let Some(&(file, offset)) = pieces.get(next.fetch_add(1, Relaxed)) else {
                        break;
                    };
                    let at = place(turn).min(memory.len() - (1 << 20));
                    let source = &checkpoint.files()[file];
                    let bytes = (source.bytes - offset).min(1 << 20) as usize;
                    source
                        .file
                        .read_exact_at(&mut memory[at..at + bytes], offset)
                        .unwrap();
                }
            });
        }
    });
}

criterion_group!(benches, loads);
criterion_main!(benches);
