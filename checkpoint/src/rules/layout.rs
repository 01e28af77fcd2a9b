//! Layouts: which stored tensors make up which held ones, and by which names and types.

use super::applied::no_layout;
use super::name::{self, Expert};
use super::stage::Stage;
use super::tables::{ExpertNames, Fused, Stacked, Table, Vllm};
use super::{Layout, RuleError, RuledTensor, ShardingOptions, split};
use crate::{ModelConfig, StoredTensor};
use std::borrow::Cow;
use std::collections::HashMap;
use weightd_core::content::Dtype;
use weightd_core::plan::cast::Cast;

/// A held tensor, before it is known by which rank.
#[derive(Debug)]
pub(super) struct Slot<'a> {
    pub name: Cow<'a, str>,
    pub dtype: Dtype,
    pub stage: Stage,
    /// How many experts it has parts of, or is itself one of.
    pub experts: Option<u64>,
    /// Whether it has all of a rank's experts along dimension 0.
    pub stacked: bool,
    /// In order: by expert, then as they are fused.
    pub parts: Vec<SlotPart>,
    /// The dimension of the parts along which they are fused.
    pub dim: usize,
    /// The rows of all ranks together, where they are more than are stored.
    pub padded: Option<u64>,
    /// Its name with the last two dimensions swapped, where it has one.
    pub transposed: Option<String>,
    /// Whether it is zero on all ranks but the first of those that share its expert's slices.
    pub on_first_rank: bool,
}

/// A stored tensor in a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotPart {
    pub expert: Option<u64>,
    /// Its number among the ruled tensors.
    pub tensor: usize,
}

/// The slots of a layout, in the order in which their first parts are stored.
pub(super) fn slots<'a>(
    tensors: &[RuledTensor<'a>],
    config: &ModelConfig,
    table: Option<&'static Table>,
    options: &ShardingOptions,
) -> Result<Vec<Slot<'a>>, RuleError> {
    let experts = expert_counts(tensors);
    let as_stored = |number: usize, dtype: Dtype| {
        let tensor = &tensors[number];
        let (expert, experts) = match tensor.expert {
            Some(Expert::One(expert)) => (Some(expert), Some(experts[&tensor.layer])),
            Some(Expert::Stacked) | None => (None, None),
        };
        Slot {
            name: Cow::Borrowed(tensor.name),
            dtype,
            stage: tensor.stage,
            experts,
            stacked: false,
            parts: vec![SlotPart {
                expert,
                tensor: number,
            }],
            dim: 0,
            padded: None,
            transposed: None,
            on_first_rank: false,
        }
    };
    match options.layout {
        Layout::Checkpoint => {
            let to = options.dtype.dtype();
            let slot = |number: usize| as_stored(number, cast(&tensors[number], to));
            Ok((0..tensors.len()).map(slot).collect())
        }
        Layout::Vllm => {
            let vllm = table
                .and_then(|table| table.vllm)
                .ok_or_else(|| no_layout(config))?;
            let to = options.dtype.dtype().or_else(|| vllm_dtype(config));
            let mut fusing = Fusing::new(tensors, vllm);
            for (number, tensor) in tensors.iter().enumerate() {
                let always = vllm
                    .float32
                    .iter()
                    .any(|pattern| name::covers(pattern, tensor.name));
                let to = if always { Some(Dtype::F32) } else { to };
                fusing.add(as_stored(number, cast(tensor, to)))?;
            }
            fusing.finish()
        }
    }
}

/// How many experts each layer has, where they are stored one by one.
fn expert_counts(tensors: &[RuledTensor<'_>]) -> HashMap<Option<u64>, u64> {
    let mut counts = HashMap::new();
    for tensor in tensors {
        if let Some(Expert::One(expert)) = tensor.expert {
            let count = counts.entry(tensor.layer).or_insert(0);
            *count = expert.saturating_add(1).max(*count);
        }
    }
    counts
}

/// The type that a tensor's elements become.
fn cast(tensor: &RuledTensor<'_>, to: Option<Dtype>) -> Dtype {
    let stored = tensor.stored.dtype;
    to.filter(|&to| tensor.castable && Cast::new(stored, to).is_some())
        .unwrap_or(stored)
}

/// What vLLM takes for `auto`: the configuration's type, and bfloat16 for float32.
fn vllm_dtype(config: &ModelConfig) -> Option<Dtype> {
    match config.dtype.as_deref()? {
        "bfloat16" | "float32" => Some(Dtype::BF16),
        "float16" => Some(Dtype::F16),
        _ => None,
    }
}

/// The rows of a vocabulary in vLLM, over all ranks.
pub(super) fn padded_vocabulary(stored: &StoredTensor) -> u64 {
    const MULTIPLE: u64 = 64;
    let rows = stored
        .shape
        .get(split::outputs(&stored.shape))
        .copied()
        .unwrap_or(0);
    rows.checked_next_multiple_of(MULTIPLE).unwrap_or(rows)
}

/// Slots of vLLM's layout in the making.
struct Fusing<'t, 'a> {
    tensors: &'t [RuledTensor<'a>],
    vllm: &'static Vllm,
    by_name: HashMap<&'a str, usize>,
    slots: Vec<FusedSlot<'a>>,
    /// The number of each slot, by its name.
    numbers: HashMap<String, usize>,
}

struct FusedSlot<'a> {
    slot: Slot<'a>,
    /// The place of each part among those of its expert, or of the module.
    places: Vec<usize>,
    /// By those places, the last part of the modules' names.
    of: &'static [&'static str],
}

/// The parts of what is not fused.
const ALONE: &[&str] = &[""];

/// Where a stored tensor goes.
struct Target {
    name: String,
    /// Its place in what is fused.
    place: usize,
    of: &'static [&'static str],
    stacked: bool,
}

impl<'t, 'a> Fusing<'t, 'a> {
    fn new(tensors: &'t [RuledTensor<'a>], vllm: &'static Vllm) -> Fusing<'t, 'a> {
        let by_name = tensors
            .iter()
            .enumerate()
            .map(|(number, tensor)| (tensor.name, number))
            .collect();
        Fusing {
            tensors,
            vllm,
            by_name,
            slots: Vec::new(),
            numbers: HashMap::new(),
        }
    }

    /// Adds a tensor, given as a slot of its own.
    fn add(&mut self, alone: Slot<'a>) -> Result<(), RuleError> {
        let part = alone.parts[0];
        let tensor = &self.tensors[part.tensor];
        if let Some((name, how)) = self.stacked(tensor) {
            let transposed = how == Stacked::Transposed;
            self.slots.push(FusedSlot {
                slot: Slot {
                    name: if transposed {
                        alone.name
                    } else {
                        Cow::Owned(name.clone())
                    },
                    transposed: transposed.then_some(name),
                    on_first_rank: how == Stacked::OnFirstRank,
                    ..alone
                },
                places: vec![0],
                of: ALONE,
            });
            return Ok(());
        }
        let Target {
            name,
            place,
            of,
            stacked,
        } = self.target(tensor);
        match self.numbers.get(&name) {
            Some(&number) => {
                let fused = &mut self.slots[number];
                // One is all of it, and the other a part.
                if fused.of != of {
                    let first = &self.tensors[fused.slot.parts[0].tensor];
                    return Err(stored_twice(&fused.slot, first, tensor));
                }
                fused.slot.parts.push(part);
                fused.places.push(place);
            }
            None => {
                self.numbers.insert(name.clone(), self.slots.len());
                let name = if name == tensor.name {
                    alone.name
                } else {
                    Cow::Owned(name)
                };
                let dim = split::outputs(&tensor.stored.shape);
                let slot = Slot {
                    name,
                    stacked,
                    dim,
                    padded: tensor.padded,
                    ..alone
                };
                self.slots.push(FusedSlot {
                    slot,
                    places: vec![place],
                    of,
                });
            }
        }
        Ok(())
    }

    /// What becomes of a tensor of all experts, and its name.
    fn stacked(&self, tensor: &RuledTensor<'_>) -> Option<(String, Stacked)> {
        let (experts, last) = tensor.name.rsplit_once('.')?;
        let names = self
            .vllm
            .stacked
            .iter()
            .filter(|_| tensor.expert == Some(Expert::Stacked));
        let found = names.copied().find(|name| name.stored == last)?;
        Some((format!("{experts}.routed_experts.{}", found.held), found.how))
    }

    fn target(&self, tensor: &RuledTensor<'_>) -> Target {
        let (module, field) = tensor.name.rsplit_once('.').unwrap_or(("", tensor.name));
        let (parent, last) = module.rsplit_once('.').unwrap_or(("", module));
        let target = |name: String, place, of, stacked| {
            let rename = |name: String, (from, to): &(&str, &str)| name.replace(from, to);
            let name = self.vllm.renamed.iter().fold(name, rename);
            Target {
                name,
                place,
                of,
                stacked,
            }
        };
        if let (Some(Expert::One(_)), Some(ExpertNames { fused, down })) = (tensor.expert, &self.vllm.experts)
        {
            let experts = parent.rsplit_once('.').map_or(parent, |(experts, _)| experts);
            if let Some(place) = fused.iter().position(|part| *part == last) {
                return target(
                    format!("{experts}.routed_experts.w13_{field}"),
                    place,
                    fused,
                    true,
                );
            }
            if down.contains(&last) {
                return target(format!("{experts}.routed_experts.w2_{field}"), 0, down, true);
            }
        }
        for &Fused {
            into,
            parts,
            if_first,
        } in self.vllm.fused
        {
            let Some(place) = parts.iter().position(|part| *part == last) else {
                continue;
            };
            let sibling = |part: &str| format!("{parent}.{part}.{field}");
            if !if_first || self.by_name.contains_key(sibling(parts[0]).as_str()) {
                return target(sibling(into), place, parts, false);
            }
        }
        target(tensor.name.to_owned(), 0, ALONE, false)
    }

    /// Puts parts in order, and checks that they are all there and fit together.
    fn finish(mut self) -> Result<Vec<Slot<'a>>, RuleError> {
        let slots = std::mem::take(&mut self.slots);
        slots.into_iter().map(|fused| self.whole(fused)).collect()
    }

    fn whole(&self, FusedSlot { mut slot, places, of }: FusedSlot<'a>) -> Result<Slot<'a>, RuleError> {
        let mut parts: Vec<_> = slot.parts.iter().copied().zip(places).collect();
        let place_of = |(part, place): &(SlotPart, usize)| (part.expert, *place);
        parts.sort_by_key(place_of);
        let tensor = |(part, _): &(SlotPart, usize)| &self.tensors[part.tensor];
        let twice = |pair: &&[_]| place_of(&pair[0]) == place_of(&pair[1]);
        if let Some([first, second]) = parts.windows(2).find(twice) {
            return Err(stored_twice(&slot, tensor(first), tensor(second)));
        }
        // A place for every part of every expert, in this order.
        let experts = slot.experts.unwrap_or(1);
        let expected = (0..experts).flat_map(|expert| (0..of.len()).map(move |place| (expert, place)));
        let mut found = parts
            .iter()
            .map(|(part, place)| (part.expert.unwrap_or(0), *place));
        for (expert, place) in expected {
            if found.next() != Some((expert, place)) {
                let part = match slot.experts {
                    Some(_) => format!("{} of expert {expert}", of[place]),
                    None => of[place].to_owned(),
                };
                return Err(RuleError::PartMissing {
                    fused: slot.name.into_owned(),
                    part,
                });
            }
        }
        let first = tensor(&parts[0]);
        // What is one number for a module is not made of its parts' numbers.
        let is_scalar = of.len() > 1 && slot.dim >= first.stored.shape.len();
        for (number, other) in parts.iter().enumerate() {
            let other = tensor(other);
            let same_place = tensor(&parts[number % of.len()]);
            if is_scalar
                || other.stored.dtype != first.stored.dtype
                || other.stored.shape != same_place.stored.shape
                || !fits(&other.stored.shape, &first.stored.shape, slot.dim)
            {
                return Err(RuleError::PartsDiffer {
                    fused: slot.name.into_owned(),
                    first: first.describe(),
                    second: other.describe(),
                });
            }
        }
        slot.parts = parts.into_iter().map(|(part, _)| part).collect();
        Ok(slot)
    }
}

fn stored_twice(slot: &Slot<'_>, first: &RuledTensor<'_>, second: &RuledTensor<'_>) -> RuleError {
    RuleError::StoredTwice {
        fused: slot.name.clone().into_owned(),
        first: first.name.to_owned(),
        second: second.name.to_owned(),
    }
}

/// Whether tensors of these shapes can be put together along a dimension.
fn fits(a: &[u64], b: &[u64], dim: usize) -> bool {
    let others = |shape: &[u64]| {
        let kept = shape.iter().enumerate().filter(|(at, _)| *at != dim);
        kept.map(|(_, size)| *size).collect::<Vec<_>>()
    };
    others(a) == others(b)
}
