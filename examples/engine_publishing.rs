//! An engine that works on its weights after loading (it quantizes them to 8 bits), and publishes what it
//! made, so that the next one maps it and does nothing.
//!
//! ```sh
//! weightd serve --device cpu &    # wait for SERVING
//! cargo run -p weightd-examples --bin engine_publishing -- --model tests/data/llama   # quantizes
//! cargo run -p weightd-examples --bin engine_publishing -- --model tests/data/llama   # maps
//! ```

use clap::Parser;
use std::error::Error;
use std::process::ExitCode;
use weightd_blocking::{Contents, Filling, Loader, PublishError, PublishFailed, Published, Publisher};
use weightd_examples::{Bigram, Engine, Quantized, end, log_to_stderr, quantize};

/// What this engine does to weights. It is part of the key: an engine that does anything else, or nothing,
/// never gets them.
const PROCESSING: &str = "example-int8-rows-1";

/// An engine that quantizes its weights to 8 bits and publishes what it made, so that the next one maps it.
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    engine: Engine,

    /// How many tokens to generate.
    #[arg(long, default_value_t = 8)]
    tokens: usize,
}

fn main() -> ExitCode {
    log_to_stderr();
    end(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let rank = args.engine.rank(PROCESSING)?;
    let loader = Loader::new(&args.engine.loader_config, &rank)?;
    let (weights, _lease) = match loader.attach() {
        Ok(cached) => {
            eprintln!("mapped: nothing to do");
            cached.into_parts()
        }
        Err(because) => {
            eprintln!("quantizing: {because}");
            let tensors = quantize(&Bigram::read(&rank.checkpoint)?);
            let publisher = Publisher::with(loader.binding().clone(), rank.device);
            match publish(&publisher, &tensors) {
                Ok(published) => {
                    eprintln!("published generation {}", published.generation);
                    (published.weights, published.lease)
                }
                Err(PublishFailed::Publish(because)) if may_be_there(&because) => {
                    eprintln!("not published: {because}");
                    loader.attach()?.into_parts()
                }
                Err(other) => return Err(other.into()),
            }
        }
    };
    println!("{:?}", Bigram::over(weights)?.generate(1, args.tokens));
    Ok(())
}

/// Gives what was quantized to the daemon. What comes back is what everybody maps from now on.
fn publish(publisher: &Publisher, tensors: &[Quantized]) -> Result<Published, PublishFailed> {
    let mut contents = Contents::new();
    for tensor in tensors {
        contents.parameter(&tensor.name, tensor.dtype, &tensor.shape)?;
    }
    publisher.publish(contents, |filling: &Filling| {
        let mut tensors = tensors.iter();
        tensors.try_for_each(|tensor| filling.write(&tensor.name, &tensor.bytes))
    })
}

/// Whether another engine was faster, or we were and did not hear of it.
fn may_be_there(error: &PublishError) -> bool {
    matches!(
        error,
        PublishError::Held { .. } | PublishError::Conflict { .. } | PublishError::Unknown { .. }
    )
}
