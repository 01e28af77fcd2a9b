//! Memory of the engine's own, for what it writes or keeps.

use super::{Backing, Spot, TensorView, Weights};
use crate::owned::Piece;
use crate::region::Rows;
use crate::{MemoryError, Owned};
use std::collections::BTreeSet;
use weightd_core::content::manifest::Tensor;
use weightd_core::plan::region::TENSOR_ALIGNMENT;

impl Weights {
    /// Weights with the same manifest in memory of the engine's own, cloned at the speed of the device:
    /// what copy mode is. All of it is the engine's to write, and none of it needs the daemon's memory.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfMemory`] when all of it together does not fit, before the first byte is
    /// copied; nothing is kept then.
    pub fn duplicate(&self) -> Result<Weights, MemoryError> {
        let wanted: Vec<_> = self
            .memories
            .iter()
            .map(|memory| (memory, memory.bytes()))
            .collect();
        let mut taken = Owned::take(&wanted)?;
        for (to, &(from, bytes)) in taken.iter_mut().zip(&wanted) {
            to.copy(std::iter::once(whole(from, 0, bytes)))?;
        }
        Ok(Weights {
            // What the engine owns it may change.
            manifest: self.manifest.clone().without_checksums(),
            memories: taken.into_iter().map(Backing::Own).collect(),
            clones: self.clones.clone(),
            generation: self.generation,
        })
    }

    /// Clones the tensors that the engine writes into memory of its own, with what they hold now. A
    /// tensor is meant by its own name and by each of its aliases. From now on its views, and those of
    /// its aliases, are in the clone; [`get_mut`](Weights::get_mut) or, on a device, the address leads to
    /// where it can be written. What is the engine's own already stays where it is.
    ///
    /// Shape and strides stay. Tensors that overlap a cloned one (a `q` inside a fused `qkv`) do not
    /// follow it: what is written to the clone is not seen in them, nor the other way round. Name all of
    /// them or none; each gets a clone for itself.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfMemory`] when all clones together do not fit, before the first byte is copied.
    /// After an error everything is as before, and nothing is kept.
    pub fn make_writable(&mut self, names: impl Fn(&str) -> bool) -> Result<(), MemoryError> {
        let chosen = self.chosen(names);
        // One memory for all clones out of one region.
        let mut bytes = vec![0; self.manifest.regions().len()];
        let spots: Vec<u64> = chosen
            .iter()
            .map(|tensor| {
                let end: &mut u64 = &mut bytes[tensor.region];
                let at = end.next_multiple_of(TENSOR_ALIGNMENT);
                *end = at + tensor.extent();
                at
            })
            .collect();
        let regions: Vec<usize> = (0..bytes.len()).filter(|&region| bytes[region] > 0).collect();
        let wanted: Vec<_> = regions
            .iter()
            .map(|&region| (&self.memories[region], bytes[region]))
            .collect();
        let mut taken = Owned::take(&wanted)?;

        let mut clones = Vec::with_capacity(chosen.len());
        for (number, (to, &region)) in taken.iter_mut().zip(&regions).enumerate() {
            let memory = self.memories.len() + number;
            let here = chosen
                .iter()
                .zip(&spots)
                .filter(|(tensor, _)| tensor.region == region);
            to.copy(here.clone().map(|(tensor, &at)| {
                let rows = Rows::one(at, tensor.extent());
                let (from, at) = (&self.memories[region], tensor.offset);
                Piece { from, at, rows }
            }))?;
            clones.extend(here.map(|(tensor, &at)| (Box::from(tensor.name), Spot { memory, at })));
        }
        self.memories.extend(taken.into_iter().map(Backing::Own));
        self.clones.extend(clones);
        Ok(())
    }

    /// The tensors that are meant and are not the engine's own yet, in listed order.
    fn chosen(&self, names: impl Fn(&str) -> bool) -> Vec<Tensor<'_>> {
        let aliased = self.manifest.aliases().filter(|(alias, _)| names(alias));
        let aliased: BTreeSet<&str> = aliased.map(|(_, tensor)| tensor.name).collect();
        let meant = |tensor: &Tensor<'_>| names(tensor.name) || aliased.contains(tensor.name);
        let mapped = |tensor: &Tensor<'_>| !self.view(*tensor).is_writable();
        self.manifest.tensors().filter(meant).filter(mapped).collect()
    }

    /// The memory of a tensor that the engine owns, to write: from the first element to the end of the
    /// last. Where its elements do not lie packed, what lies between them may be other tensors'.
    ///
    /// `None` where there is no such tensor, where it is still mapped
    /// ([`make_writable`](Weights::make_writable) clones it), and where only a device can write it, at its
    /// address.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut [u8]> {
        let tensor = self.manifest.get(name)?;
        let (Spot { memory, at }, bytes) = (self.place(&tensor), tensor.extent());
        if bytes == 0 {
            return Some(&mut []);
        }
        let memory = self.memories[memory].own_mut()?.host_mut()?;
        Some(&mut memory[at as usize..][..bytes as usize])
    }
}

impl TensorView<'_> {
    /// Clones the memory from the first element to the end of the last. Strides stay as they are.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OutOfMemory`], before anything is copied.
    pub fn duplicate(&self) -> Result<Owned, MemoryError> {
        let mut owned = Owned::take_one(self.memory(), self.extent())?;
        owned.copy(std::iter::once(whole(self.memory(), self.at(), self.extent())))?;
        Ok(owned)
    }
}

/// `bytes` bytes from byte `at` on, to the start of other memory.
fn whole(from: &Backing, at: u64, bytes: u64) -> Piece<'_> {
    let rows = Rows::one(0, bytes);
    Piece { from, at, rows }
}
