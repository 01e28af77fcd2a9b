//! Who holds each device's memory: what a device's own tools show of it is no process.

use super::Found;
use super::table::{shown, size};
use crate::logs::DaemonName;
use crate::owners::stop_command;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use weightd_core::content::{DeviceUuid, Generation};
use weightd_core::wire::message::{Activity, DaemonStatus, Holds, Leased};
use weightd_socket::lock::read_owner;
use weightd_socket::seen::is_absent;

/// The most processes that one line names.
const PIDS: usize = 16;

/// A device's daemons and generations, each with who keeps it.
pub fn lines(found: &[Found]) -> Vec<String> {
    let mut devices: BTreeMap<DeviceUuid, Vec<(&Found, &DaemonStatus)>> = BTreeMap::new();
    for found in found {
        if let Ok(status) = &found.status {
            let daemons = devices.entry(status.info.device_uuid).or_default();
            daemons.push((found, status));
        }
    }
    let mut lines = Vec::new();
    for (device, daemons) in devices {
        let held: Vec<(u64, String)> = daemons
            .iter()
            .flat_map(|(found, status)| of_daemon(found, status))
            .collect();
        let bytes = held
            .iter()
            .fold(0u64, |sum, (bytes, _)| sum.saturating_add(*bytes));
        lines.push(String::new());
        lines.push(format!("device {device}: {}", size(bytes)));
        lines.extend(held.into_iter().map(|(_, line)| format!("  {line}")));
    }
    lines
}

/// The bytes of each generation, and what is said of it.
fn of_daemon(found: &Found, status: &DaemonStatus) -> Vec<(u64, String)> {
    let activity = found.activity.as_ref();
    let name = DaemonName::new(0, Some(&status.info));
    let current = match status.holds {
        Holds::Content(generation) => Some(generation),
        _ => None,
    };
    let (begins, takes) = match status.info.publish {
        None => ("preload", ""),
        Some(_) => ("serve", "; engines may publish"),
    };
    let mut held = Vec::new();
    if let Some(generation) = current {
        let by = match status.launcher_pid {
            0 => format!(
                "server {}, launcher none: {}",
                status.pid,
                orphan(&found.socket, status.pid, begins)
            ),
            launcher => format!("launcher {launcher} and server {}", status.pid),
        };
        let leased = match leasers(activity, generation) {
            None => "leased by none".to_owned(),
            Some(pids) => format!("leased by {pids}"),
        };
        let bytes = size(status.bytes);
        held.push((
            status.bytes,
            format!(
                "{name}: {bytes} of generation {generation} ({}), {leased}, held by {by}{takes}",
                kind(status)
            ),
        ));
    } else {
        let why = match status.holds {
            Holds::Released(generation) => format!("generation {generation} was released"),
            Holds::Lost(generation) => format!("generation {generation} was lost"),
            Holds::Empty | Holds::Content(_) => "nothing was published yet".to_owned(),
        };
        held.push((0, format!("{name}: serves nothing: {why}{takes}")));
    }
    for &Leased {
        generation, bytes, ..
    } in activity.iter().flat_map(|activity| &activity.generations)
    {
        if Some(generation) != current {
            let pids =
                leasers(activity, generation).unwrap_or_else(|| "processes that are not listed".to_owned());
            let line = format!(
                "{name}: {} of generation {generation}, let go by weightd, free when it is unmapped by {pids}",
                size(bytes)
            );
            held.push((bytes, line));
        }
    }
    held
}

/// What to do with a server without a launcher: both commands find it by its control socket.
fn orphan(socket: &Path, server: u32, begins: &str) -> String {
    let control = read_owner(socket).map(|owner| socket.with_file_name(owner.control));
    if control.is_none_or(|control| is_absent(&control)) {
        return format!(
            "no lock file leads to it, or its control socket is gone, removed perhaps by a cleaner: end it with `kill {server}`"
        );
    }
    let dir = socket.parent().unwrap_or(Path::new("/"));
    let stop = stop_command(dir, socket);
    format!("take it over with `weightd {begins}` as before, or end it with {stop}")
}

/// What kind of weights they are, and whether `weightd scrub` can prove them.
fn kind(status: &DaemonStatus) -> String {
    let key = &status.info.key;
    let quantization = match key.quantization.as_str() {
        "" => String::new(),
        method => format!(", quantization {}", shown(method)),
    };
    let checksums = if status.checksums {
        "checksums"
    } else {
        "no checksums"
    };
    format!("dtype {}{quantization}, {checksums}", shown(&key.dtype))
}

/// The processes that lease a generation.
fn leasers(activity: Option<&Activity>, generation: Generation) -> Option<String> {
    let leases = activity?
        .leases
        .iter()
        .filter(|lease| lease.generation == generation);
    let pids: BTreeSet<u32> = leases.map(|lease| lease.pid).collect();
    if pids.is_empty() {
        return None;
    }
    let name = |pid: &u32| match pid {
        0 => "a process of another pid namespace".to_owned(),
        pid => format!("pid {pid}"),
    };
    let mut names: Vec<String> = pids.iter().take(PIDS).map(name).collect();
    if let Some(more @ 1..) = pids.len().checked_sub(PIDS) {
        names.push(format!("{more} more"));
    }
    Some(names.join(", "))
}
