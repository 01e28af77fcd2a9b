//! An engine that works on its weights after loading (it quantizes them to 8 bits), and publishes what it
//! made, so that the next one maps it and does nothing.
//!
//! ```sh
//! weightd serve --device cpu &
//! cargo run -p weightd-examples --bin engine_publishing -- --model tests/data/llama   # quantizes
//! cargo run -p weightd-examples --bin engine_publishing -- --model tests/data/llama   # maps
//! ```

use clap::Parser;
use std::error::Error;
use weightd_blocking::{Contents, Filling, Lease, LoadError, Loader, Publisher};
use weightd_examples::{Bigram, Engine, log_to_stderr, quantize};

/// What this engine does to weights. It is part of the key: an engine that does anything else, or nothing,
/// never gets them.
const PROCESSING: &str = "example-int8-rows-1";

#[derive(Parser)]
struct Args {
    #[command(flatten)]
    engine: Engine,

    /// How many tokens to generate.
    #[arg(long, default_value_t = 8)]
    tokens: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    log_to_stderr();
    let args = Args::parse();
    let rank = args.engine.rank(PROCESSING)?;
    let loader = Loader::new(&args.engine.loader_config, &rank)?;
    let (model, _lease) = match loader.attach() {
        Ok(cached) => {
            eprintln!("mapped: nothing to do");
            let (weights, lease) = cached.into_parts();
            (Bigram::over(weights)?, lease)
        }
        Err(LoadError::Attach(because)) => {
            eprintln!("quantizing: {because}");
            publish(&args, &Publisher::with(loader.binding().clone(), rank.device))?
        }
        Err(other) => return Err(other.into()),
    };
    println!("{:?}", model.generate(1, args.tokens));
    Ok(())
}

/// Loads, quantizes, publishes, and goes on with what everybody maps from now on.
fn publish(args: &Args, publisher: &Publisher) -> Result<(Bigram, Option<Lease>), Box<dyn Error>> {
    let tensors = quantize(&Bigram::read(&args.engine.model)?);
    let mut contents = Contents::new();
    for (name, dtype, shape, _) in &tensors {
        contents.parameter(name, *dtype, shape)?;
    }
    let fill = |filling: &Filling| {
        let mut tensors = tensors.iter();
        tensors.try_for_each(|(name, _, _, bytes)| filling.write(name, bytes))
    };
    let published = publisher.publish(contents, fill)?;
    eprintln!("published generation {}", published.generation);
    Ok((Bigram::over(published.weights)?, published.lease))
}
