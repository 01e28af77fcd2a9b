//! Quantized checkpoints, stored by every method that can be split.

mod cuts;
mod dtype;
mod hostile;
mod layers;
mod refusals;

use crate::made::{Made, Tensor, tensor_parallel, width};
use crate::{cut_weights_off, plan, refusal};
use serde_json::Value;
use weightd_checkpoint::{Checkpoint, RuleError};

/// A checkpoint without weights: only its headers can be read.
struct Headers {
    checkpoint: Checkpoint,
    _made: Made,
}

fn headers(config: &Value, tensors: Vec<Tensor>) -> Headers {
    let made = empty(config, tensors);
    let checkpoint = made.open();
    cut_weights_off(&checkpoint);
    Headers {
        checkpoint,
        _made: made,
    }
}

/// A checkpoint of zeros.
fn empty(config: &Value, tensors: Vec<Tensor>) -> Made {
    Made::filled(config, &[tensors], |_, dtype, elements| {
        vec![0; (elements * width(dtype)) as usize]
    })
}

impl Headers {
    fn refusal(&self, tp: u32) -> RuleError {
        refusal(&self.checkpoint, &tensor_parallel(tp))
    }

    fn is_accepted(&self, tp: u32) -> bool {
        plan(&self.checkpoint, &tensor_parallel(tp)).is_ok()
    }
}
