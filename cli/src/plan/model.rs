//! What ranks would hold of a model and of its draft.

use crate::error::CliError;
use crate::logs::LINE;
use crate::models::Model;
use crate::output::say;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::Range;
use weightd_checkpoint::{Checkpoint, Draft, Held, HeldPart, ModelPart, Rank};
use weightd_core::content::Role;
use weightd_core::plan::placement::Placement;
use weightd_core::text::short;

/// A plan, worked out from headers alone, in a form to be printed.
pub struct ModelPlan {
    /// Those of the target, then those of the draft.
    ranks: Vec<RankSummary>,
    /// What all nodes read of the files, in bytes.
    read: u64,
    /// Tensors of layers that neither the model itself has nor its draft.
    left_out: usize,
}

struct RankSummary {
    role: Role,
    placement: Placement,
    region_bytes: u64,
    tensors: Vec<TensorSummary>,
    aliases: Vec<(&'static str, &'static str)>,
}

struct TensorSummary {
    name: String,
    /// Its name with the last two dimensions swapped, if it has one.
    transposed: Option<String>,
    /// The safetensors name of the element type.
    dtype: &'static str,
    shape: Vec<u64>,
    bytes: u64,
    sources: Vec<SourceSummary>,
    /// The indices of dimension 0 that are zero.
    zeros: Range<u64>,
}

/// The part of a stored tensor that a tensor is made of.
struct SourceSummary {
    name: String,
    file: String,
    dtype: &'static str,
    shape: Vec<u64>,
    /// The dimension that is cut, and what is held of it.
    cut: Option<(usize, Vec<Range<u64>>)>,
}

impl ModelPlan {
    /// `nodes` have the same models, each with the members of one node.
    pub fn new(nodes: &[Vec<Model>]) -> Result<ModelPlan, CliError> {
        let mut plan = ModelPlan {
            ranks: Vec::new(),
            read: 0,
            left_out: 0,
        };
        let roles = nodes.first().map_or(0, Vec::len);
        for role in 0..roles {
            let of_role = nodes.iter().filter_map(|models| models.get(role));
            plan.add(of_role.collect())?;
        }
        Ok(plan)
    }

    /// Adds one role.
    fn add(&mut self, nodes: Vec<&Model>) -> Result<(), CliError> {
        let Some(&first) = nodes.first() else {
            return Ok(());
        };
        let checkpoint = first.open()?;
        // Everything that a load checks before it reads.
        let sharding = first.sharding(&checkpoint)?;
        for model in nodes {
            let plan = model.plan(&sharding)?;
            if let Some((_, rank)) = model.members.first() {
                model.key(&checkpoint, &checkpoint.identity(), rank)?;
            }
            self.read += plan
                .read()
                .chunks(1 << 20, 0)
                .map(|chunk| chunk.bytes)
                .sum::<u64>();
            for ((_, rank), planned) in model.members.iter().zip(plan.ranks()) {
                let coordinates = Rank::of(&rank.placement);
                let tensor = |held: Held<'_>| TensorSummary::new(&checkpoint, &held);
                self.ranks.push(RankSummary {
                    role: model.role,
                    placement: rank.placement,
                    region_bytes: planned.region_bytes,
                    tensors: sharding.held(coordinates).map(tensor).collect(),
                    aliases: sharding.aliases(coordinates).collect(),
                });
            }
        }
        // An MTP draft holds what its target leaves out.
        let is_mtp = first.keys.sharding.part == ModelPart::Draft(Draft::Mtp);
        self.left_out = match first.role {
            Role::Target => sharding.left_out(),
            Role::Draft if is_mtp => 0,
            Role::Draft => self.left_out,
        };
        Ok(())
    }

    /// Prints a line for each tensor of each rank, and the totals.
    pub fn say(&self) -> Result<(), CliError> {
        for rank in &self.ranks {
            let p = rank.placement;
            let draft = match rank.role {
                Role::Target => "",
                Role::Draft => "draft of ",
            };
            say(format_args!(
                "\n{draft}rank {} (dp {} pp {} tp {}): {} tensors, {} aliases, {} bytes",
                p.global_rank,
                p.dp_rank,
                p.pp_rank,
                p.tp_rank,
                rank.tensors.len(),
                rank.aliases.len(),
                rank.bytes()
            ))?;
            for tensor in &rank.tensors {
                say(format_args!("  {}", short(&tensor.to_string(), LINE)))?;
            }
            for (alias, of) in &rank.aliases {
                say(format_args!("  {} is {}", short(alias, LINE), short(of, LINE)))?;
            }
        }
        let totals = self.totals();
        say(format_args!(
            "\ntotal: {} bytes held by {} ranks, {} bytes read; the largest rank has {} bytes, the smallest {}: \
             imbalance {:.2} %",
            totals.bytes,
            totals.ranks,
            self.read,
            totals.largest,
            totals.smallest,
            100.0 * totals.imbalance
        ))?;
        if self.left_out > 0 {
            say(format_args!(
                "left out: {} tensors of layers beyond num_hidden_layers, which predict further tokens",
                self.left_out
            ))?;
        }
        Ok(())
    }

    pub fn ranks_json(&self) -> Vec<Value> {
        self.ranks.iter().map(RankSummary::json).collect()
    }

    pub fn totals_json(&self) -> Value {
        let totals = self.totals();
        json!({
            "bytes": totals.bytes,
            "read_bytes": self.read,
            "largest": totals.largest,
            "smallest": totals.smallest,
            "imbalance": totals.imbalance,
            "left_out": self.left_out,
        })
    }

    fn totals(&self) -> Totals {
        // A rank's target and draft are on one device.
        let mut ranks: BTreeMap<u32, u64> = BTreeMap::new();
        for rank in &self.ranks {
            *ranks.entry(rank.placement.global_rank).or_default() += rank.bytes();
        }
        let bytes: u64 = ranks.values().sum();
        let largest = ranks.values().copied().max().unwrap_or(0);
        let mean = bytes as f64 / ranks.len().max(1) as f64;
        Totals {
            ranks: ranks.len(),
            bytes,
            largest,
            smallest: ranks.values().copied().min().unwrap_or(0),
            imbalance: if mean > 0.0 {
                largest as f64 / mean - 1.0
            } else {
                0.0
            },
        }
    }
}

struct Totals {
    ranks: usize,
    bytes: u64,
    largest: u64,
    smallest: u64,
    /// By how much the largest rank exceeds the mean, as a share of it.
    imbalance: f64,
}

impl RankSummary {
    fn bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes).sum()
    }

    fn json(&self) -> Value {
        let p = self.placement;
        let aliases = self
            .aliases
            .iter()
            .map(|(alias, of)| json!({ "name": alias, "of": of }));
        json!({
            "role": self.role.name(),
            "local_rank": p.local_rank,
            "global_rank": p.global_rank,
            "dp_rank": p.dp_rank,
            "pp_rank": p.pp_rank,
            "tp_rank": p.tp_rank,
            "bytes": self.bytes(),
            "region_bytes": self.region_bytes,
            "tensors": self.tensors.iter().map(TensorSummary::json).collect::<Vec<_>>(),
            "aliases": aliases.collect::<Vec<_>>(),
        })
    }
}

impl TensorSummary {
    fn new(checkpoint: &Checkpoint, held: &Held<'_>) -> TensorSummary {
        let source = |part: &HeldPart<'_>| SourceSummary {
            name: part.name.to_owned(),
            file: checkpoint.files()[part.stored.file].name.clone(),
            dtype: part.stored.dtype.name(),
            shape: part.stored.shape.clone(),
            cut: part.shard.cut().map(|(dim, ranges)| (dim, ranges.to_vec())),
        };
        TensorSummary {
            name: held.name.to_owned(),
            transposed: held.transposed.map(str::to_owned),
            dtype: held.dtype.name(),
            shape: held.shape.clone(),
            bytes: held.bytes().unwrap_or(0),
            sources: held.parts.iter().map(source).collect(),
            zeros: held.zeros.clone(),
        }
    }

    fn json(&self) -> Value {
        json!({
            "name": self.name,
            "transposed": self.transposed,
            "dtype": self.dtype,
            "shape": self.shape,
            "bytes": self.bytes,
            "zero_rows": [self.zeros.start, self.zeros.end],
            "sources": self.sources.iter().map(SourceSummary::json).collect::<Vec<_>>(),
        })
    }
}

impl std::fmt::Display for TensorSummary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} {} {:?} {} bytes:",
            self.name, self.dtype, self.shape, self.bytes
        )?;
        for (number, source) in self.sources.iter().enumerate() {
            write!(f, "{} {}", if number > 0 { "," } else { "" }, source.part())?;
            if source.name != self.name {
                write!(f, " of {}", source.name)?;
            }
            if source.dtype != self.dtype {
                write!(f, " (cast from {})", source.dtype)?;
            }
        }
        if !self.zeros.is_empty() {
            write!(f, "{} zeros", if self.sources.is_empty() { "" } else { "," })?;
        }
        if let Some(name) = &self.transposed {
            write!(f, "; transposed as {name}")?;
        }
        Ok(())
    }
}

impl SourceSummary {
    /// For a person: `all`, or `0..64, 512..576 of dimension 0`.
    fn part(&self) -> String {
        match &self.cut {
            None => "all".to_owned(),
            Some((dim, ranges)) => {
                let ranges: Vec<String> = ranges.iter().map(|range| format!("{range:?}")).collect();
                format!("{} of dimension {dim} of {:?}", ranges.join(", "), self.shape)
            }
        }
    }

    fn json(&self) -> Value {
        let cut = self.cut.as_ref().map(|(dim, ranges)| {
            let ranges = ranges.iter().map(|range| json!([range.start, range.end]));
            json!({ "dim": dim, "ranges": ranges.collect::<Vec<_>>() })
        });
        json!({
            "name": self.name,
            "file": self.file,
            "dtype": self.dtype,
            "shape": self.shape,
            "part": cut,
        })
    }
}
