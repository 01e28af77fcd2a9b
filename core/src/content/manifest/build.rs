//! Building a manifest: one name per view, every other name an alias of it.

use super::view::push_row_major;
use super::*;
use std::ops::Range;

/// Collects regions, tensors, aliases and attributes, and makes a [`Manifest`] of them.
///
/// A tensor whose view (region, offset, dtype, shape, strides) equals that of an earlier one, and
/// is not empty, becomes an alias of the earliest.
#[derive(Clone, Debug, Default)]
pub struct ManifestBuilder {
    regions: Vec<Region>,
    tensors: Vec<Listed>,
    aliases: Vec<(Range<usize>, Range<usize>)>,
    attrs: Vec<(Range<usize>, bool)>,
    dims: Vec<u64>,
    text: String,
}

/// What a tensor is, beside its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorSpec<'a> {
    /// Parameter or buffer.
    pub kind: TensorKind,
    /// Whether it belongs to the model's state dictionary.
    pub persistent: bool,
    /// The element type.
    pub dtype: Dtype,
    /// The size of each dimension, outermost first; empty for a scalar.
    pub shape: &'a [u64],
    /// For each dimension, the distance between neighbours, in elements; `None` for elements packed
    /// in row-major order.
    pub strides: Option<&'a [u64]>,
    /// The number of its region, as [`ManifestBuilder::region`] gave it.
    pub region: usize,
    /// Where it starts in the region, in bytes.
    pub offset: u64,
}

impl ManifestBuilder {
    /// An empty one.
    pub fn new() -> ManifestBuilder {
        ManifestBuilder::default()
    }

    /// Adds a region and returns its number.
    pub fn region(&mut self, region: Region) -> usize {
        self.regions.push(region);
        self.regions.len() - 1
    }

    /// Adds a tensor, which [`finish`](Self::finish) checks.
    pub fn tensor(&mut self, name: &str, spec: TensorSpec<'_>) {
        let name = self.keep(name);
        let start = self.dims.len();
        self.dims.extend_from_slice(spec.shape);
        match spec.strides {
            Some(strides) => self.dims.extend_from_slice(strides),
            None => push_row_major(&mut self.dims, start),
        }
        self.tensors.push(Listed {
            name,
            kind: spec.kind,
            persistent: spec.persistent,
            dtype: spec.dtype,
            region: spec.region,
            offset: spec.offset,
            shape: start..start + spec.shape.len(),
            strides: start + spec.shape.len()..self.dims.len(),
        });
    }

    /// Adds another name for `of`: a tensor or an alias, added before or after.
    pub fn alias(&mut self, name: &str, of: &str) {
        let (name, of) = (self.keep(name), self.keep(of));
        self.aliases.push((name, of));
    }

    /// Adds a boolean attribute of the model.
    pub fn attr(&mut self, name: &str, value: bool) {
        let name = self.keep(name);
        self.attrs.push((name, value));
    }

    /// Checks everything and lists parameters before buffers, each in the order of their adding.
    ///
    /// # Errors
    ///
    /// More than a cap of this module allows; a name that is empty, too long or used twice; a view
    /// that is not inside its region; an alias that leads to no tensor.
    pub fn finish(self) -> Result<Manifest, ManifestError> {
        self.check_caps()?;
        for (number, region) in self.regions.iter().enumerate() {
            check::region(number, region)?;
        }
        for tensor in &self.tensors {
            check::tensor(&self.view(tensor), &self.regions)?;
        }
        let by_name = self.sorted_names()?;
        let canonical = self.canonical_tensors();
        let targets = self.alias_targets(&by_name, &canonical)?;
        let mut manifest = self.assemble(&by_name, &canonical, &targets);
        self.add_attrs(&mut manifest)?;
        check::encoded_bytes(manifest.encoded_bytes())?;
        Ok(manifest)
    }

    fn check_caps(&self) -> Result<(), ManifestError> {
        check::cap("regions", self.regions.len() as u64, MAX_REGIONS)?;
        check::cap(
            "names",
            (self.tensors.len() + self.aliases.len()) as u64,
            MAX_NAMES,
        )?;
        check::cap("attributes", self.attrs.len() as u64, MAX_ATTRS)?;
        let names = self.tensors.iter().map(|tensor| &tensor.name);
        let names = names.chain(self.aliases.iter().map(|(name, _)| name));
        for name in names.chain(self.attrs.iter().map(|(name, _)| name)) {
            check::name(&self.text[name.clone()])?;
        }
        Ok(())
    }

    fn view<'a>(&'a self, tensor: &'a Listed) -> Tensor<'a> {
        Tensor {
            name: &self.text[tensor.name.clone()],
            kind: tensor.kind,
            persistent: tensor.persistent,
            dtype: tensor.dtype,
            shape: self.shape(tensor),
            strides: self.strides(tensor),
            region: tensor.region,
            offset: tensor.offset,
        }
    }

    /// All tensors, then all aliases, in ascending order of their names.
    fn sorted_names(&self) -> Result<Vec<(&str, usize)>, ManifestError> {
        let names = self.tensors.iter().map(|tensor| &tensor.name);
        let names = names.chain(self.aliases.iter().map(|(name, _)| name));
        let names = names.map(|name| &self.text[name.clone()]);
        let mut sorted: Vec<_> = names.enumerate().map(|(entity, name)| (name, entity)).collect();
        sorted.sort_unstable();
        refuse_twins(sorted.iter().map(|(name, _)| *name))?;
        Ok(sorted)
    }

    /// For each tensor, the first that has its view.
    fn canonical_tensors(&self) -> Vec<usize> {
        let view = |number: &usize| {
            let tensor = &self.tensors[*number];
            let place = (tensor.region, tensor.offset, tensor.dtype);
            (place, self.shape(tensor), self.strides(tensor))
        };
        let mut canonical: Vec<usize> = (0..self.tensors.len()).collect();
        let mut sorted = canonical.clone();
        sorted.retain(|&number| !self.shape(&self.tensors[number]).contains(&0));
        sorted.sort_unstable_by(|a, b| view(a).cmp(&view(b)).then(a.cmp(b)));
        for twins in sorted.chunk_by(|a, b| view(a) == view(b)) {
            for &twin in twins {
                canonical[twin] = twins[0];
            }
        }
        canonical
    }

    /// For each alias, its tensor.
    fn alias_targets(
        &self,
        by_name: &[(&str, usize)],
        canonical: &[usize],
    ) -> Result<Vec<usize>, ManifestError> {
        let mut targets = vec![None; self.aliases.len()];
        let mut chain = Vec::new();
        for first in 0..self.aliases.len() {
            let mut alias = first;
            let tensor = loop {
                if let Some(tensor) = targets[alias] {
                    break tensor;
                }
                chain.push(alias);
                let (name, of) = &self.aliases[alias];
                let (name, of) = (&self.text[name.clone()], &self.text[of.clone()]);
                if chain.len() > self.aliases.len() {
                    return Err(ManifestError::AliasCycle { alias: name.into() });
                }
                let found = by_name.binary_search_by(|(name, _)| (*name).cmp(of));
                let found = found.map_err(|_| ManifestError::MissingCanonical {
                    alias: name.into(),
                    of: of.into(),
                })?;
                let entity = by_name[found].1;
                match entity.checked_sub(self.tensors.len()) {
                    None => break canonical[entity],
                    Some(next) => alias = next,
                }
            };
            for alias in chain.drain(..) {
                targets[alias] = Some(tensor);
            }
        }
        Ok(targets.into_iter().flatten().collect())
    }

    fn assemble(&self, by_name: &[(&str, usize)], canonical: &[usize], targets: &[usize]) -> Manifest {
        let is_own = |number: &usize| canonical[*number] == *number;
        let mut order: Vec<usize> = (0..self.tensors.len()).filter(is_own).collect();
        order.sort_by_key(|&number| self.tensors[number].kind);

        let mut manifest = Manifest {
            regions: self.regions.clone(),
            tensors: Vec::with_capacity(order.len()),
            aliases: Vec::with_capacity(self.tensors.len() - order.len() + targets.len()),
            attrs: Vec::with_capacity(self.attrs.len()),
            index: Vec::with_capacity(by_name.len()),
            dims: Vec::with_capacity(self.dims.len()),
            names: String::new(),
            checksums: None,
        };
        // From the numbers of what was added to those of what is listed.
        let mut entities = vec![0u32; by_name.len()];
        for &number in &order {
            let tensor = &self.tensors[number];
            entities[number] = manifest.tensors.len() as u32;
            manifest.tensors.push(Record {
                offset: tensor.offset,
                name: Name::default(),
                dims: manifest.dims.len() as u32,
                kind: tensor.kind,
                persistent: tensor.persistent,
                dtype: tensor.dtype,
                ndim: tensor.shape.len() as u8,
                region: tensor.region as u8,
            });
            manifest.dims.extend_from_slice(self.shape(tensor));
            manifest.dims.extend_from_slice(self.strides(tensor));
        }
        let twins = (0..self.tensors.len()).filter(|number| !is_own(number));
        let twins = twins.map(|number| (number, canonical[number]));
        let named = targets.iter().enumerate();
        let named = named.map(|(alias, &tensor)| (self.tensors.len() + alias, tensor));
        for (entity, tensor) in twins.chain(named) {
            entities[entity] = (manifest.tensors.len() + manifest.aliases.len()) as u32;
            manifest.aliases.push(Alias {
                name: Name::default(),
                of: entities[tensor],
            });
        }
        for &(name, entity) in by_name {
            let name = push_name(&mut manifest.names, name);
            manifest.index.push(entities[entity]);
            *manifest.entity_name_mut(entities[entity]) = name;
        }
        manifest
    }

    fn add_attrs(&self, manifest: &mut Manifest) -> Result<(), ManifestError> {
        let attrs = self.attrs.iter();
        let mut attrs: Vec<_> = attrs
            .map(|(name, value)| (&self.text[name.clone()], *value))
            .collect();
        attrs.sort_unstable();
        refuse_twins(attrs.iter().map(|(name, _)| *name))?;
        for (name, value) in attrs {
            let name = push_name(&mut manifest.names, name);
            manifest.attrs.push(Attr { name, value });
        }
        Ok(())
    }

    fn keep(&mut self, text: &str) -> Range<usize> {
        let start = self.text.len();
        self.text.push_str(text);
        start..self.text.len()
    }

    fn shape(&self, tensor: &Listed) -> &[u64] {
        &self.dims[tensor.shape.clone()]
    }

    fn strides(&self, tensor: &Listed) -> &[u64] {
        &self.dims[tensor.strides.clone()]
    }
}

/// A tensor as it was added.
#[derive(Clone, Debug)]
struct Listed {
    name: Range<usize>,
    kind: TensorKind,
    persistent: bool,
    dtype: Dtype,
    region: usize,
    offset: u64,
    shape: Range<usize>,
    strides: Range<usize>,
}

fn refuse_twins<'a>(sorted: impl Iterator<Item = &'a str> + Clone) -> Result<(), ManifestError> {
    match sorted.clone().zip(sorted.skip(1)).find(|(a, b)| a == b) {
        Some((name, _)) => Err(ManifestError::Duplicate { name: name.into() }),
        None => Ok(()),
    }
}

/// The caps were checked: the place and the length of every name fit.
fn push_name(names: &mut String, name: &str) -> Name {
    let start = names.len() as u32;
    names.push_str(name);
    Name {
        start,
        len: name.len() as u16,
    }
}
