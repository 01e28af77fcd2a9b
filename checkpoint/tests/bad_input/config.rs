//! `config.json`.

use super::*;

#[test]
fn a_config_that_is_not_json() {
    let dir = linked("qwen3");
    replace(&dir, "config.json", "{\"architectures\": [");
    let error = error(dir.path(), &["config.json: not JSON", "line 1"]);
    assert_is!(
        error,
        CheckpointError::Config {
            fault: ConfigFault::NotJson { .. },
            ..
        }
    );
}

#[test]
fn a_config_with_wrong_fields() {
    type Check = fn(&ConfigFault) -> bool;
    let table: [(&str, &str, Check); 6] = [
        ("{}", "field architectures: missing", |f| {
            matches!(f, ConfigFault::Missing { .. })
        }),
        (r#"{"architectures":"A"}"#, "field architectures", |f| {
            matches!(f, ConfigFault::WrongType { .. })
        }),
        (
            r#"{"architectures":["A"],"vocab_size":0}"#,
            "field vocab_size: 0",
            |f| matches!(f, ConfigFault::OutOfRange { .. }),
        ),
        (
            r#"{"architectures":["A"],"num_attention_heads":99999999999}"#,
            "num_attention_heads: 99999999999",
            |f| matches!(f, ConfigFault::OutOfRange { .. }),
        ),
        (
            r#"{"architectures":["A"],"text_config":{"head_dim":"x"}}"#,
            "field text_config.head_dim",
            |f| matches!(f, ConfigFault::WrongType { .. }),
        ),
        (
            "{\"architectures\":\"A\u{9b}2J\u{3164}\"}",
            r#"the text "A\u{9b}2J\u{3164}""#,
            |f| matches!(f, ConfigFault::WrongType { .. }),
        ),
    ];
    for (json, expected, check) in table {
        let dir = linked("qwen3");
        replace(&dir, "config.json", json);
        match error(dir.path(), &["config.json: ", expected]) {
            CheckpointError::Config { fault, .. } => assert!(check(&fault), "{fault:?}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_config_or_an_index_beyond_all_measure_is_not_read() {
    for name in ["config.json", "model.safetensors.index.json"] {
        let dir = linked("qwen3");
        replace(&dir, name, "");
        // A sparse file: larger than any memory.
        File::options()
            .write(true)
            .open(dir.path().join(name))
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        let error = error(dir.path(), &[name, "1099511627776 bytes"]);
        assert_is!(error, CheckpointError::FileTooLarge { .. });
    }
}
