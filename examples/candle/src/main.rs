//! A small engine: a Llama on candle, which generates greedily.

mod cache;
mod llama;
mod source;
mod start;
mod weights;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device};
use clap::{Parser, ValueEnum};
use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, clock_gettime};
use start::{Plan, Started};
use std::path::PathBuf;
use std::time::Duration;
use std::{fs, thread};
use weightd_blocking::LoaderOptions;

/// Generates token ids with a Llama: always the most likely one.
#[derive(Debug, Parser)]
struct Args {
    /// The checkpoint: a folder with config.json and *.safetensors
    #[arg(long, value_name = "DIR")]
    model: PathBuf,

    /// Take the weights from weightd's cache, and from disk where that cannot serve: the default
    #[arg(long)]
    cache: bool,

    /// Load from disk, and ask no cache
    #[arg(long, conflicts_with = "cache")]
    disk: bool,

    /// How the cache is used, as vLLM's --model-loader-extra-config: {"socket_dir": DIR, "mode": "copy", ...}
    #[arg(long, value_name = "JSON", conflicts_with = "disk", default_value = "{}")]
    loader_config: LoaderOptions,

    /// How many tokens to generate; one that means the end is a token like others
    #[arg(long, value_name = "N", default_value_t = 16)]
    tokens: usize,

    /// The tokens to go on from
    #[arg(long, value_name = "IDS", value_delimiter = ',', default_value = "1")]
    prompt_ids: Vec<u32>,

    #[arg(long, value_enum, default_value_t = Kind::Cpu)]
    device: Kind,

    /// Keep the model for so long after the last token
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    hold: u64,
}

/// A kind of device.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Kind {
    Cpu,
    /// The first GPU that this process sees
    Cuda,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let (config, dtype) = llama::config(&args.model)?;
    let vocabulary = config.vocab_size;
    ensure!(
        args.prompt_ids.iter().all(|id| (*id as usize) < vocabulary),
        "the model has {vocabulary} tokens: every id has to be less"
    );
    let (device, dtype) = match args.device {
        // candle multiplies no bfloat16 on the CPU.
        Kind::Cpu => (Device::Cpu, DType::F32),
        Kind::Cuda => (Device::new_cuda(0)?, dtype),
    };
    let device_ready = age()?;

    let plan = Plan {
        model: &args.model,
        config: &config,
        dtype,
        device: &device,
    };
    let Started {
        mut generator,
        path,
        lease,
    } = match args.disk {
        true => plan.load_from_disk()?,
        false => plan.load(&args.loader_config)?,
    };
    let model_ready = age()?;

    let mut ids = Vec::with_capacity(args.tokens);
    let mut first_token = model_ready;
    while ids.len() < args.tokens {
        let id = match ids.last() {
            Some(id) => generator.next_after(&[*id])?,
            None => generator.next_after(&args.prompt_ids)?,
        };
        if ids.is_empty() {
            first_token = age()?;
        }
        ids.push(id);
    }
    let all_tokens = age()?;

    eprintln!("weights {path}");
    let seconds = |age: Duration| format!("{:.3} s", age.as_secs_f64());
    eprintln!(
        "since the process started: device {}, model {}, first token {}, all tokens {}",
        seconds(device_ready),
        seconds(model_ready),
        seconds(first_token),
        seconds(all_tokens)
    );
    let ids: Vec<_> = ids.iter().map(u32::to_string).collect();
    println!("{}", ids.join(","));

    thread::sleep(Duration::from_secs(args.hold));
    // The model goes first: what is mapped is leased for as long as it is used.
    drop(generator);
    drop(lease);
    Ok(())
}

/// How long this process has been there. What precedes `main` counts: the libraries of CUDA take their time.
fn age() -> Result<Duration> {
    let stat = fs::read_to_string("/proc/self/stat").context("cannot read /proc/self/stat")?;
    // The second field, the command's name, is in parentheses; the 22nd is when the process started.
    let started = stat
        .rsplit_once(')')
        .and_then(|(_, fields)| fields.split_ascii_whitespace().nth(19)?.parse::<u64>().ok())
        .context("/proc/self/stat does not say when the process started")?;
    let started = Duration::from_secs_f64(started as f64 / clock_ticks_per_second() as f64);
    let now = clock_gettime(ClockId::Boottime);
    let now = Duration::new(now.tv_sec as u64, now.tv_nsec as u32);
    Ok(now.saturating_sub(started))
}
