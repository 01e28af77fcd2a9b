//! `weightd digest`: the digest of a checkpoint's bytes.

use crate::args::DigestArgs;
use crate::error::CliError;
use crate::logs::{end_progress, show_progress};
use crate::models::directory;
use crate::output::{json_text, say};
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;
use weightd_blocking::digest::{Digested, compute, digest};
use weightd_checkpoint::{Checkpoint, LoadOptions, Progress, digest_hex};

/// How often progress is shown.
const SHOW_EVERY: Duration = Duration::from_millis(200);

pub fn run(args: &DigestArgs) -> Result<ExitCode, CliError> {
    let dir = directory(&args.model, &args.revision, args.download_dir.as_deref())?;
    let checkpoint = Checkpoint::open(&dir).map_err(CliError::failure)?;
    let digested = while_shown(args, &checkpoint)?;
    let hex = digest_hex(&digested.digest);
    if !args.json {
        say(hex)?;
        return Ok(ExitCode::SUCCESS);
    }
    say(json_text(&serde_json::json!({
        "digest": hex,
        "bytes": checkpoint.bytes(),
        "bytes_read": digested.bytes_read,
        "seconds": digested.took.as_secs_f64(),
    })))?;
    Ok(ExitCode::SUCCESS)
}

/// Takes the digest, and shows how far that is.
fn while_shown(args: &DigestArgs, checkpoint: &Checkpoint) -> Result<Digested, CliError> {
    let (options, progress) = (LoadOptions::default(), Progress::default());
    let (send, ended) = channel();
    thread::scope(|scope| {
        let take = if args.recompute { compute } else { digest };
        let (options, progress) = (&options, &progress);
        scope.spawn(move || send.send(take(checkpoint, options, progress)));
        loop {
            match ended.recv_timeout(SHOW_EVERY) {
                Err(RecvTimeoutError::Timeout) => {
                    show_progress(&"digest", progress.bytes_read(), checkpoint.bytes());
                }
                Ok(digested) => {
                    end_progress();
                    return digested.map_err(CliError::failure);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let why = "reading for the digest panicked; this is a bug in weightd";
                    return Err(CliError::failure(why));
                }
            }
        }
    })
}
