//! The weights of one module of a model.

use super::{TensorView, Weights};

/// The tensors of a module and of those inside it: all whose names, their own or an alias's, start with
/// its path and a dot. Asking costs the same however many other tensors there are.
///
/// ```no_run
/// # fn layers(weights: &weightd_gpu::Weights) -> Result<(), Box<dyn std::error::Error>> {
/// for number in 0..32 {
///     let layer = weights.module(&format!("model.layers.{number}"));
///     if layer.is_empty() {
///         continue; // another pipeline stage has it
///     }
///     let attention = layer.module("self_attn");
///     let qkv = attention.get("qkv_proj.weight").ok_or("a layer without attention")?;
///     println!("{}: {:?} at {:#x}", attention.path(), qkv.shape, qkv.address());
///     for (name, tensor) in layer.module("mlp").tensors() {
///         println!("{name}: {:?}", tensor.shape);
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Module<'a> {
    weights: &'a Weights,
    /// What the names start with: the path and a dot, or nothing.
    prefix: String,
}

impl Weights {
    /// The module at this path, for example `model.layers.0`; the whole model at an empty one. One
    /// without tensors is [empty](Module::is_empty).
    pub fn module(&self, path: &str) -> Module<'_> {
        Module {
            weights: self,
            prefix: prefix("", path),
        }
    }
}

impl<'a> Module<'a> {
    /// Its path from the model's root.
    pub fn path(&self) -> &str {
        self.prefix.strip_suffix('.').unwrap_or_default()
    }

    /// The module at this path inside this one; this one at an empty path.
    pub fn module(&self, path: &str) -> Module<'a> {
        Module {
            weights: self.weights,
            prefix: prefix(&self.prefix, path),
        }
    }

    /// The tensor of this name inside the module, or that an alias of this name stands for. It may lie
    /// in another module, as tied embeddings do.
    pub fn get(&self, name: &str) -> Option<TensorView<'a>> {
        self.weights.get(&[&self.prefix, name].concat())
    }

    /// All tensors with their names inside the module, in ascending order. An alias is among them, under
    /// its own name and with the view of its tensor.
    pub fn tensors(&self) -> impl Iterator<Item = (&'a str, TensorView<'a>)> {
        let (weights, start) = (self.weights, self.prefix.len());
        let names = weights.manifest().names_with_prefix(&self.prefix);
        names.map(move |(name, tensor)| (&name[start..], weights.view(tensor)))
    }

    /// Whether no tensor is in it.
    pub fn is_empty(&self) -> bool {
        self.tensors().next().is_none()
    }
}

fn prefix(outer: &str, path: &str) -> String {
    match path {
        "" => outer.to_owned(),
        _ => [outer, path, "."].concat(),
    }
}
