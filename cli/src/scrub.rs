//! `weightd scrub`: whether what is resident is still what was loaded.

use crate::args::ScrubArgs;
use crate::error::CliError;
use crate::output::say;
use crate::status::{Found, find};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use weightd_blocking::{Binding, Endpoint, Loader, Weights};
use weightd_checkpoint::{ScrubError, Scrubbed, scrub};
use weightd_core::content::{DeviceUuid, Role};
use weightd_core::machine::AttachOptions;
use weightd_core::wire::message::{DaemonInfo, DaemonStatus, Holds};
use weightd_gpu::{Device, MemoryError, Opened};
use weightd_socket::credentials::our_uid;

/// What was found of a daemon.
struct Outcome {
    global_rank: u32,
    role: Role,
    generation: String,
    result: Result<Scrubbed, ScrubError>,
    took: Duration,
}

pub fn run(args: &ScrubArgs) -> Result<ExitCode, CliError> {
    let found = find(&args.place)?;
    let mut serving = Vec::new();
    for Found { socket, status, .. } in &found {
        let said = |why: &String| CliError::Failure(format!("{}: {why}", socket.display()));
        let status = status.as_ref().map_err(said)?;
        let wanted = args.rank.is_none_or(|rank| status.info.global_rank == rank);
        if wanted && matches!(status.holds, Holds::Content(_)) {
            serving.push((socket, status));
        }
    }
    if serving.is_empty() {
        return Err(CliError::failure(
            "no daemon here serves such weights: `weightd status` lists those that there are",
        ));
    }
    let mut code = ExitCode::SUCCESS;
    for (socket, status) in serving {
        let outcome = scrub_one(socket, status)?;
        if outcome.result.is_err() {
            code = ExitCode::FAILURE;
        }
        say(outcome.line(args.json))?;
    }
    Ok(code)
}

/// Maps what a daemon serves, whatever that is, and checks it.
fn scrub_one(socket: &Path, status: &DaemonStatus) -> Result<Outcome, CliError> {
    let info = &status.info;
    let failed =
        |error: &dyn std::fmt::Display| CliError::Failure(format!("rank {}: {error}", info.global_rank));
    let _opened = open(&info.device_uuid).map_err(|error| failed(&error))?;
    let weights = map(socket, info).map_err(|error| failed(&error))?;
    let start = Instant::now();
    let result = scrub(&weights);
    Ok(Outcome {
        global_rank: info.global_rank,
        role: info.key.role,
        generation: weights
            .generation()
            .map_or_else(String::new, |generation| generation.to_string()),
        result,
        took: start.elapsed(),
    })
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
    loader
        .attach()
        .map(|loaded| loaded.into_model())
        .map_err(CliError::failure)
}

/// The device, unless it is the host.
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
            let damaged = match why {
                Some(ScrubError::Damaged { names, .. }) => names.as_slice(),
                _ => &[],
            };
            return serde_json::json!({
                "global_rank": rank,
                "role": self.role.name(),
                "generation": self.generation,
                "intact": scrubbed.is_some(),
                "tensors": scrubbed.map(|scrubbed| scrubbed.tensors),
                "bytes": scrubbed.map(|scrubbed| scrubbed.bytes),
                "damaged": damaged,
                "error": why.map(ToString::to_string),
                "seconds": seconds,
            })
            .to_string();
        }
        let name = match self.role {
            Role::Target => format!("rank {rank}"),
            Role::Draft => format!("rank {rank} draft"),
        };
        match &self.result {
            Ok(Scrubbed { tensors, bytes }) => format!(
                "{name}: {tensors} tensors, {bytes} bytes of generation {} hold what was loaded ({seconds:.2} s)",
                self.generation
            ),
            Err(error) => format!("{name}: generation {}: {error}", self.generation),
        }
    }
}
