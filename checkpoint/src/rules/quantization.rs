//! Quantized weights: which dimension of each stored tensor goes along with which of the layer's.
//!
//! A layer has `out` outputs and `in` inputs. A method stores it as several tensors; each dimension of
//! theirs counts outputs or inputs, one by one, in packs or in blocks. That is all that splitting needs
//! to know, so it is all that is said of a method here.

use super::methods::Axis::{self, Blocks, Each, Packs, Same};
use super::methods::{Field, METHODS, Method, WHOLE};
use super::name::Expert;
use super::{RuleError, name};
use crate::{Checkpoint, StoredTensor};
use serde_json::Value;
use std::collections::HashMap;
use weightd_core::content::Dtype;
use weightd_core::text::short;

/// The quantization of a checkpoint.
#[derive(Debug)]
pub(super) struct Quantization<'a> {
    /// As the configuration names it.
    pub name: &'a str,
    /// Where it is one whose layers can be split.
    method: Option<&'static Method>,
    /// Elements of a pack, and the elements of the container that it takes.
    pack: Option<Unit>,
    /// Outputs and inputs of a block; 0 for all of them.
    block: [u64; 2],
    /// Whether blocks are of inputs in another order than they are stored in.
    act_order: bool,
    /// Outputs and inputs of every layer, by the beginning of its tensors' names.
    layers: HashMap<&'a str, [u64; 2]>,
}

/// So many of a layer's outputs or inputs are so many stored elements, and cannot be parted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unit {
    pub of: u64,
    pub stored: u64,
}

/// The dimension of a stored tensor that goes along with a layer's outputs or inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dimension {
    pub dim: usize,
    /// How many outputs or inputs the layer has.
    pub size: u64,
    pub unit: Unit,
}

/// What a stored tensor has of its layer's dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dimensions {
    pub out: Option<Dimension>,
    pub input: Option<Dimension>,
}

impl<'a> Quantization<'a> {
    /// What the configuration says; none where weights are not quantized. Unless something `splits`, only
    /// the method matters. Where the configuration says nothing, neither what is quantized `splits` nor `casts`.
    pub fn of(
        checkpoint: &'a Checkpoint,
        splits: bool,
        casts: bool,
    ) -> Result<Option<Quantization<'a>>, RuleError> {
        let Some(config) = &checkpoint.config().quantization_config else {
            return match checkpoint
                .tensors()
                .iter()
                .find(|(name, stored)| looks_quantized(name, stored))
            {
                Some((tensor, _)) if splits || casts => Err(RuleError::QuantizedUnsaid {
                    tensor: tensor.to_owned(),
                }),
                _ => Ok(None),
            };
        };
        let name = checkpoint
            .config()
            .quant_method()
            .ok_or(RuleError::QuantizationUnnamed)?;
        let method = method(config, name)?;
        let mut found = Quantization {
            name,
            method,
            pack: None,
            block: [1, 0],
            act_order: false,
            layers: HashMap::new(),
        };
        let Some(method) = method.filter(|_| splits) else {
            return Ok(Some(found));
        };
        let numbers = Numbers { config, name };
        let bits = method.bits.map_or_else(
            || numbers.one(&["bits", "w_bit", "num_bits"]),
            |bits| Ok(Some(bits)),
        )?;
        found.pack = bits
            .filter(|bits| (1..=method.container).contains(bits))
            .map(|bits| {
                let common = gcd(bits, method.container);
                Unit {
                    of: method.container / common,
                    stored: bits / common,
                }
            });
        found.block = match (method.block, numbers.blocks()?) {
            (Some(inputs), _) => [1, inputs],
            (None, Some(blocks)) => blocks,
            (None, None) => [1, numbers.one(&["group_size", "q_group_size"])?.unwrap_or(0)],
        };
        found.act_order = numbers.act_order()?;
        found.layers = found.layers_of(checkpoint, method)?;
        Ok(Some(found))
    }

    /// How many inputs make a block; 1 where blocks are not of inputs.
    pub fn inputs_of_block(&self) -> u64 {
        self.block[1].max(1)
    }

    /// Why the layers cannot be held as vLLM's modules do.
    pub fn refuse_layout(&self, checkpoint: &Checkpoint) -> RuleError {
        let quantized = checkpoint
            .tensors()
            .iter()
            .find(|(name, stored)| self.field(name, stored).is_some());
        let first = quantized.or_else(|| checkpoint.tensors().iter().next());
        RuleError::QuantizedLayout {
            tensor: first.map_or("the checkpoint", |(name, _)| name).to_owned(),
            method: self.name.to_owned(),
        }
    }

    /// The dimensions of a stored tensor; none where it is not one of a quantized layer, but, say, a
    /// bias, or the weight of a layer that is left as it was.
    pub fn dimensions(&self, tensor: &str, stored: &StoredTensor) -> Result<Option<Dimensions>, RuleError> {
        let Some((layer, field)) = self.field(tensor, stored) else {
            return Ok(None);
        };
        let dimension = |axis: Axis, which: usize| {
            let (Each(at) | Packs(at) | Blocks(at)) = axis else {
                return Ok(None);
            };
            let dim = at + lead(tensor);
            let Some(&found) = stored.shape.get(dim) else {
                return Ok(None);
            };
            let size = self.layers.get(layer).map(|sizes| sizes[which]);
            // One for all of them, unless that is a block.
            if found == 1 && !size.is_some_and(|size| self.is_one_block(axis, which, size)) {
                return Ok(None);
            }
            let size = size.ok_or_else(|| RuleError::QuantizedAlone {
                tensor: tensor.to_owned(),
                method: self.name.to_owned(),
            })?;
            let unit = self.unit(axis, which, size)?;
            let expected = size.div_ceil(unit.of) * unit.stored;
            if found != expected {
                let (tensor, method) = (tensor.to_owned(), self.name.to_owned());
                return Err(RuleError::QuantizedShape {
                    tensor,
                    method,
                    dim,
                    found,
                    expected,
                });
            }
            Ok(Some(Dimension { dim, size, unit }))
        };
        Ok(Some(Dimensions {
            out: dimension(field.out, 0)?,
            input: dimension(field.input, 1)?,
        }))
    }

    /// Whether the inputs of this tensor's blocks are anywhere in the layer.
    pub fn is_act_ordered(&self, tensor: &str, stored: &StoredTensor) -> bool {
        let blocks = self
            .field(tensor, stored)
            .is_some_and(|(_, field)| matches!(field.input, Blocks(_)));
        self.act_order && blocks
    }

    /// Whether a type that was asked for is for this tensor: never for what belongs to a quantized layer.
    pub fn may_be_cast(&self, tensor: &str, stored: &StoredTensor) -> bool {
        self.method.is_some() && is_weight_or_bias(tensor) && self.field(tensor, stored).is_none()
    }

    /// Whether it is known how this tensor goes along with its layer.
    pub fn is_known(&self, tensor: &str, stored: &StoredTensor) -> bool {
        self.method.is_some() && (is_weight_or_bias(tensor) || self.field(tensor, stored).is_some())
    }

    fn field<'t>(&self, tensor: &'t str, stored: &StoredTensor) -> Option<(&'t str, &'static Field)> {
        let fields = self.method?.fields;
        fields.iter().find_map(|field| {
            let layer = match field.suffix.strip_prefix('_') {
                Some(_) => tensor.strip_suffix(field.suffix)?,
                None => tensor.strip_suffix(field.suffix)?.strip_suffix('.')?,
            };
            // A layer that was left as it was.
            let is_plain = field.suffix == "weight" && is_float(stored);
            (!is_plain).then_some((layer, field))
        })
    }

    fn layers_of(
        &self,
        checkpoint: &'a Checkpoint,
        method: &Method,
    ) -> Result<HashMap<&'a str, [u64; 2]>, RuleError> {
        let main = &method.fields[0];
        let mut layers = HashMap::new();
        for (tensor, stored) in checkpoint.tensors() {
            let Some((layer, field)) = self.field(tensor, stored) else {
                continue;
            };
            if field.suffix != main.suffix {
                continue;
            }
            let size = |axis: Axis, which: usize| -> Result<u64, RuleError> {
                let (Each(at) | Packs(at) | Blocks(at)) = axis else {
                    return Ok(0);
                };
                let found = stored.shape.get(at + lead(tensor)).copied().unwrap_or(1);
                let unit = self.unit(axis, which, found)?;
                Ok((found / unit.stored).saturating_mul(unit.of))
            };
            layers.insert(layer, [size(main.out, 0)?, size(main.input, 1)?]);
        }
        Ok(layers)
    }

    /// Whether all of a layer's outputs or inputs are a single block, which cannot be parted.
    fn is_one_block(&self, axis: Axis, which: usize, size: u64) -> bool {
        matches!(axis, Blocks(_)) && (2..=self.block[which]).contains(&size)
    }

    /// What cannot be parted along one of a layer's dimensions.
    fn unit(&self, axis: Axis, which: usize, size: u64) -> Result<Unit, RuleError> {
        let lacks = || RuleError::QuantizationLacks {
            method: self.name.to_owned(),
            what: "bits",
        };
        match axis {
            Same | Each(_) => Ok(Unit { of: 1, stored: 1 }),
            Packs(_) => self.pack.ok_or_else(lacks),
            Blocks(_) => match self.block[which] {
                0 => Ok(Unit {
                    of: size.max(1),
                    stored: 1,
                }),
                block => Ok(Unit { of: block, stored: 1 }),
            },
        }
    }
}

/// Whether a tensor is one of a quantized layer, by its name or its type alone. Tools put the configuration
/// into files of their own, which say nothing here.
fn looks_quantized(tensor: &str, stored: &StoredTensor) -> bool {
    let fields = METHODS
        .iter()
        .flat_map(|method| method.fields)
        .map(|field| field.suffix);
    // These alone are common names.
    let mut telling = fields.filter(|suffix| !["weight", "_scales", "input_scale"].contains(suffix));
    let last = tensor.rsplit('.').next().unwrap_or(tensor);
    let is_small = stored.dtype.bits() <= 8 && stored.dtype != Dtype::BOOL;
    (last == "weight" && is_small)
        || telling.any(|suffix| last == suffix || (suffix.starts_with('_') && last.ends_with(suffix)))
}

/// Whether the name is one that tensors have which are not quantized.
fn is_weight_or_bias(tensor: &str) -> bool {
    let last = tensor.rsplit('.').next().unwrap_or(tensor);
    ["weight", "bias", "sinks"].contains(&last) || last.ends_with("_bias")
}

/// How many dimensions count experts.
fn lead(tensor: &str) -> usize {
    usize::from(name::expert(tensor) == Some(Expert::Stacked))
}

fn is_float(stored: &StoredTensor) -> bool {
    matches!(stored.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64)
}

/// The method of a configuration, where its layers can be split.
fn method(config: &Value, name: &str) -> Result<Option<&'static Method>, RuleError> {
    let named = |method: &&Method| method.names.contains(&name);
    let Some(first) = METHODS.iter().find(named) else {
        return match WHOLE.contains(&name) {
            true => Ok(None),
            false => Err(RuleError::UnknownQuantization {
                method: name.to_owned(),
                known: known(),
            }),
        };
    };
    let matches = |method: &&Method| {
        let (Some((field, values)), Some((_, default))) = (method.variant, first.variant) else {
            return true;
        };
        let value = config.get(field).and_then(Value::as_str);
        values.contains(&value.unwrap_or(default[0]))
    };
    Ok(METHODS.iter().filter(named).find(matches))
}

fn known() -> String {
    let mut names: Vec<_> = METHODS
        .iter()
        .flat_map(|method| method.names)
        .chain(WHOLE)
        .copied()
        .collect();
    names.sort_unstable();
    names.dedup();
    names.join(", ")
}

/// Numbers in a quantization configuration, at its top or in its groups.
struct Numbers<'a> {
    config: &'a Value,
    name: &'a str,
}

impl Numbers<'_> {
    /// All values of the fields with these names.
    fn all<'v>(&'v self, fields: &'v [&'static str]) -> impl Iterator<Item = (&'static str, &'v Value)> {
        let groups = self.config.get("config_groups").and_then(Value::as_object);
        let groups = groups.into_iter().flat_map(|groups| groups.values());
        let weights = groups.filter_map(|group| group.get("weights"));
        let places = std::iter::once(self.config).chain(weights);
        places.flat_map(move |place| {
            let found = fields
                .iter()
                .filter_map(|field| Some((*field, place.get(field)?)));
            found.filter(|(_, value)| !value.is_null())
        })
    }

    /// The number that all say; -1 for none.
    fn one(&self, fields: &[&'static str]) -> Result<Option<u64>, RuleError> {
        let mut found = None;
        for (field, value) in self.all(fields) {
            let number = match value.as_i64() {
                Some(-1) => 0,
                Some(number @ 1..=0xffff_ffff) => number as u64,
                _ => return Err(self.unusable(field, value)),
            };
            match found {
                Some(other) if other != number => return Err(self.unusable(field, value)),
                _ => found = Some(number),
            }
        }
        Ok(found)
    }

    /// Outputs and inputs of a block.
    fn blocks(&self) -> Result<Option<[u64; 2]>, RuleError> {
        let mut found = None;
        for (field, value) in self.all(&["weight_block_size", "block_structure"]) {
            let numbers: Option<Vec<u64>> = value
                .as_array()
                .and_then(|list| list.iter().map(Value::as_u64).collect());
            match (numbers.as_deref(), found) {
                (Some(&[out, input]), None) if out > 0 && input > 0 => found = Some([out, input]),
                (Some(&[out, input]), Some(other)) if other == [out, input] => {}
                _ => return Err(self.unusable(field, value)),
            }
        }
        Ok(found)
    }

    /// Whether groups are of inputs from anywhere. (compressed-tensors' other orders, `weight` or `static`,
    /// leave groups as they are.)
    fn act_order(&self) -> Result<bool, RuleError> {
        let mut any = false;
        for (field, value) in self.all(&["desc_act", "actorder"]) {
            let name = value.as_str().map(str::to_ascii_lowercase);
            any |= match (value, name.as_deref()) {
                (Value::Bool(ordered), _) => *ordered,
                (_, Some("group" | "dynamic")) => true,
                (_, Some("weight" | "static")) => false,
                _ => return Err(self.unusable(field, value)),
            };
        }
        Ok(any)
    }

    fn unusable(&self, field: &'static str, value: &Value) -> RuleError {
        RuleError::QuantizationField {
            method: self.name.to_owned(),
            field,
            value: short(&value.to_string(), 100),
        }
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
