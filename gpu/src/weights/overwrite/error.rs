//! Why weights cannot take over others.

use crate::MemoryError;
use std::fmt;
use weightd_core::content::manifest::Tensor;
use weightd_core::content::{DeviceUuid, Dtype};

/// How many differences a message lists.
const LISTED: usize = 8;

/// Why weights were not overwritten.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum OverwriteError {
    /// A tensor that is still mapped, and so cannot be written.
    #[error(
        "{tensor} is mapped read-only; overwrite a duplicate of the weights, or map the new ones instead"
    )]
    Mapped { tensor: String },
    /// New weights that do not fit; nothing was copied.
    #[error(
        "nothing was copied, since {} of the tensors cannot be taken over: {}; attach to weights of the same \
         model, types and layout, or load afresh",
        .differences.len(),
        list(.differences)
    )]
    Differ { differences: Vec<Difference> },
    /// The device failed while bytes were copied.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// One tensor, or alias, that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Difference {
    /// A name that the new weights lack.
    #[error("{name} ({here}) is missing")]
    Missing { name: String, here: TensorForm },
    /// Another type or shape.
    #[error("{name} is {here} here and {there} there")]
    Form {
        name: String,
        here: TensorForm,
        there: TensorForm,
    },
    /// Tensors that have the same memory here, and each its own in the new weights.
    #[error("{name} shares memory with {with} here, and not in the same way there")]
    Shared { name: String, with: String },
    /// Memory that cannot be copied inside one device.
    #[error("{name} is on device {here} here and on {there} there")]
    Device {
        name: String,
        here: DeviceUuid,
        there: DeviceUuid,
    },
}

/// The type and shape of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorForm {
    /// The element type.
    pub dtype: Dtype,
    /// The size of each dimension, outermost first.
    pub shape: Vec<u64>,
}

impl TensorForm {
    pub(super) fn of(tensor: &Tensor<'_>) -> TensorForm {
        TensorForm {
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
        }
    }
}

impl fmt::Display for TensorForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype.name(), self.shape)
    }
}

fn list(differences: &[Difference]) -> String {
    let listed = differences.iter().take(LISTED).map(Difference::to_string);
    let mut text = listed.collect::<Vec<_>>().join(", ");
    if let Some(more) = differences.len().checked_sub(LISTED).filter(|&more| more > 0) {
        text += &format!(" and {more} more");
    }
    text
}
