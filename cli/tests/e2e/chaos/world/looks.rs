//! What is to be seen.

use super::{Daemon, Model, World};
use crate::chaos::plan::Source;
use crate::harness::*;
use serde_json::Value;
use std::fs;

impl World {
    pub(super) fn publishes(&self) -> bool {
        self.era.source == Source::Publishers
    }

    /// Which model a daemon serves.
    pub(super) fn model_of(&self, daemon: &Daemon) -> &Model {
        if !self.publishes() {
            return &self.models[0];
        }
        let is_its = |model: &&Model| hex(&model.digest) == daemon.digest;
        self.models.iter().find(is_its).unwrap()
    }

    /// Which model is not the one that the first daemon serves, where there are two.
    pub(super) fn other_than_served(&self, daemons: &[Daemon]) -> usize {
        let served = daemons.first().map(|daemon| daemon.digest.clone());
        let other = |model: &Model| Some(hex(&model.digest)) != served;
        self.models.iter().position(other).unwrap_or(0)
    }

    /// What `weightd status` knows, also while some daemons do not answer.
    pub(super) fn status(&self) -> Vec<Value> {
        let ran = self.site.run(&["status", "--json"]);
        ran.stdout
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .filter(has_answered)
            .collect()
    }

    /// Every daemon, once they all answer.
    pub(super) fn all_daemons(&self) -> Vec<Daemon> {
        let count = self.era.daemons();
        let mut status = Vec::new();
        wait_until("all daemons answer", || {
            status = self.status();
            status.len() == count
        });
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let daemon = |daemon: &Value| Daemon {
            socket: text(&daemon["socket"]),
            server: daemon["pid"].as_u64().unwrap() as u32,
            generation: text(&daemon["generation"]),
            state: text(&daemon["state"]),
            rank: daemon["global_rank"].as_u64().unwrap() as u32,
            draft: daemon["role"] == "draft",
            digest: text(&daemon["key"]["checkpoint"]["digest"]),
            leases: daemon["leases"].as_u64().unwrap() as usize,
            leased: daemon["activity"]["leased_generations"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|leased| text(&leased["generation"]))
                .collect(),
        };
        status.iter().map(daemon).collect()
    }

    pub(super) fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.site.dir()).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.collect()
    }
}

pub(super) fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
