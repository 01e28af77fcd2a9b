//! Times the load pipeline, without launcher or server:
//! `load_time [--digest] [--checksums] MODEL cpu|cuda TP [WORKERS CHUNK_KIB] [REPEATS]`, all ranks on one
//! device, three times unless said otherwise.
//!
//! The context is made and the plan is ready before the clock starts.

use std::env;
use std::num::NonZero;
use std::path::Path;
use std::time::Instant;
use weightd_checkpoint::{
    Checkpoint, DigestAlong, LoadOptions, NodePlan, Progress, Sharding, ShardingOptions, load,
};
use weightd_core::content::HandleKind;
use weightd_core::plan::placement::{Node, Parallel, place};
use weightd_gpu::Device;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (flags, args): (Vec<String>, Vec<String>) =
        env::args().skip(1).partition(|arg| arg.starts_with("--"));
    let flag = |name: &str| flags.iter().any(|flag| flag == name);
    let [model, kind, tp, rest @ ..] = args.as_slice() else {
        return Err(
            "usage: load_time [--digest] [--checksums] MODEL cpu|cuda TP [WORKERS CHUNK_KIB] [REPEATS]"
                .into(),
        );
    };
    let (tuning, repeats) = match rest {
        [] => (None, 3),
        [repeats] => (None, repeats.parse()?),
        [workers, chunk, rest @ ..] => {
            let repeats = rest.first().map_or(Ok(3), |text| text.parse())?;
            (Some((workers, chunk)), repeats)
        }
    };
    let parallel = Parallel {
        tensor: tp.parse()?,
        pipeline: 1,
        data: 1,
    };
    let start = Instant::now();
    let (device, handle) = match kind.as_str() {
        "cuda" => (Device::cuda()?[0], HandleKind::CudaFd),
        _ => (Device::host(0), HandleKind::Memfd),
    };
    let mut options = LoadOptions {
        digest: match flag("--digest") {
            true => DigestAlong::Always,
            false => DigestAlong::Never,
        },
        checksums: flag("--checksums"),
        ..LoadOptions::of(device.kind())
    };
    if let Some((workers, chunk)) = tuning {
        options.workers = workers.parse::<NonZero<usize>>()?;
        options.cold_workers = options.workers;
        options.chunk_bytes = chunk.parse::<u64>()? << 10;
    }
    let chosen = if tuning.is_none() { ", as chosen" } else { "" };
    let _opened = device.open()?;
    println!("device ready in {:?}", start.elapsed());
    let start = Instant::now();
    let checkpoint = Checkpoint::open(Path::new(model))?;
    let ranks: Vec<_> = place(&parallel, &Node::single(1))?
        .into_iter()
        .map(|placement| (placement, device.uuid()))
        .collect();
    let plan = NodePlan::new(
        &Sharding::new(&checkpoint, &ShardingOptions::new(parallel)).unwrap(),
        &ranks,
        handle,
    )?;
    let devices = vec![device; ranks.len()];
    println!("planned in {:?}", start.elapsed());
    for _ in 0..repeats {
        let stats = load(
            &checkpoint,
            &plan,
            &devices,
            &options,
            Some(options.prepare(device.kind())?),
            &Progress::new(&plan),
        )?
        .stats;
        let (gb, seconds) = (stats.bytes_read as f64 / 1e9, stats.duration.as_secs_f64());
        println!(
            "{kind} tp {tp} workers {} (cold {}) chunk {} KiB{chosen}: {gb:.2} GB read in {seconds:.3} s, {:.2} GB/s by {}, {:.1} MB slack",
            options.workers,
            options.cold_workers,
            options.chunk_bytes >> 10,
            gb / seconds,
            stats.path,
            stats.path.slack as f64 / 1e6
        );
    }
    Ok(())
}
