//! Numbers and texts that JSON has and no checkpoint should.

use super::*;

/// What opening says where the header of the only file is this.
#[track_caller]
fn header(text: &str) -> CheckpointError {
    let dir = linked("qwen3");
    let file = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &[0; 64]].concat();
    replace(&dir, "model.safetensors", file);
    error(dir.path(), &["model.safetensors: "])
}

const NUMBERS: [&str; 9] = [
    "1e400",
    "-1",
    "-0.0",
    "1.5",
    "18446744073709551616",
    "99999999999999999999999999999999999999",
    "NaN",
    "Infinity",
    "null",
];

#[test]
fn numbers_in_a_header_that_are_no_sizes() {
    for number in NUMBERS {
        for entry in [
            format!(r#"{{"dtype":"U8","shape":[{number}],"data_offsets":[0,64]}}"#),
            format!(r#"{{"dtype":"U8","shape":[64],"data_offsets":[{number},64]}}"#),
            format!(r#"{{"dtype":"U8","shape":[64],"data_offsets":[0,{number}]}}"#),
        ] {
            let error = header(&format!(r#"{{"a":{entry}}}"#));
            let CheckpointError::Header { fault, .. } = error else {
                panic!("{number}: {error:?}");
            };
            let known = matches!(fault, HeaderFault::BadEntry { .. } | HeaderFault::NotJson { .. });
            assert!(known, "{number}: {fault:?}");
        }
    }
    // The largest that there is is a size, of more than any file has.
    for (shape, offsets) in [
        ("18446744073709551615", "0,64"),
        ("18446744073709551615,18446744073709551615", "0,64"),
        ("0,18446744073709551615", "0,0"),
        ("64", "0,18446744073709551615"),
        ("64", "18446744073709551615,18446744073709551615"),
    ] {
        let entry = format!(r#"{{"dtype":"U8","shape":[{shape}],"data_offsets":[{offsets}]}}"#);
        let error = header(&format!(r#"{{"a":{entry}}}"#));
        let CheckpointError::Header { fault, .. } = error else {
            panic!("{shape}: {error:?}");
        };
        let known = matches!(
            fault,
            HeaderFault::WrongSize { .. } | HeaderFault::OutOfRange { .. }
        );
        assert!(known, "{shape}: {fault:?}");
    }
}

#[test]
fn texts_in_a_header_that_are_none() {
    let entry = r#"{"dtype":"U8","shape":[64],"data_offsets":[0,64]}"#;
    for name in [r"\ud800", r"\udc00\ud800", r"\u12", "\\x", "\u{1b}", "\n"] {
        for text in [
            format!(r#"{{"{name}":{entry}}}"#),
            format!(r#"{{"__metadata__":{{"{name}":"x"}},"a":{entry}}}"#),
            format!(r#"{{"a":{}}}"#, entry.replace("U8", name)),
        ] {
            let error = header(&text);
            assert_is!(error, CheckpointError::Header { .. });
        }
    }
    // The same field twice is none of both.
    let twice = entry.replacen(r#""shape":[64]"#, r#""shape":[64],"shape":[1]"#, 1);
    assert_is!(
        header(&format!(r#"{{"a":{twice}}}"#)),
        CheckpointError::Header { .. }
    );
}

#[test]
fn numbers_in_a_configuration_that_are_no_counts() {
    for number in NUMBERS
        .iter()
        .filter(|number| !["null", "NaN", "Infinity"].contains(number))
    {
        let dir = linked("qwen3");
        let config = format!(r#"{{"architectures":["A"],"hidden_size":{number}}}"#);
        replace(&dir, "config.json", config);
        assert_is!(
            error(dir.path(), &["config.json: "]),
            CheckpointError::Config { .. }
        );
    }
    for text in [
        r#"{"architectures":["\ud800"]}"#,
        &"[".repeat(100_000),
        &r#"{"a":"#.repeat(10_000),
    ] {
        let dir = linked("qwen3");
        replace(&dir, "config.json", text);
        assert_is!(
            error(dir.path(), &["config.json: "]),
            CheckpointError::Config {
                fault: ConfigFault::NotJson { .. },
                ..
            }
        );
    }
}
