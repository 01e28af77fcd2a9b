//! Which bytes of a checkpoint each rank gets, by executing read plans in plain memory.

mod dtype;
mod experts;
mod gather;
#[path = "../made/mod.rs"]
mod made;
mod pipeline;
mod refusals;
mod regions;
mod tied;
mod tp_plan;
mod whole;

use made::execute::Bytes;
use made::ranks;
use std::os::unix::fs::FileExt;
use weightd_checkpoint::{Checkpoint, NodePlan, PlanError, RuleError, ShardingOptions};
use weightd_core::content::HandleKind;

/// The plan of a node that has all ranks of the world.
fn plan(checkpoint: &Checkpoint, options: &ShardingOptions) -> Result<NodePlan, PlanError> {
    NodePlan::new(checkpoint, options, &ranks(&options.parallel), HandleKind::Memfd)
}

fn refusal(checkpoint: &Checkpoint, options: &ShardingOptions) -> RuleError {
    match plan(checkpoint, options) {
        Err(PlanError::Rule(error)) => error,
        other => panic!("a refusal by the rules was expected, not {other:?}"),
    }
}

/// A stored tensor, read whole.
fn stored(checkpoint: &Checkpoint, name: &str) -> Bytes {
    let tensor = &checkpoint.tensors()[name];
    let mut bytes = vec![0; tensor.bytes as usize];
    let file = &checkpoint.files()[tensor.file].file;
    file.read_exact_at(&mut bytes, tensor.offset).unwrap();
    (tensor.shape.clone(), bytes)
}
