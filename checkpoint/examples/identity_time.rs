//! What it takes to ask which bytes a checkpoint consists of.
//!
//! usage: identity_time MODEL [digest]
//!
//! Opens the checkpoint 21 times (configuration, index, headers, write-back of what is dirty) and takes its
//! identity; with `digest`, its digest as well, once.

use std::path::Path;
use std::time::Instant;
use weightd_checkpoint::{Checkpoint, LoadOptions, Progress, digest_hex};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = args.next().ok_or("usage: identity_time MODEL [digest]")?;
    let ask = || {
        let start = Instant::now();
        let checkpoint = Checkpoint::open(Path::new(&model))?;
        let identity = checkpoint.identity();
        Ok::<_, Box<dyn std::error::Error>>((start.elapsed(), checkpoint, identity))
    };
    let mut times = Vec::new();
    for _ in 0..21 {
        times.push(ask()?.0);
    }
    let first = times[0];
    times.sort();
    let (_, checkpoint, identity) = ask()?;
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    println!(
        "{model}: {:.2} GB in {} files, known by its files: {}; asked in {:.2} ms (median; first {:.2}, most {:.2})",
        checkpoint.bytes() as f64 / 1e9,
        checkpoint.files().len(),
        identity.files.is_some(),
        ms(times[10]),
        ms(first),
        ms(times[20]),
    );
    if args.next().is_some() {
        let start = Instant::now();
        let digest = checkpoint.digest(&LoadOptions::default(), &Progress::default())?;
        let seconds = start.elapsed().as_secs_f64();
        let rate = checkpoint.bytes() as f64 / 1e9 / seconds;
        println!(
            "{model}: digest {} in {seconds:.2} s, {rate:.1} GB/s",
            digest_hex(&digest)
        );
    }
    Ok(())
}
