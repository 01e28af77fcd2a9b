//! What a model needs and the weights lack.

use super::Weights;
use std::fmt;

/// How many names a message lists.
const LISTED: usize = 8;

/// Tensors of a model that have no data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// All of their names, in the order of asking.
    pub names: Vec<String>,
}

impl Weights {
    /// Checks that each of these tensors is there, by its own name or an alias's. An engine asks for all
    /// tensors of its model, once its own hooks have dropped and made what they do, so that none is ever
    /// used that was never filled.
    ///
    /// # Errors
    ///
    /// All names that are missing.
    pub fn require<'n>(&self, names: impl IntoIterator<Item = &'n str>) -> Result<(), Missing> {
        let missing = |name: &&str| self.manifest().get(name).is_none();
        let names: Vec<String> = names.into_iter().filter(missing).map(str::to_owned).collect();
        match names.is_empty() {
            true => Ok(()),
            false => Err(Missing { names }),
        }
    }
}

impl std::error::Error for Missing {}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.names.len();
        let listed = self.names[..count.min(LISTED)].join(", ");
        write!(f, "no data for {count} of the model's tensors: {listed}")?;
        if count > LISTED {
            write!(f, " and {} more", count - LISTED)?;
        }
        f.write_str("; make them in the engine, or load a checkpoint and layout that has them")
    }
}
