//! `weightd scrub`: whether what is resident is still what was loaded.

use crate::args::ScrubArgs;
use crate::error::CliError;
use crate::logs::LINE;
use crate::output::{json_text, say};
use crate::status::{Found, find};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use weightd_blocking::{Binding, Endpoint, Loader, Weights};
use weightd_checkpoint::{ScrubError, Scrubbed, scrub};
use weightd_core::content::{DeviceUuid, Generation, Role};
use weightd_core::machine::AttachOptions;
use weightd_core::text::short;
use weightd_core::wire::message::{DaemonInfo, DaemonStatus, Holds};
use weightd_gpu::{Device, MemoryError, Opened};
use weightd_socket::credentials::our_uid;
use weightd_socket::path::Named;

/// What was found of a daemon.
struct Outcome {
    socket: PathBuf,
    global_rank: u32,
    role: Role,
    generation: Option<Generation>,
    result: Result<Scrubbed, Failure>,
    took: Duration,
}

/// Why nobody knows that its weights are as they were loaded.
struct Failure {
    why: String,
    /// The names of the tensors that are known not to be.
    damaged: Vec<String>,
}

impl Failure {
    fn of(error: impl std::fmt::Display) -> Failure {
        Failure {
            why: error.to_string(),
            damaged: Vec::new(),
        }
    }
}

pub fn run(args: &ScrubArgs) -> Result<ExitCode, CliError> {
    let (mut wrong, mut serving) = (Vec::new(), Vec::new());
    let (dir, found) = find(&args.place)?;
    for Found { socket, status, .. } in found {
        match status {
            Err(why) => wrong.push(format!("{}: {why}", socket.display())),
            Ok(status) => {
                let wanted = args.rank.is_none_or(|rank| status.info.global_rank == rank);
                if wanted && matches!(status.holds, Holds::Content(_)) {
                    serving.push((socket, status));
                }
            }
        }
    }
    let mut failed = 0;
    for (socket, status) in &serving {
        let outcome = scrub_one(socket, status);
        failed += usize::from(outcome.result.is_err());
        say(outcome.line(args.json))?;
    }
    if failed > 0 {
        let all = serving.len();
        wrong.push(format!(
            "{failed} of {all} daemons are not known to hold what was loaded"
        ));
    }
    if !wrong.is_empty() {
        return Err(CliError::Failure(wrong.join("; ")));
    }
    match serving.is_empty() {
        true => Err(CliError::Failure(format!(
            "no such daemon serves weights in {}: `weightd status` lists those that there are",
            dir.display()
        ))),
        false => Ok(ExitCode::SUCCESS),
    }
}

/// Maps what a daemon serves, whatever that is, and checks it.
fn scrub_one(socket: &Path, status: &DaemonStatus) -> Outcome {
    let (info, start) = (&status.info, Instant::now());
    let mut generation = None;
    let result = open(&info.device_uuid).map_err(Failure::of).and_then(|_opened| {
        let weights = map(socket, info).map_err(Failure::of)?;
        generation = weights.generation();
        scrub(&weights).map_err(|error| Failure {
            why: error.to_string(),
            damaged: match error {
                ScrubError::Damaged { names, .. } => names,
                _ => Vec::new(),
            },
        })
    });
    Outcome {
        socket: socket.to_owned(),
        global_rank: info.global_rank,
        role: info.key.role,
        generation,
        result,
        took: start.elapsed(),
    }
}

fn map(socket: &Path, info: &DaemonInfo) -> Result<Weights, CliError> {
    let options = AttachOptions {
        role: info.key.role,
        device: Some(info.device_uuid),
        ..AttachOptions::new(our_uid().map_err(CliError::failure)?)
    };
    // What the daemon says that it has is what is wanted, so nobody asks for another digest.
    let digest = || Err("the daemon changed what it serves meanwhile: scrub again".to_owned());
    let endpoint = Endpoint::socket(socket).map_err(CliError::failure)?;
    let loader = Loader::from(Binding::with(endpoint, options, info.key.clone(), digest));
    let loaded = loader.attach().map_err(CliError::failure)?;
    Ok(loaded.into_model())
}

/// The device, unless it is the host: where there is no driver, it can be nothing else.
fn open(uuid: &DeviceUuid) -> Result<Option<Opened>, MemoryError> {
    let devices = Device::cuda().unwrap_or_default();
    let device = devices.iter().find(|device| device.uuid() == *uuid);
    device.map(Device::open).transpose()
}

impl Outcome {
    fn line(&self, json: bool) -> String {
        let (rank, seconds) = (self.global_rank, self.took.as_secs_f64());
        let (scrubbed, why) = (self.result.as_ref().ok(), self.result.as_ref().err());
        if json {
            let damaged = why.map_or(&[][..], |failure| &failure.damaged);
            return json_text(&serde_json::json!({
                "socket": self.socket.display().to_string(),
                "global_rank": rank,
                "role": self.role.name(),
                "generation": self.generation.map(|generation| generation.to_string()),
                "intact": match why {
                    None => Some(true),
                    Some(failure) => (!failure.damaged.is_empty()).then_some(false),
                },
                "tensors": scrubbed.map(|scrubbed| scrubbed.tensors),
                "bytes": scrubbed.map(|scrubbed| scrubbed.bytes),
                "damaged": damaged,
                "error": why.map(|failure| &failure.why),
                "seconds": seconds,
            }));
        }
        let mut name = match self.role {
            Role::Target => format!("rank {rank}"),
            Role::Draft => format!("rank {rank} draft"),
        };
        if let Some(instance) = Named::from_path(&self.socket).and_then(|named| named.instance) {
            name = format!("{name} of {instance}");
        }
        let line = match (&self.result, self.generation) {
            (Ok(Scrubbed { tensors, bytes }), Some(generation)) => format!(
                "{name}: {tensors} tensors, {bytes} bytes of generation {generation} hold what was loaded ({seconds:.2} s)"
            ),
            (Ok(Scrubbed { tensors, bytes }), None) => {
                format!("{name}: {tensors} tensors, {bytes} bytes hold what was loaded ({seconds:.2} s)")
            }
            (Err(Failure { why, .. }), Some(generation)) => format!("{name}: generation {generation}: {why}"),
            (Err(Failure { why, .. }), None) => format!("{name}: {why}"),
        };
        short(&line, LINE)
    }
}
