//! What `weightd attach` says of a rank.

use crate::node::LocalRank;
use std::path::PathBuf;
use weightd_blocking::Loaded;
use weightd_gpu::Weights;

pub struct Report {
    rank: LocalRank,
    tensors: usize,
    aliases: usize,
    bytes: u64,
    generation: String,
    leased: bool,
    microseconds: u64,
    /// How many bytes were compared.
    pub verified: Option<u64>,
    pub saved: Option<PathBuf>,
}

impl Report {
    pub fn new(rank: &LocalRank, attached: &Loaded<Weights>) -> Report {
        let manifest = attached.model().manifest();
        Report {
            rank: *rank,
            tensors: manifest.tensors().len(),
            aliases: manifest.aliases().len(),
            bytes: attached.model().bytes(),
            generation: attached
                .generation()
                .map(|generation| generation.to_string())
                .unwrap_or_default(),
            leased: attached.lease().is_some(),
            microseconds: attached.timing().unwrap_or_default().total().as_micros() as u64,
            verified: None,
            saved: None,
        }
    }

    pub fn line(&self, json: bool) -> String {
        let p = self.rank.placement;
        if json {
            let object = serde_json::json!({
                "global_rank": p.global_rank,
                "dp_rank": p.dp_rank,
                "pp_rank": p.pp_rank,
                "tp_rank": p.tp_rank,
                "device": self.rank.device.to_string(),
                "device_uuid": self.rank.device.uuid().hex(),
                "tensors": self.tensors,
                "aliases": self.aliases,
                "bytes": self.bytes,
                "generation": self.generation,
                "leased": self.leased,
                "microseconds": self.microseconds,
                "verified": self.verified.is_some(),
                "saved": self.saved.as_ref().map(|path| path.display().to_string()),
            });
            return object.to_string();
        }
        let mut line = format!(
            "rank {}: {} tensors, {} aliases, {} bytes, generation {}, mapped in {:.3} ms",
            p.global_rank,
            self.tensors,
            self.aliases,
            self.bytes,
            self.generation,
            self.microseconds as f64 / 1e3
        );
        if !self.leased {
            line.push_str(", not leased");
        }
        if let Some(bytes) = self.verified {
            line.push_str(&format!(", verified {bytes} bytes"));
        }
        if let Some(path) = &self.saved {
            line.push_str(&format!(", saved {}", path.display()));
        }
        line
    }
}
