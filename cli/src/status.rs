//! `weightd status`: the daemons of a socket directory. Also how other commands find them.

use crate::args::{StatusArgs, WhereArgs};
use crate::error::CliError;
use crate::node;
use crate::output::say;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use weightd_blocking::request::{RequestError, request};
use weightd_core::content::Role;
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{DaemonStatus, GetStatus, Holds};
use weightd_socket::connect::ConnectError;
use weightd_socket::path::{Named, list};

const ANSWERS_WITHIN: Span = Span::secs(5);

/// A daemon that was found, or a socket that did not answer.
pub struct Found {
    pub socket: PathBuf,
    pub status: Result<DaemonStatus, String>,
}

impl Found {
    /// Whose weights it holds, where it answered.
    pub fn role(&self) -> Option<Role> {
        self.status.as_ref().ok().map(|status| status.info.key.role)
    }
}

pub fn run(args: &StatusArgs) -> Result<ExitCode, CliError> {
    let found = find(&args.place)?;
    if found.is_empty() && !args.json {
        say("no daemons")?;
    }
    let mut failed = false;
    for found in &found {
        match &found.status {
            Ok(status) if args.json => say(json(status))?,
            Ok(status) => say(line(status))?,
            Err(why) => {
                failed = true;
                eprintln!("weightd: {}: {why}", found.socket.display());
            }
        }
    }
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Asks every daemon of the directory, or of one instance in it. A directory that does not exist
/// holds none.
pub fn find(place: &WhereArgs) -> Result<Vec<Found>, CliError> {
    let Some(dir) = node::open_dir_if_there(place)? else {
        return Ok(Vec::new());
    };
    let sockets = list(dir.path()).map_err(CliError::failure)?;
    let of_instance = |socket: &PathBuf| {
        let instance = Named::from_path(socket).and_then(|named| named.instance);
        place.instance.is_none() || place.instance == instance
    };
    Ok(sockets.into_iter().filter(of_instance).filter_map(ask).collect())
}

/// `None` for a socket that a killed launcher and server left behind: nobody listens there.
fn ask(socket: PathBuf) -> Option<Found> {
    let status = match status(&socket) {
        Err(RequestError::Connect(ConnectError::Absent { .. })) => return None,
        Ok(Message::DaemonStatus(status)) => Ok(status),
        Ok(other) => Err(format!("answered with a {} message", other.name())),
        Err(error) => Err(error.to_string()),
    };
    Some(Found { socket, status })
}

fn status(socket: &Path) -> Result<Message, RequestError> {
    request(socket, GetStatus {}, ANSWERS_WITHIN)
}

fn holds(status: &DaemonStatus) -> (&'static str, Option<String>) {
    match status.holds {
        Holds::Empty => ("empty", None),
        Holds::Content(generation) => ("serving", Some(generation.to_string())),
        Holds::Released(generation) => ("released", Some(generation.to_string())),
        Holds::Lost(generation) => ("lost", Some(generation.to_string())),
    }
}

fn json(status: &DaemonStatus) -> serde_json::Value {
    let (state, generation) = holds(status);
    let key = &status.info.key;
    serde_json::json!({
        "version": status.version,
        "pid": status.pid,
        "launcher_pid": (status.launcher_pid != 0).then_some(status.launcher_pid),
        "socket": status.info.socket,
        "role": key.role.name(),
        "global_rank": status.info.global_rank,
        "dp_rank": key.dp_rank,
        "pp_rank": key.pp_rank,
        "tp_rank": key.tp_rank,
        "device_uuid": status.info.device_uuid.hex(),
        "state": state,
        "generation": generation,
        "bytes": status.bytes,
        "tensors": status.tensors,
        "aliases": status.aliases,
        "leases": status.leases,
        "served": status.served,
        "reloads": status.reloads,
        "uptime_s": status.uptime_s,
        "key": key_json(status),
    })
}

/// The key, with its hashes as hex digits.
fn key_json(status: &DaemonStatus) -> serde_json::Value {
    let key = &status.info.key;
    let hex = |hash: &Option<[u8; 32]>| {
        hash.map(|hash| hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    };
    serde_json::json!({
        "checkpoint": {
            "bytes": key.checkpoint.bytes,
            "files": hex(&key.checkpoint.files),
            "digest": hex(&key.checkpoint.digest),
        },
        "model_arch": key.model_arch,
        "tp_size": key.tp_size,
        "tp_rank": key.tp_rank,
        "dtype": key.dtype,
        "quantization": key.quantization,
        "quant_config_hash": hex(&key.quant_config_hash),
        "revision": key.revision,
        "engine_version": key.engine_version,
        "pp_size": key.pp_size,
        "pp_rank": key.pp_rank,
        "role": key.role.name(),
        "dp_size": key.dp_size,
        "dp_rank": key.dp_rank,
        "enable_expert_parallel": key.enable_expert_parallel,
        "expert_placement_strategy": key.expert_placement_strategy,
        "layout": key.layout,
        "processing": key.processing,
        "extra": key.extra,
    })
}

fn line(status: &DaemonStatus) -> String {
    let (state, generation) = holds(status);
    let key = &status.info.key;
    let launcher = match status.launcher_pid {
        0 => "none: end it with `weightd stop`".to_owned(),
        pid => pid.to_string(),
    };
    format!(
        "rank {} (dp {} pp {} tp {}/{}) {} {}: {state}{}, {} tensors (+{} aliases), {} bytes, {} leases, up {} s, server {}, launcher {launcher}, {}",
        status.info.global_rank,
        key.dp_rank,
        key.pp_rank,
        key.tp_rank,
        key.tp_size,
        key.role.name(),
        key.model_arch,
        generation
            .map(|generation| format!(" generation {generation}"))
            .unwrap_or_default(),
        status.tensors,
        status.aliases,
        status.bytes,
        status.leases,
        status.uptime_s,
        status.pid,
        status.info.socket
    )
}
