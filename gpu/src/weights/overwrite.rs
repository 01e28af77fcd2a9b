//! Taking over other weights in place.

mod copies;
mod error;

pub use error::{Difference, OverwriteError, TensorForm};

use super::runs::dims;
use super::{Spot, TensorView, Weights};
use crate::owned::Piece;
use copies::Copies;
use std::cmp::Reverse;

impl Weights {
    /// Copies the bytes of `new` into these weights, tensor by tensor: what a reload in copy mode is.
    /// Addresses stay, and so do graphs that were captured over them. Where tensors lie in `new`, strided,
    /// fused or each for itself, does not matter. Afterwards the [generation](Weights::generation) is
    /// that of `new`.
    ///
    /// Every tensor and alias must be in `new`, with the same type and shape; what else `new` has is left
    /// out. Tensors that share memory here, such as an alias with its tensor or a `q` with a fused `qkv`,
    /// must share it in `new` in the same way: two different tensors cannot go into one.
    ///
    /// Let the device finish what uses these weights first. The copies are on its default stream, and done
    /// when this returns.
    ///
    /// # Errors
    ///
    /// [`OverwriteError::Mapped`] and [`OverwriteError::Differ`] before the first byte is copied.
    /// [`OverwriteError::Memory`] when a device is lost meanwhile, and the weights with it.
    pub fn overwrite(&mut self, new: &Weights) -> Result<(), OverwriteError> {
        let steps = self.steps(new)?;
        for steps in steps.chunk_by(|a, b| a.memory == b.memory) {
            let memory = self.memories[steps[0].memory].own_mut();
            let memory = memory.expect("every tensor was found to be in memory of the engine's own");
            memory.copy(steps.iter().flat_map(Step::pieces))?;
        }
        self.generation = new.generation;
        Ok(())
    }

    /// What is to be copied, by memory and place, once all of it was found to fit.
    fn steps<'n>(&self, new: &'n Weights) -> Result<Vec<Step<'n>>, OverwriteError> {
        if let Some(mapped) = self.tensors().find(|tensor| !tensor.is_writable()) {
            let tensor = mapped.name.to_owned();
            return Err(OverwriteError::Mapped { tensor });
        }
        let (mut steps, mut differences) = (Vec::new(), Vec::new());
        for tensor in self.tensors() {
            match self.step(&tensor, new) {
                Ok(step) => steps.extend(step.map(|step| (tensor.name, step))),
                Err(difference) => differences.push(difference),
            }
        }
        let aliases = self.aliases();
        differences.extend(aliases.filter_map(|(alias, tensor)| compare_alias(alias, &tensor, new).err()));
        let steps = join(steps, &mut differences);
        match differences.is_empty() {
            true => Ok(steps),
            false => Err(OverwriteError::Differ { differences }),
        }
    }

    /// How one tensor is copied; `None` when it is empty.
    fn step<'n>(&self, here: &TensorView<'_>, new: &'n Weights) -> Result<Option<Step<'n>>, Difference> {
        let name = here.name;
        let from = compare(name, here, new)?;
        if here.extent() == 0 {
            return Ok(None);
        }
        let (of, there) = (here.memory(), from.memory());
        if of.device() != there.device() || of.span().is_some() != there.span().is_some() {
            return Err(Difference::Device {
                name: name.to_owned(),
                here: of.device(),
                there: there.device(),
            });
        }
        let copies = Copies::between(here, &from).ok_or_else(|| shared(name, name))?;
        let Spot { memory, at } = self.place(here);
        Ok(Some(Step {
            memory,
            at,
            end: at + here.extent(),
            shift: copies
                .keep_strides()
                .then(|| from.address().wrapping_sub(here.address())),
            from,
            copies,
        }))
    }
}

/// One tensor on its way.
struct Step<'n> {
    /// Where it goes.
    memory: usize,
    at: u64,
    end: u64,
    from: TensorView<'n>,
    copies: Copies,
    /// How far away each of its bytes comes from, where that is the same for all.
    shift: Option<u64>,
}

impl<'n> Step<'n> {
    fn pieces(&self) -> impl Iterator<Item = Piece<'n>> {
        let (to, from) = (self.at, self.from.at());
        let rows = self.copies.rows(to, from);
        rows.map(|(at, rows)| Piece {
            from: self.from.memory(),
            at,
            rows,
        })
    }
}

/// The tensor of `new` that has this name and the form of `here`.
fn compare<'n>(name: &str, here: &TensorView<'_>, new: &'n Weights) -> Result<TensorView<'n>, Difference> {
    let there = new.get(name).ok_or_else(|| Difference::Missing {
        name: name.to_owned(),
        here: TensorForm::of(here),
    })?;
    if (here.dtype, here.shape) != (there.dtype, there.shape) {
        return Err(Difference::Form {
            name: name.to_owned(),
            here: TensorForm::of(here),
            there: TensorForm::of(&there),
        });
    }
    Ok(there)
}

/// An alias has no memory of its own here: there it must stand for what its tensor is there.
fn compare_alias(alias: &str, tensor: &TensorView<'_>, new: &Weights) -> Result<(), Difference> {
    let there = compare(alias, tensor, new)?;
    let Ok(of) = compare(tensor.name, tensor, new) else {
        return Ok(()); // It is told of by itself.
    };
    let same = there.address() == of.address() && dims(&there).eq(dims(&of));
    match same || tensor.extent() == 0 {
        true => Ok(()),
        false => Err(shared(alias, tensor.name)),
    }
}

/// Finds tensors that share memory here and not there, and leaves out what comes with a larger one.
///
/// Tensors of which the ranges overlap are taken to share memory: all their bytes then have to come from
/// the same distance, so that none could be wanted to be two things.
fn join<'n>(mut steps: Vec<(&str, Step<'n>)>, differences: &mut Vec<Difference>) -> Vec<Step<'n>> {
    steps.sort_by_key(|(_, step)| (step.memory, step.at, Reverse(step.end)));
    let mut kept: Vec<Step<'n>> = Vec::with_capacity(steps.len());
    let mut group: Option<Group<'_>> = None;
    for (name, step) in steps {
        let group = match &mut group {
            Some(group) if group.memory == step.memory && step.at < group.end => {
                if step.shift.is_none() || step.shift != group.shift {
                    differences.push(shared(name, group.first));
                }
                group
            }
            group => group.insert(Group {
                first: name,
                memory: step.memory,
                shift: step.shift,
                end: 0,
                copied: 0,
            }),
        };
        group.end = group.end.max(step.end);
        if step.end <= group.copied {
            continue;
        }
        if step.copies.are_one() {
            group.copied = step.end;
        }
        kept.push(step);
    }
    kept
}

/// Tensors of which the ranges overlap.
struct Group<'a> {
    first: &'a str,
    memory: usize,
    shift: Option<u64>,
    end: u64,
    /// Where the last ends of those that are copied in one piece. It starts no later than what comes
    /// next, so it holds whatever ends no later.
    copied: u64,
}

fn shared(name: &str, with: &str) -> Difference {
    Difference::Shared {
        name: name.to_owned(),
        with: with.to_owned(),
    }
}
