//! What each server gave up of its rights.

use super::Found;
use std::collections::BTreeMap;

/// One line for each server.
pub fn lines(found: &[Found]) -> Vec<String> {
    let statuses = found.iter().filter_map(|found| found.status.as_ref().ok());
    let servers: BTreeMap<u32, _> = statuses.map(|status| (status.pid, status.confinement)).collect();
    let lines = servers
        .into_iter()
        .map(|(pid, confinement)| format!("server {pid} gave up what it does not need: {confinement}"));
    let lines: Vec<String> = lines.collect();
    match lines.is_empty() {
        true => lines,
        false => [vec![String::new()], lines].concat(),
    }
}
