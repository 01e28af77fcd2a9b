//! `model.safetensors.index.json`.

use super::*;

const INDEX: &str = "model.safetensors.index.json";

/// The fault of the Llama checkpoint whose index is `index`.
#[track_caller]
fn index_fault(dir: &TempDir, index: &str, expected: &[&str]) -> IndexFault {
    replace(dir, INDEX, index);
    match error(dir.path(), expected) {
        CheckpointError::Index { path, fault } => {
            assert!(path.ends_with(INDEX), "{}", path.display());
            fault
        }
        other => panic!("{other:?}"),
    }
}

/// The index that transformers wrote, with one text for another.
fn index_with(from: &str, to: &str) -> String {
    let index = fs::read_to_string(data("llama").join(INDEX)).unwrap();
    assert!(index.contains(from));
    index.replacen(from, to, 1)
}

#[test]
fn an_index_that_is_none() {
    for text in [
        "",
        "[]",
        "{}",
        r#"{"weight_map":[]}"#,
        r#"{"weight_map":{"a":1}}"#,
        r#"{"weight_map":{}"#,
    ] {
        let fault = index_fault(&linked("llama"), text, &["not an index"]);
        assert_is!(fault, IndexFault::Malformed { .. });
    }
    assert_is!(
        index_fault(&linked("llama"), r#"{"weight_map":{}}"#, &["names no tensor"]),
        IndexFault::Empty
    );
}

#[test]
fn an_index_that_names_a_missing_file() {
    let index = index_with(
        "model-00006-of-00006.safetensors",
        "model-00007-of-00007.safetensors",
    );
    let expected = [
        "\"lm_head.weight\"",
        "\"model-00007-of-00007.safetensors\"",
        "not there",
    ];
    assert_is!(
        index_fault(&linked("llama"), &index, &expected),
        IndexFault::MissingFile { .. }
    );
}

#[test]
fn an_index_that_names_a_tensor_that_its_file_lacks() {
    let expected = ["\"lm_head.bias\"", "\"model-00006-of-00006.safetensors\""];
    let fault = index_fault(
        &linked("llama"),
        &index_with("lm_head.weight", "lm_head.bias"),
        &expected,
    );
    assert_is!(fault, IndexFault::MissingTensor { .. });
    // It is in another file.
    let elsewhere = index_with("model-00006-of-00006", "model-00001-of-00006");
    let expected = ["\"lm_head.weight\"", "\"model-00001-of-00006.safetensors\""];
    assert_is!(
        index_fault(&linked("llama"), &elsewhere, &expected),
        IndexFault::MissingTensor { .. }
    );
}

#[test]
fn an_index_that_names_a_tensor_twice() {
    let index = r#"{"weight_map":{"a":"1.safetensors","b":"1.safetensors","a":"2.safetensors"}}"#;
    let expected = ["\"a\" twice", "\"1.safetensors\"", "\"2.safetensors\""];
    assert_is!(
        index_fault(&linked("llama"), index, &expected),
        IndexFault::NamedTwice { .. }
    );
}

#[test]
fn an_index_that_leaves_the_directory() {
    let absolute = data("llama")
        .canonicalize()
        .unwrap()
        .join("model-00006-of-00006.safetensors");
    let names = [
        absolute.to_str().unwrap(),
        "../model.safetensors",
        "sub/model.safetensors",
        "..",
        ".",
        "",
        "a\\b",
    ];
    for name in names {
        let index = index_with("\"model-00006-of-00006.safetensors\"", &format!("{name:?}"));
        let fault = index_fault(
            &linked("llama"),
            &index,
            &["\"lm_head.weight\"", &format!("\"{name}\"")],
        );
        assert_is!(fault, IndexFault::NotAPlainName { .. });
    }
}

#[test]
fn a_tensor_that_two_files_hold() {
    let dir = linked("llama");
    replace(
        &dir,
        "extra.safetensors",
        fs::read(data("llama").join("model-00006-of-00006.safetensors")).unwrap(),
    );
    let index = index_with(
        "\"lm_head.weight\": \"model-00006-of-00006.safetensors\"",
        "\"lm_head.weight\": \"extra.safetensors\"",
    );
    assert!(
        Checkpoint::open(dir.path()).is_ok(),
        "a file that the index does not name is no part of it"
    );
    replace(&dir, INDEX, &index);
    assert!(Checkpoint::open(dir.path()).is_ok(), "either file will do");
    let both = index.replacen(
        "\"model.norm.weight\": \"model-00005",
        "\"model.norm.weight\": \"model-00006",
        1,
    );
    let expected = [
        "\"lm_head.weight\" is stored twice",
        "\"extra.safetensors\"",
        "\"model-00006-of-00006.safetensors\"",
    ];
    assert_is!(
        index_fault(&dir, &both, &expected),
        IndexFault::StoredTwice { .. }
    );
}

#[test]
fn weights_beyond_all_measure() {
    let dir = linked("llama");
    let mut entries = Vec::new();
    for n in 0..9 {
        // Sparse files, which take no space.
        replace(&dir, &format!("{n}.safetensors"), "");
        let file = File::options()
            .write(true)
            .open(dir.path().join(format!("{n}.safetensors")))
            .unwrap();
        file.set_len(2 << 40).unwrap();
        entries.push(format!(r#""{n}":"{n}.safetensors""#));
    }
    replace(
        &dir,
        INDEX,
        format!(r#"{{"weight_map":{{{}}}}}"#, entries.join(",")),
    );
    let error = error(dir.path(), &["8.safetensors", "19791209299968 bytes"]);
    assert_is!(error, CheckpointError::TooLarge { .. });
}
