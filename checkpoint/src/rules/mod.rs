//! Sharding rules: which part of which stored tensor a rank holds, and by which names.
//!
//! Sharding is data. A table lists, for each architecture, name patterns and what becomes of the
//! tensors they cover, in the terms of the tensor parallel plans of Hugging Face transformers. A
//! pattern names a module; `*` stands for one number; it covers the module's own tensors
//! (`model.layers.*.mlp.up_proj` covers `model.layers.7.mlp.up_proj.weight` and `.bias`).
//!
//! With tensor parallel size 1 every tensor is whole and no table is asked, so that any
//! architecture, quantized or not, is served as it is stored.

mod error;
mod pattern;
mod tables;

pub use error::RuleError;

use crate::{Checkpoint, ModelConfig, Shard, StoredTensor};
use tables::{TABLES, Table};
use weightd_core::content::manifest::TensorKind;
use weightd_core::plan::placement::Parallel;

/// What tensor parallelism does to a tensor of `[out, in]` elements, or to a bias of `[out]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Dimension 0 in equal parts (`colwise`): a linear layer's outputs.
    Column,
    /// Dimension 0 in equal parts of whole query heads.
    QueryColumn,
    /// Dimension 0 in equal parts of whole key and value heads. With more ranks than heads each
    /// head is on several ranks: rank r holds head `r * heads / tp`, rounded down.
    KvColumn,
    /// Dimension 1 in equal parts (`rowwise`): a linear layer's inputs. The bias is added once, to
    /// the sum over the ranks, so every rank holds all of it.
    Row,
    /// Dimension 0 in parts of `size / tp` rows, rounded up (`embedding_rowwise`); the last rank
    /// has what remains.
    Vocabulary,
    /// Whole on every rank.
    Replicated,
}

/// The names by which transformers ties the output head to the embedding.
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// How many tensors an error lists by name.
const LISTED: usize = 5;

/// The rules of a checkpoint, applied: what every rank holds. Everything was checked, so giving a
/// rank its part cannot fail.
#[derive(Debug)]
pub struct Sharding<'a> {
    tensors: Vec<RuledTensor<'a>>,
    aliases: Vec<(&'static str, &'static str)>,
}

/// A stored tensor, and how it is split.
#[derive(Debug)]
pub struct RuledTensor<'a> {
    /// Its name in the checkpoint, and in the manifest.
    pub name: &'a str,
    /// Where it is stored.
    pub stored: &'a StoredTensor,
    /// Parameter, or one of the buffers that are known by name.
    pub kind: TensorKind,
    split: Split,
}

/// Equal parts of a dimension, each held by `copies` consecutive ranks.
#[derive(Clone, Copy, Debug)]
enum Split {
    Whole,
    Parts { dim: usize, per_rank: u64, copies: u32 },
}

impl<'a> Sharding<'a> {
    /// Applies the rules to all tensors of `checkpoint`, and checks them for every rank of the
    /// world.
    ///
    /// Where the configuration ties the head to the embedding, the head is an alias, whether the
    /// checkpoint has it or not; should their bytes differ, the embedding's count, as they do in
    /// transformers.
    pub fn new(checkpoint: &'a Checkpoint, parallel: &Parallel) -> Result<Sharding<'a>, RuleError> {
        if parallel.pipeline != 1 {
            return Err(RuleError::Pipeline {
                pp: parallel.pipeline,
            });
        }
        let config = checkpoint.config();
        let table = table(config);
        let world = match parallel.tensor {
            1 => None,
            tp => Some(World::new(config, table, tp)?),
        };
        let aliases: Vec<_> = tied(checkpoint, table)?.into_iter().collect();
        let mut tensors = Vec::with_capacity(checkpoint.tensors().len());
        let mut uncovered = Vec::new();
        for (name, stored) in checkpoint.tensors() {
            if aliases.iter().any(|(alias, _)| alias == name) {
                continue;
            }
            let split = match &world {
                None => Split::Whole,
                Some(world) => match world.rule(name) {
                    Some(rule) => world.split(rule, name, stored)?,
                    None => {
                        uncovered.push(name.clone());
                        continue;
                    }
                },
            };
            tensors.push(RuledTensor {
                name,
                stored,
                kind: kind(name),
                split,
            });
        }
        if let Some(world) = world.filter(|_| !uncovered.is_empty()) {
            let more = uncovered.len().saturating_sub(LISTED);
            uncovered.truncate(LISTED);
            let architecture = world.table.architecture.to_owned();
            return Err(RuleError::Uncovered {
                architecture,
                tensors: uncovered,
                more,
            });
        }
        tensors.sort_by_key(|tensor| (tensor.stored.file, tensor.stored.offset, tensor.stored.bytes));
        Ok(Sharding { tensors, aliases })
    }

    /// What the ranks hold parts of, in the order in which it is stored.
    pub fn tensors(&self) -> &[RuledTensor<'a>] {
        &self.tensors
    }

    /// Further names, each with the tensor that it stands for.
    pub fn aliases(&self) -> &[(&'static str, &'static str)] {
        &self.aliases
    }
}

impl RuledTensor<'_> {
    /// The part that a tensor parallel rank holds.
    pub fn shard(&self, tp_rank: u32) -> Shard {
        match self.split {
            Split::Whole => Shard::whole(&self.stored.shape),
            Split::Parts {
                dim,
                per_rank,
                copies,
            } => {
                let size = self.stored.shape[dim];
                let start = u64::from(tp_rank / copies) * per_rank;
                let range = start.min(size)..(start + per_rank).min(size);
                Shard::along(&self.stored.shape, dim, vec![range])
            }
        }
    }
}

/// What splitting needs to know beside the tensor: there is more than one rank.
struct World {
    table: &'static Table,
    tp: u32,
    heads: u64,
    kv_heads: u64,
    /// Elements of a head, where the configuration says it.
    head_dim: Option<u64>,
}

impl World {
    fn new(config: &ModelConfig, table: Option<&'static Table>, tp: u32) -> Result<World, RuleError> {
        if config.quantization_config.is_some() {
            let method = config.quant_method().unwrap_or("an unnamed method").to_owned();
            return Err(RuleError::Quantized { method, tp });
        }
        let table = table.ok_or_else(|| RuleError::UnknownArchitecture {
            architecture: config.architectures.join(","),
            tp,
            known: TABLES
                .iter()
                .map(|table| table.architecture)
                .collect::<Vec<_>>()
                .join(", "),
        })?;
        let lacks = |field| RuleError::ConfigLacks { field, tp };
        let heads = config.num_attention_heads.ok_or(lacks("num_attention_heads"))?;
        let kv_heads = config.num_key_value_heads.ok_or(lacks("num_key_value_heads"))?;
        let size = u64::from(tp);
        if heads == 0 || !heads.is_multiple_of(size) {
            return Err(RuleError::Heads { tp, heads });
        }
        if kv_heads == 0 || !(kv_heads.is_multiple_of(size) || size.is_multiple_of(kv_heads)) {
            return Err(RuleError::KvHeads { tp, heads: kv_heads });
        }
        Ok(World {
            table,
            tp,
            heads,
            kv_heads,
            head_dim: config.head_dim,
        })
    }

    fn rule(&self, tensor: &str) -> Option<Rule> {
        let mut rules = self.table.rules.iter().copied().flatten();
        rules
            .find(|(pattern, _)| pattern::covers(pattern, tensor))
            .map(|&(_, rule)| rule)
    }

    fn split(&self, rule: Rule, name: &str, stored: &StoredTensor) -> Result<Split, RuleError> {
        let tp = u64::from(self.tp);
        let split = match rule {
            Rule::Replicated => Split::Whole,
            Rule::Row if stored.shape.len() == 1 => Split::Whole,
            Rule::Row => equal(name, stored, 1, tp, "ranks", 1)?,
            Rule::Column => equal(name, stored, 0, tp, "ranks", 1)?,
            Rule::QueryColumn => {
                self.whole_heads(name, stored, self.heads, "attention heads")?;
                equal(name, stored, 0, tp, "ranks", 1)?
            }
            Rule::KvColumn => {
                self.whole_heads(name, stored, self.kv_heads, "key and value heads")?;
                // Either divides the other: checked when the world was made.
                let copies = tp / self.kv_heads.min(tp);
                equal(name, stored, 0, tp / copies, "ranks", copies as u32)?
            }
            Rule::Vocabulary => {
                let size = size(name, stored, 0)?;
                let per_rank = size.div_ceil(tp);
                if per_rank.saturating_mul(tp - 1) >= size {
                    let (tensor, tp) = (name.to_owned(), self.tp);
                    return Err(RuleError::EmptyVocabulary {
                        tensor,
                        size,
                        tp,
                        per_rank,
                    });
                }
                Split::Parts {
                    dim: 0,
                    per_rank,
                    copies: 1,
                }
            }
        };
        if let Split::Parts { dim, per_rank, .. } = split {
            // Ranks differ in nothing else, so the first tells for all.
            let range = 0..per_rank;
            let first = Shard::along(&stored.shape, dim, vec![range]);
            if first.pieces(stored.dtype).is_none() {
                let (tensor, shape) = (name.to_owned(), stored.shape.clone());
                return Err(RuleError::CutsByte {
                    tensor,
                    shape,
                    dtype: stored.dtype,
                });
            }
        }
        Ok(split)
    }
}

impl World {
    /// Checks the tensor against what the configuration says of its heads: a wrong number would cut
    /// through a head without anything else to show for it.
    fn whole_heads(
        &self,
        name: &str,
        stored: &StoredTensor,
        heads: u64,
        of: &'static str,
    ) -> Result<(), RuleError> {
        equal(name, stored, 0, heads, of, 1)?;
        let size = size(name, stored, 0)?;
        match self.head_dim {
            Some(head_dim) if heads.checked_mul(head_dim) != Some(size) => Err(RuleError::HeadSize {
                tensor: name.to_owned(),
                size,
                heads,
                of,
                head_dim,
            }),
            _ => Ok(()),
        }
    }
}

fn equal(
    name: &str,
    stored: &StoredTensor,
    dim: usize,
    parts: u64,
    of: &'static str,
    copies: u32,
) -> Result<Split, RuleError> {
    let size = size(name, stored, dim)?;
    if !size.is_multiple_of(parts) {
        return Err(RuleError::Indivisible {
            tensor: name.to_owned(),
            dim,
            size,
            parts,
            of,
        });
    }
    Ok(Split::Parts {
        dim,
        per_rank: size / parts,
        copies,
    })
}

fn size(name: &str, stored: &StoredTensor, dim: usize) -> Result<u64, RuleError> {
    let lacks = || RuleError::NoDimension {
        tensor: name.to_owned(),
        shape: stored.shape.clone(),
        dim,
    };
    stored.shape.get(dim).copied().ok_or_else(lacks)
}

fn table(config: &ModelConfig) -> Option<&'static Table> {
    match config.architectures.as_slice() {
        [one] => TABLES.iter().find(|table| table.architecture == one),
        _ => None,
    }
}

/// The name that is only an alias because embedding and head are tied, and what it stands for.
fn tied(
    checkpoint: &Checkpoint,
    table: Option<&Table>,
) -> Result<Option<(&'static str, &'static str)>, RuleError> {
    let (embedding, head) = (
        checkpoint.tensors().get(EMBEDDING),
        checkpoint.tensors().get(HEAD),
    );
    // A model for classification, reward or embedding has no such head at all, whatever its
    // configuration inherits.
    let generates = checkpoint
        .config()
        .architectures
        .iter()
        .any(|name| name.ends_with("ForCausalLM"));
    // An architecture whose default is not known is taken to be tied if it has no head of its own.
    let default = table.map_or(head.is_none(), |table| table.tied_by_default);
    let tied = checkpoint.config().tie_word_embeddings.unwrap_or(default);
    if !tied || (head.is_none() && !generates) {
        return Ok(None);
    }
    match (embedding, head) {
        (Some(embedding), Some(head)) if embedding.shape != head.shape || embedding.dtype != head.dtype => {
            Err(RuleError::TiedApart {
                head: HEAD,
                embedding: EMBEDDING,
                head_shape: head.shape.clone(),
                embedding_shape: embedding.shape.clone(),
            })
        }
        (Some(_), _) => Ok(Some((HEAD, EMBEDDING))),
        (None, Some(_)) => Ok(Some((EMBEDDING, HEAD))),
        (None, None) => Ok(None),
    }
}

/// State that models register as buffers, by the ends of its names.
fn kind(name: &str) -> TensorKind {
    const BUFFERS: &[&str] = &[
        "rotary_emb.inv_freq",
        "rotary_emb.cos_cached",
        "rotary_emb.sin_cached",
        "embeddings.position_ids",
    ];
    let ends = |buffer: &&str| {
        let before = name.strip_suffix(*buffer);
        before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
    };
    if BUFFERS.iter().any(ends) {
        TensorKind::Buffer
    } else {
        TensorKind::Parameter
    }
}
