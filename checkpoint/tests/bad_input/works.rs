//! What is unusual, and works.

use super::*;

#[test]
fn links_and_files_beside_the_index_are_no_hindrance() {
    let dir = linked("llama");
    fs::write(dir.path().join("consolidated.safetensors"), "not even a header").unwrap();
    fs::write(dir.path().join("original.bin"), "x").unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.files().len(), 6);
    assert_eq!(checkpoint.tensors().len(), 39);
    assert_eq!(checkpoint.config().num_key_value_heads, Some(4));
}

#[test]
fn a_single_file_may_have_any_name_and_model_safetensors_comes_first() {
    let dir = linked("qwen3");
    fs::rename(
        dir.path().join("model.safetensors"),
        dir.path().join("weights.safetensors"),
    )
    .unwrap();
    assert_eq!(
        Checkpoint::open(dir.path()).unwrap().files()[0].name,
        "weights.safetensors"
    );
    fs::rename(
        dir.path().join("weights.safetensors"),
        dir.path().join("model.safetensors"),
    )
    .unwrap();
    fs::write(dir.path().join("consolidated.safetensors"), "not even a header").unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(
        (checkpoint.files().len(), checkpoint.files()[0].name.as_str()),
        (1, "model.safetensors")
    );
}

#[test]
fn offsets_are_those_of_the_file() {
    let checkpoint = Checkpoint::open(&data("llama")).unwrap();
    for (name, stored) in checkpoint.tensors() {
        let file = fs::read(&checkpoint.files()[stored.file].path).unwrap();
        let reference = safetensors::SafeTensors::deserialize(&file).unwrap();
        let tensor = reference.tensor(name).unwrap();
        let range = stored.offset as usize..(stored.offset + stored.bytes) as usize;
        assert!(tensor.data() == &file[range], "{name}");
        assert_eq!(tensor.dtype().to_string(), stored.dtype.name());
    }
}
