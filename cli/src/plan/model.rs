//! What the ranks of a node would hold of a model.

use crate::error::CliError;
use crate::node::{self, LocalRank};
use crate::output::say;
use serde_json::{Value, json};
use std::ops::Range;
use std::path::Path;
use weightd_checkpoint::{Checkpoint, Held, HeldPart, Rank, Sharding, ShardingOptions};
use weightd_core::plan::placement::Placement;

/// A plan, worked out from headers alone, in a form to be printed.
pub struct ModelPlan {
    ranks: Vec<RankSummary>,
    /// What is read of the files, in bytes.
    read: u64,
    /// Tensors of layers that the model itself does not have.
    left_out: usize,
}

struct RankSummary {
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
    pub fn new(model: &Path, options: &ShardingOptions, ranks: &[LocalRank]) -> Result<ModelPlan, CliError> {
        let checkpoint = Checkpoint::open(model).map_err(CliError::failure)?;
        // Everything that a load checks before it reads.
        let plan = node::plan(&checkpoint, options, ranks)?;
        let sharding = Sharding::new(&checkpoint, options).map_err(CliError::failure)?;
        let summary = |rank: &weightd_checkpoint::RankPlan| {
            let coordinates = Rank::of(&rank.placement);
            let tensor = |held: Held<'_>| TensorSummary::new(&checkpoint, &held);
            RankSummary {
                placement: rank.placement,
                region_bytes: rank.region_bytes,
                tensors: sharding.held(coordinates).map(tensor).collect(),
                aliases: sharding.aliases(coordinates).collect(),
            }
        };
        Ok(ModelPlan {
            ranks: plan.ranks().iter().map(summary).collect(),
            read: plan.read().chunks(1 << 20, 0).map(|chunk| chunk.bytes).sum(),
            left_out: sharding.left_out(),
        })
    }

    /// Prints a line for each tensor of each rank, and the totals.
    pub fn say(&self) -> Result<(), CliError> {
        for rank in &self.ranks {
            let p = rank.placement;
            say(format_args!(
                "\nrank {} (dp {} pp {} tp {}): {} tensors, {} aliases, {} bytes",
                p.global_rank,
                p.dp_rank,
                p.pp_rank,
                p.tp_rank,
                rank.tensors.len(),
                rank.aliases.len(),
                rank.bytes()
            ))?;
            for tensor in &rank.tensors {
                say(format_args!("  {tensor}"))?;
            }
            for (alias, of) in &rank.aliases {
                say(format_args!("  {alias} is {of}"))?;
            }
        }
        let totals = self.totals();
        say(format_args!(
            "\ntotal: {} bytes held by {} ranks, {} bytes read; the largest rank has {} bytes, the smallest {}: \
             imbalance {:.2} %",
            totals.bytes,
            self.ranks.len(),
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
        let bytes = || self.ranks.iter().map(RankSummary::bytes);
        let (all, largest, smallest) = (
            bytes().sum::<u64>(),
            bytes().max().unwrap_or(0),
            bytes().min().unwrap_or(0),
        );
        let mean = all as f64 / self.ranks.len().max(1) as f64;
        Totals {
            bytes: all,
            largest,
            smallest,
            imbalance: if mean > 0.0 {
                largest as f64 / mean - 1.0
            } else {
                0.0
            },
        }
    }
}

struct Totals {
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
