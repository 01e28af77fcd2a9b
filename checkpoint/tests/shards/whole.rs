//! What one rank holds as it is stored, and what planning does not read.

use super::made::execute::execute;
use super::made::{Made, SMALL, tensor_parallel};
use super::{cut_weights_off, plan, refusal, stored};
use serde_json::json;
use weightd_checkpoint::RuleError;
use weightd_core::content::manifest::TensorKind;

#[test]
fn rotary_frequencies_of_old_checkpoints_are_buffers() {
    let mut tensors = SMALL.tensors();
    tensors.push((
        "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
        "F32",
        vec![7],
    ));
    let checkpoint = Made::new(&SMALL.config(), &[tensors]).open();
    let plan = plan(&checkpoint, &tensor_parallel(2)).unwrap();
    for rank in plan.ranks() {
        let buffers: Vec<_> = rank
            .manifest
            .tensors()
            .filter(|t| t.kind == TensorKind::Buffer)
            .collect();
        assert_eq!(buffers.len(), 1);
        assert_eq!(buffers[0].shape, [7]);
        assert!(buffers[0].persistent, "the checkpoint has it");
    }
}

#[test]
fn what_the_rules_do_not_know_is_served_whole() {
    let mut config = SMALL.config();
    config["architectures"] = json!(["MambaForCausalLM"]);
    let checkpoint = Made::new(&config, &[vec![("backbone.mixer.A".into(), "F32", vec![5, 3])]]).open();
    let held = execute(&checkpoint, &plan(&checkpoint, &tensor_parallel(1)).unwrap());
    assert_eq!(
        held[0]["backbone.mixer.A"],
        stored(&checkpoint, "backbone.mixer.A")
    );
}

#[test]
fn planning_and_refusing_read_no_weights() {
    let made = SMALL.make();
    let checkpoint = made.open();
    cut_weights_off(&checkpoint);
    assert!(plan(&checkpoint, &tensor_parallel(4)).is_ok());
    assert_eq!(
        refusal(&checkpoint, &tensor_parallel(5)),
        RuleError::KvHeads { ranks: 5, heads: 4 }
    );
}
