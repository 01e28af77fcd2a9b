//! Rules applied to sizes: which part of a dimension each rank holds.

use super::name::Expert;
use super::quantization::{Dimension, Dimensions, Quantization, Unit};
use super::{Rank, Rule, RuleError, name};
use crate::{ModelConfig, Shard, StoredTensor};
use std::ops::Range;
use weightd_core::plan::experts::LocalExperts;
use weightd_core::plan::placement::Parallel;

/// How a stored tensor is split.
#[derive(Clone, Debug)]
pub(super) struct Split {
    ways: Ways,
    cut: Option<Cut>,
}

/// The ranks that share a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ways {
    /// The tensor parallel ranks of each replica.
    Tensor { tp: u32 },
    /// The tensor parallel ranks of all replicas.
    TensorAndData { tp: u32, dp: u32 },
}

/// Sections of a dimension, each in parts that consecutive ranks hold.
#[derive(Clone, Debug)]
struct Cut {
    dim: usize,
    sections: Vec<Section>,
}

#[derive(Clone, Debug)]
struct Section {
    /// Where it begins.
    start: u64,
    size: u64,
    /// What a rank holds of it, unless it ends before.
    per_rank: u64,
    /// How many consecutive ranks hold the same.
    copies: u64,
}

impl Ways {
    pub fn tensor(parallel: &Parallel) -> Ways {
        Ways::Tensor { tp: parallel.tensor }
    }

    pub fn tensor_and_data(parallel: &Parallel) -> Ways {
        Ways::TensorAndData {
            tp: parallel.tensor,
            dp: parallel.data,
        }
    }

    pub fn count(self) -> u64 {
        match self {
            Ways::Tensor { tp } => tp.into(),
            Ways::TensorAndData { tp, dp } => u64::from(tp) * u64::from(dp),
        }
    }

    fn index(self, rank: Rank) -> u64 {
        match self {
            Ways::Tensor { .. } => rank.tp.into(),
            Ways::TensorAndData { tp, .. } => u64::from(rank.dp) * u64::from(tp) + u64::from(rank.tp),
        }
    }
}

impl Split {
    /// Whole on every rank.
    pub const WHOLE: Split = Split {
        ways: Ways::Tensor { tp: 1 },
        cut: None,
    };

    /// The part that a rank holds.
    pub fn shard(&self, stored: &StoredTensor, rank: Rank) -> Shard {
        match &self.cut {
            None => Shard::whole(&stored.shape),
            Some(cut) => cut.shard(&stored.shape, self.ways.index(rank)),
        }
    }
}

impl Cut {
    fn shard(&self, shape: &[u64], index: u64) -> Shard {
        let range = |section: &Section| -> Range<u64> {
            let from = (index / section.copies * section.per_rank).min(section.size);
            let to = (from + section.per_rank).min(section.size);
            section.start + from..section.start + to
        };
        Shard::along(shape, self.dim, self.sections.iter().map(range).collect())
    }
}

/// The local ones of a tensor that has all experts along dimension 0.
pub(super) fn stacked_experts(shape: &[u64], local: &LocalExperts) -> Shard {
    Shard::along(shape, 0, local.ranges().collect())
}

/// The dimension of a weight's or a bias's outputs.
pub(super) fn outputs(shape: &[u64]) -> usize {
    shape.len().saturating_sub(2)
}

/// Rules, and the sizes that they need.
pub(super) struct Splitter<'a> {
    pub config: &'a ModelConfig,
    pub quantization: Option<&'a Quantization<'a>>,
    pub ways: Ways,
}

const HEADS: &str = "attention heads";
const KV_HEADS: &str = "key and value heads";

impl Splitter<'_> {
    /// How `rule` splits a tensor.
    pub fn split(&self, rule: Rule, name: &str, stored: &StoredTensor) -> Result<Split, RuleError> {
        let ways = self.ways.count();
        if ways == 1 || rule == Rule::Replicated {
            return Ok(Split::WHOLE);
        }
        if let Some(quantization) = self.quantization.filter(|found| !found.is_known(name, stored)) {
            // One for the whole layer, whatever it is.
            if stored.shape.iter().product::<u64>() == 1 {
                return Ok(Split::WHOLE);
            }
            let (tensor, method) = (name.to_owned(), quantization.name.to_owned());
            return Err(RuleError::QuantizedWhole { tensor, method });
        }
        let tensor = Layered::new(name, stored, self.quantization)?;
        let along = match rule {
            Rule::Row | Rule::PackedRow | Rule::UnevenRow(_) => tensor.input(self.quantization)?,
            _ => tensor.out()?,
        };
        let Some(along) = along else {
            return Ok(Split::WHOLE);
        };
        let equal = |size| tensor.equal(size, ways, "ranks", 1);
        let sections = match rule {
            Rule::Column | Rule::Row => tensor.sections(along, 1, equal)?,
            Rule::PackedColumn | Rule::PackedRow => tensor.sections(along, 2, equal)?,
            Rule::HeadColumn => {
                let heads = self.heads()?;
                vec![tensor.of_heads(along.size, heads, HEADS, ways)?]
            }
            Rule::QueryColumn => {
                let heads = self.heads()?;
                self.check_head_dim(&tensor, along, heads, HEADS)?;
                vec![tensor.of_heads(along.size, heads, HEADS, ways)?]
            }
            Rule::KvColumn => {
                let heads = self.kv_heads()?;
                self.check_head_dim(&tensor, along, heads, KV_HEADS)?;
                vec![tensor.of_heads(along.size, heads, KV_HEADS, ways)?]
            }
            Rule::QkvColumn => self.qkv(&tensor, along)?,
            Rule::UnevenColumn(each) | Rule::UnevenRow(each) => {
                let block = self.quantization.map_or(1, Quantization::inputs_of_block);
                vec![tensor.rounded_up(along.size, ways, block.saturating_mul(each))?]
            }
            Rule::Embedding | Rule::Head => vec![tensor.rounded_up(along.size, ways, 1)?],
            Rule::Replicated => unreachable!("it is whole"),
        };
        self.cut(&tensor, along, sections)
    }

    /// Equal parts of a vocabulary of `padded` rows, of which the tensor has the first.
    pub fn padded(&self, name: &str, stored: &StoredTensor, padded: u64) -> Result<Split, RuleError> {
        // One row for each token, or one number.
        if !(1..=2).contains(&stored.shape.len()) {
            return Err(RuleError::NoVocabulary {
                tensor: name.to_owned(),
                shape: stored.shape.to_vec(),
            });
        }
        let tensor = Layered::new(name, stored, self.quantization)?;
        let ways = self.ways.count();
        let Some(along) = tensor.out()? else {
            return Ok(Split::WHOLE);
        };
        if !padded.is_multiple_of(ways) {
            let tensor = name.to_owned();
            return Err(RuleError::PaddedVocabulary {
                tensor,
                padded,
                ranks: ways,
            });
        }
        let section = Section {
            start: 0,
            size: along.size,
            per_rank: padded / ways,
            copies: 1,
        };
        self.cut(&tensor, along, vec![section])
    }

    /// Sections of a layer's dimension, as they are stored.
    fn cut(
        &self,
        tensor: &Layered<'_>,
        along: Dimension,
        sections: Vec<Section>,
    ) -> Result<Split, RuleError> {
        let ways = self.ways.count();
        let stored = |section: Section| self.stored(tensor, along, section);
        let cut = Cut {
            dim: along.dim,
            sections: sections.into_iter().map(stored).collect::<Result<_, _>>()?,
        };
        tensor.check_bytes(&cut, ways)?;
        Ok(Split {
            ways: self.ways,
            cut: Some(cut),
        })
    }

    /// A section of outputs or inputs as a section of the stored dimension: no part may begin or end
    /// inside of what cannot be parted.
    fn stored(&self, tensor: &Layered<'_>, along: Dimension, section: Section) -> Result<Section, RuleError> {
        let Unit { of, stored } = along.unit;
        let Section {
            start,
            size,
            per_rank,
            copies,
        } = section;
        let whole = |at: u64| at.is_multiple_of(of) || at >= along.size;
        if !(whole(start) && whole(start + size) && (per_rank >= size || per_rank.is_multiple_of(of))) {
            return Err(RuleError::CutsUnit {
                tensor: tensor.name.to_owned(),
                method: self
                    .quantization
                    .map_or("", |quantization| quantization.name)
                    .to_owned(),
                unit: of,
                per_rank,
                // Always works; whoever knows all tensors may know better.
                ranks: 1,
            });
        }
        Ok(Section {
            start: start / of * stored,
            size: size.div_ceil(of) * stored,
            per_rank: per_rank.div_ceil(of) * stored,
            copies,
        })
    }

    /// Query, key and value heads one after another, all of one size.
    fn qkv(&self, tensor: &Layered<'_>, along: Dimension) -> Result<Vec<Section>, RuleError> {
        let ways = self.ways.count();
        let (heads, kv_heads) = (self.heads()?, self.kv_heads()?);
        let all = heads + 2 * kv_heads;
        const OF: &str = "query, key and value heads together";
        self.check_head_dim(tensor, along, all, OF)?;
        let head = tensor.equal(along.size, all, OF, 1)?.per_rank;
        let mut start = 0;
        let sections = [(heads, HEADS), (kv_heads, KV_HEADS), (kv_heads, KV_HEADS)];
        sections
            .into_iter()
            .map(|(heads, of)| {
                let section = tensor.of_heads(heads * head, heads, of, ways)?;
                start += section.size;
                Ok(Section {
                    start: start - section.size,
                    ..section
                })
            })
            .collect()
    }

    /// The query heads, which the ranks can share.
    fn heads(&self) -> Result<u64, RuleError> {
        let heads = self.needs("num_attention_heads", self.config.num_attention_heads)?;
        let ranks = self.ways.count();
        match heads.is_multiple_of(ranks) {
            true => Ok(heads),
            false => Err(RuleError::Heads { ranks, heads }),
        }
    }

    /// The key and value heads, which the ranks can share or repeat.
    fn kv_heads(&self) -> Result<u64, RuleError> {
        let heads = self.needs("num_key_value_heads", self.config.num_key_value_heads)?;
        let ranks = self.ways.count();
        match heads.is_multiple_of(ranks) || ranks.is_multiple_of(heads) {
            true => Ok(heads),
            false => Err(RuleError::KvHeads { ranks, heads }),
        }
    }

    fn needs(&self, field: &'static str, number: Option<u64>) -> Result<u64, RuleError> {
        number.ok_or(RuleError::ConfigLacks {
            field,
            what: "tensor parallelism",
        })
    }

    /// Checks the tensor against what the configuration says of its heads: a wrong number would cut
    /// through a head without anything else to show for it. (Some have a row for each head.)
    fn check_head_dim(
        &self,
        tensor: &Layered<'_>,
        along: Dimension,
        heads: u64,
        of: &'static str,
    ) -> Result<(), RuleError> {
        let Some(head_dim) = self.config.head_dim else {
            return Ok(());
        };
        let size = along.size;
        let elements = heads.checked_mul(head_dim);
        if elements == Some(size) || (size == heads && tensor.stored.shape.last() == Some(&head_dim)) {
            return Ok(());
        }
        Err(RuleError::HeadSize {
            tensor: tensor.name.to_owned(),
            size,
            heads,
            of,
            head_dim,
        })
    }
}

/// A tensor and its layer's dimensions, and what can be wrong with their sizes.
struct Layered<'a> {
    name: &'a str,
    stored: &'a StoredTensor,
    /// Of a quantized layer's tensor.
    quantized: Option<Dimensions>,
}

impl<'a> Layered<'a> {
    fn new(
        name: &'a str,
        stored: &'a StoredTensor,
        quantization: Option<&Quantization<'_>>,
    ) -> Result<Layered<'a>, RuleError> {
        let quantized = match quantization {
            None => None,
            Some(quantization) => quantization.dimensions(name, stored)?,
        };
        Ok(Layered {
            name,
            stored,
            quantized,
        })
    }

    /// The outputs; none where the tensor is the same for all of them.
    fn out(&self) -> Result<Option<Dimension>, RuleError> {
        if let Some(Dimensions { out, .. }) = self.quantized {
            return Ok(out);
        }
        let dim = outputs(&self.stored.shape);
        let dim = dim.max(usize::from(self.is_stacked()));
        let lacks = || RuleError::NoDimension {
            tensor: self.name.to_owned(),
            shape: self.stored.shape.clone(),
            dim,
        };
        self.plain(dim).map(Some).ok_or_else(lacks)
    }

    /// The inputs; none where the tensor is the same for all of them.
    fn input(&self, quantization: Option<&Quantization<'_>>) -> Result<Option<Dimension>, RuleError> {
        if let Some(Dimensions { input, .. }) = self.quantized {
            let ordered = quantization.filter(|quantization| {
                input.is_some() && quantization.is_act_ordered(self.name, self.stored)
            });
            return match ordered {
                None => Ok(input),
                Some(Quantization { name, .. }) => Err(RuleError::ActOrder {
                    tensor: self.name.to_owned(),
                    method: (*name).to_owned(),
                }),
            };
        }
        let dims = self.stored.shape.len();
        match dims > 1 + usize::from(self.is_stacked()) {
            true => Ok(self.plain(dims - 1)),
            false => Ok(None),
        }
    }

    fn plain(&self, dim: usize) -> Option<Dimension> {
        let size = *self.stored.shape.get(dim)?;
        let unit = Unit { of: 1, stored: 1 };
        Some(Dimension { dim, size, unit })
    }

    fn is_stacked(&self) -> bool {
        name::expert(self.name) == Some(Expert::Stacked)
    }

    /// `count` equal sections of a dimension, each by `section`.
    fn sections(
        &self,
        along: Dimension,
        count: u64,
        section: impl Fn(u64) -> Result<Section, RuleError>,
    ) -> Result<Vec<Section>, RuleError> {
        let size = self.equal(along.size, count, "projections", 1)?.per_rank;
        let nth = |number| {
            Ok(Section {
                start: number * size,
                ..section(size)?
            })
        };
        (0..count).map(nth).collect()
    }

    /// Equal parts.
    fn equal(&self, size: u64, parts: u64, of: &'static str, copies: u64) -> Result<Section, RuleError> {
        match size.is_multiple_of(parts) {
            true => Ok(Section {
                start: 0,
                size,
                per_rank: size / parts,
                copies,
            }),
            false => Err(RuleError::Indivisible {
                tensor: self.name.to_owned(),
                size,
                parts,
                of,
            }),
        }
    }

    /// Parts of whole heads; a head is on several ranks where there are more of those.
    fn of_heads(&self, size: u64, heads: u64, of: &'static str, ways: u64) -> Result<Section, RuleError> {
        self.equal(size, heads, of, 1)?;
        self.equal(size, heads.min(ways), "ranks", (ways / heads).max(1))
    }

    /// Parts of whole units, rounded up; the last ranks have what remains.
    fn rounded_up(&self, size: u64, ways: u64, unit: u64) -> Result<Section, RuleError> {
        let per_rank = size.div_ceil(unit).div_ceil(ways).saturating_mul(unit);
        if per_rank.saturating_mul(ways - 1) >= size {
            return Err(RuleError::NothingLeft {
                tensor: self.name.to_owned(),
                size,
                ranks: ways,
                per_rank,
            });
        }
        Ok(Section {
            start: 0,
            size,
            per_rank,
            copies: 1,
        })
    }

    /// No rank's part may begin or end inside a byte, where elements are smaller than that.
    fn check_bytes(&self, cut: &Cut, ways: u64) -> Result<(), RuleError> {
        let StoredTensor { dtype, shape, .. } = self.stored;
        let whole = |index: u64| cut.shard(shape, index).pieces(*dtype).is_some();
        match dtype.bits() >= 8 || (0..ways).all(whole) {
            true => Ok(()),
            false => Err(RuleError::CutsByte {
                tensor: self.name.to_owned(),
                shape: shape.clone(),
                dtype: *dtype,
            }),
        }
    }
}
