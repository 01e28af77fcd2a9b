//! Which bytes of a checkpoint each rank gets, by executing read plans in plain memory.

mod drafts;
mod dtype;
mod experts;
mod gather;
#[path = "../made/mod.rs"]
mod made;
mod pipeline;
mod quantized;
mod refusals;
mod regions;
mod tied;
mod tp_plan;
mod whole;

use made::execute::Bytes;
use made::ranks;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use weightd_checkpoint::{Checkpoint, NodePlan, RuleError, Sharding, ShardingOptions};
use weightd_core::content::HandleKind;

/// The plan of a node that has all ranks of the world.
fn plan(checkpoint: &Checkpoint, options: &ShardingOptions) -> Result<NodePlan, RuleError> {
    Ok(NodePlan::new(
        &Sharding::new(checkpoint, options)?,
        &ranks(&options.parallel),
        HandleKind::Memfd,
    )
    .unwrap())
}

fn refusal(checkpoint: &Checkpoint, options: &ShardingOptions) -> RuleError {
    match plan(checkpoint, options) {
        Err(error) => error,
        other => panic!("a refusal by the rules was expected, not {other:?}"),
    }
}

/// Ends the files of an open checkpoint after their headers: whoever reads a weight now meets the end.
fn cut_weights_off(checkpoint: &Checkpoint) {
    for file in checkpoint.files() {
        let here = checkpoint
            .tensors()
            .values()
            .filter(|tensor| checkpoint.files()[tensor.file].name == file.name);
        let header = here.map(|tensor| tensor.offset).min().unwrap();
        let file = OpenOptions::new().write(true).open(&file.path).unwrap();
        file.set_len(header).unwrap();
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
