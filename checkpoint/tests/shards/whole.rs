//! What one rank holds as it is stored, and what planning does not read.

use super::made::execute::execute;
use super::made::{Made, SMALL, content, tensor_parallel};
use super::{cut_weights_off, plan, refusal, stored};
use serde_json::json;
use std::fs;
use weightd_checkpoint::{Checkpoint, RuleError};
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
fn elements_of_less_than_a_byte_are_served_whole_in_rows_of_any_length() {
    let tensors: [(&str, &[u64], usize); 9] = [
        ("F4", &[16], 8),
        ("F4", &[2, 3], 3),
        ("F4", &[4, 1], 2),
        ("F4", &[0], 0),
        ("F4", &[3, 0, 5], 0),
        ("F4", &[2, 3, 1], 3),
        ("F6_E2M3", &[4], 3),
        ("F6_E2M3", &[2, 2], 3),
        ("F6_E3M2", &[1, 4, 1], 3),
    ];
    for (dtype, shape, bytes) in tensors {
        let dir = tempfile::tempdir().unwrap();
        let config = json!({ "architectures": ["MambaForCausalLM"] }).to_string();
        fs::write(dir.path().join("config.json"), config).unwrap();
        let tensor = json!({ "dtype": dtype, "shape": shape, "data_offsets": [0, bytes] });
        let header = json!({ "a": tensor }).to_string();
        let file = [
            &(header.len() as u64).to_le_bytes(),
            header.as_bytes(),
            &content("a", bytes as u64),
        ];
        fs::write(dir.path().join("model.safetensors"), file.concat()).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let held = execute(&checkpoint, &plan(&checkpoint, &tensor_parallel(1)).unwrap());
        assert_eq!(held[0]["a"], stored(&checkpoint, "a"), "{dtype} {shape:?}");
    }
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
