//! A daemon as JSON: exact numbers, for scripts.

use super::{Found, holds};
use serde_json::{Map, Value, json};
use weightd_core::wire::message::{Activity, Confinement, DaemonStatus, ErrorCode, Holds, Replace};
use weightd_socket::path::Named;

pub fn object(status: &DaemonStatus, activity: Option<&Activity>) -> Value {
    let (state, generation) = holds(status);
    let key = &status.info.key;
    let leased = |activity: &Activity| {
        activity
            .generations
            .iter()
            .map(|leased| leased.bytes)
            .sum::<u64>()
    };
    json!({
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
        "no_release": status.info.no_release,
        "publish": status.info.publish.map(replace),
        "state": state,
        "generation": generation,
        "bytes": status.bytes,
        "tensors": status.tensors,
        "aliases": status.aliases,
        "checksums": matches!(status.holds, Holds::Content(_)).then_some(status.checksums),
        "leases": status.leases,
        "leased_bytes": activity.map(leased),
        "served": status.served,
        "reloads": status.reloads,
        "uptime_s": status.uptime_s,
        "confinement": confinement(status.confinement),
        "activity": activity.map(activity_json),
        "key": key_json(status),
    })
}

/// What is known of one that did not answer.
pub fn unanswered(found: &Found, why: &str) -> Value {
    let named = Named::from_path(&found.socket);
    json!({
        "pid": found.living.server,
        "launcher_pid": found.living.launcher,
        "socket": found.socket.display().to_string(),
        "role": named.as_ref().map(|named| named.role.name()),
        "device_uuid": named.map(|named| named.device.hex()),
        "state": found.state,
        "why": why,
    })
}

/// What the server's process gave up; what it has not is false or null.
fn confinement(confinement: Confinement) -> Value {
    json!({
        "no_new_privileges": confinement.no_new_privileges,
        "no_core_dumps": confinement.no_core_dumps,
        "landlock_abi": confinement.landlock,
        "seccomp": confinement.seccomp,
    })
}

/// As `weightd serve --replace` calls it.
fn replace(replace: Replace) -> &'static str {
    match replace {
        Replace::Keep => "keep",
        Replace::DropFirst => "drop-first",
    }
}

fn activity_json(activity: &Activity) -> Value {
    let mismatched = activity.mismatched.iter();
    let mismatched: Map<String, Value> = mismatched
        .map(|field| (field.field.clone(), field.count.into()))
        .collect();
    let name = |code: u16| format!("{:?}", ErrorCode::from_number(code));
    let refused = activity.refused.iter();
    let refused: Map<String, Value> = refused
        .map(|refused| (name(refused.code), refused.count.into()))
        .collect();
    let generations = activity.generations.iter().map(|leased| {
        json!({
            "generation": leased.generation.to_string(),
            "bytes": leased.bytes,
            "leases": leased.leases,
        })
    });
    let leases = activity
        .leases
        .iter()
        .map(|lease| json!({ "pid": lease.pid, "generation": lease.generation.to_string() }));
    json!({
        "need_digest": activity.need_digest,
        "mismatches": activity.mismatches,
        "mismatched": mismatched,
        "refused": refused,
        "leased_generations": generations.collect::<Vec<_>>(),
        "more_leased_generations": activity.more_generations,
        "leases": leases.collect::<Vec<_>>(),
        "more_leases": activity.more_leases,
    })
}

/// The key, with its hashes as hex digits.
fn key_json(status: &DaemonStatus) -> Value {
    let key = &status.info.key;
    let hex = |hash: &Option<[u8; 32]>| {
        hash.map(|hash| hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    };
    json!({
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
