//! A synchronous engine. It takes its weights from the cache where it can, and from disk where it must.
//!
//! ```sh
//! weightd preload --model tests/data/llama --device cpu &    # wait for READY
//! cargo run -p weightd-examples --bin engine_blocking -- --model tests/data/llama
//! ```

use clap::Parser;
use std::error::Error;
use std::process::ExitCode;
use weightd_blocking::{Loaded, Loader};
use weightd_examples::{Bigram, Engine, end, log_to_stderr};

/// A synchronous engine: takes its weights from the cache where it can, and from disk where it must, and generates.
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    engine: Engine,

    /// The token to begin with.
    #[arg(long, default_value_t = 1)]
    first: usize,

    /// How many tokens to generate.
    #[arg(long, default_value_t = 8)]
    tokens: usize,
}

fn main() -> ExitCode {
    log_to_stderr();
    end(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let rank = args.engine.rank("stored")?;
    let loader = Loader::new(&args.engine.loader_config, &rank)?;
    // Where the cache cannot serve, `because` says why; weightd has logged it.
    let loaded = loader.load(Bigram::over, |_because| Bigram::read(&rank.checkpoint))?;
    match &loaded {
        Loaded::Mapped {
            generation,
            timing,
            lease,
            ..
        } => {
            eprintln!("mapped generation {generation} in {:?}", timing.total());
            // An engine serves on when its daemon is lost; an operator wants to know.
            if let Some(lease) = lease {
                lease.on_event(|event| eprintln!("{event}"));
            }
        }
        Loaded::Copied { generation, .. } => eprintln!("copied generation {generation}"),
        Loaded::LoadedFromDisk { because, .. } => eprintln!("loaded from disk: {because}"),
    }
    // What a KV-cache may not use, since the cache holds it on this device.
    eprintln!("external memory: {} bytes", loader.external_memory()?);
    println!("{:?}", loaded.model().generate(args.first, args.tokens));
    Ok(())
}
