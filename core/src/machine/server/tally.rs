//! What a daemon was asked so far, counted; and who leases.

use super::{ConnId, Server};
use crate::content::Difference;
use crate::machine::Origin;
use crate::wire::message::{
    Activity, CodeCount, DaemonId, ErrorCode, FieldCount, Lease, MAX_GENERATIONS_LISTED, MAX_LEASES_LISTED,
};
use std::collections::BTreeMap;

/// Counts of one daemon, as many as there are fields and causes, whatever clients send.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub need_digest: u64,
    mismatches: u64,
    /// By field of the key.
    fields: BTreeMap<String, u64>,
    refused: BTreeMap<u16, u64>,
}

impl Tally {
    /// A failure with this code was answered.
    pub fn refused(&mut self, code: u16) {
        *self.refused.entry(code).or_default() += 1;
    }

    /// A key differed in these fields.
    pub fn mismatched(&mut self, fields: &[Difference]) {
        self.mismatches += 1;
        let mut counted_extra = false;
        for Difference { field, .. } in fields {
            // The client makes these names.
            let field = if field.starts_with("extra.") {
                "extra"
            } else {
                field
            };
            if field == "extra" && std::mem::replace(&mut counted_extra, true) {
                continue;
            }
            *self.fields.entry(field.to_owned()).or_default() += 1;
        }
    }
}

impl<F> Server<F> {
    /// A failure was answered on a connection of this origin.
    pub(super) fn count_refusal(&mut self, origin: Origin, code: ErrorCode) {
        if let Origin::Daemon(number) = origin
            && let Some(daemon) = self.daemons.get_mut(&number)
        {
            daemon.tally.refused(code.number());
        }
    }

    pub(super) fn get_activity(&mut self, id: ConnId, on: DaemonId, request: u32) {
        let Some(daemon) = self.daemons.get(&on) else {
            return;
        };
        let tally = &daemon.tally;
        let generations: Vec<_> = daemon.leased().rev().take(MAX_GENERATIONS_LISTED).collect();
        let leases: Vec<_> = self
            .conns
            .values()
            .filter(|conn| conn.origin == Origin::Daemon(on))
            .filter_map(|conn| {
                let generation = conn.watch.flatten()?;
                Some(Lease {
                    pid: conn.peer.pid,
                    generation,
                })
            })
            .take(MAX_LEASES_LISTED)
            .collect();
        let mismatched = tally.fields.iter().map(|(field, &count)| FieldCount {
            field: field.clone(),
            count,
        });
        let refused = tally
            .refused
            .iter()
            .map(|(&code, &count)| CodeCount { code, count });
        let activity = Activity {
            need_digest: tally.need_digest,
            mismatches: tally.mismatches,
            mismatched: mismatched.collect(),
            refused: refused.collect(),
            more_generations: (daemon.leased().len() - generations.len()) as u32,
            more_leases: daemon.open_leases().saturating_sub(leases.len() as u32),
            generations,
            leases,
        };
        self.reply(id, request, activity);
    }
}
