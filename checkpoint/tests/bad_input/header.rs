//! The headers of safetensors files.

use super::*;

/// The fault of a checkpoint whose single file has these bytes.
#[track_caller]
fn fault_of(bytes: &[u8], expected: &[&str]) -> HeaderFault {
    let dir = linked("qwen3");
    replace(&dir, "model.safetensors", bytes);
    match error(dir.path(), &[&["model.safetensors: "], expected].concat()) {
        CheckpointError::Header { fault, .. } => fault,
        other => panic!("{other:?}"),
    }
}

/// The fault of a file with this header and `data` bytes after it.
#[track_caller]
fn header_fault(header: &str, data: usize, expected: &[&str]) -> HeaderFault {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    fault_of(&bytes, expected)
}

/// An entry of a header.
fn tensor(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

#[test]
fn a_file_that_ends_in_its_header() {
    assert_is!(
        fault_of(b"", &["needs 8 bytes and the file has 0"]),
        HeaderFault::Truncated { .. }
    );
    assert_is!(
        fault_of(b"1234567", &["needs 8 bytes and the file has 7"]),
        HeaderFault::Truncated { .. }
    );
    let whole = fs::read(data("qwen3").join("model.safetensors")).unwrap();
    let fault = fault_of(&whole[..1000], &["truncated", "the file has 1000"]);
    assert_is!(fault, HeaderFault::Truncated { found: 1000, .. });
}

#[test]
fn a_file_that_ends_in_its_data() {
    let whole = fs::read(data("qwen3").join("model.safetensors")).unwrap();
    let fault = fault_of(
        &whole[..whole.len() - 1],
        &["tensor \"model.norm.weight\"", "outside", "download"],
    );
    assert_is!(fault, HeaderFault::OutOfRange { .. });
}

#[test]
fn a_header_beyond_the_format_is_not_read() {
    for length in [100_000_001u64, 1 << 40, u64::MAX] {
        let fault = fault_of(
            &length.to_le_bytes(),
            &[&format!("header of {length} bytes"), "100000000"],
        );
        assert_is!(fault, HeaderFault::Oversized { .. });
    }
}

#[test]
fn a_header_that_is_not_json() {
    let deep = format!("{{\"a\":{}", "[".repeat(100_000));
    for text in ["", "x", "[]", "{", "{}x", " {}", "{\"a\"}", "{\"a\":1,}", &deep] {
        let fault = header_fault(text, 0, &["not"]);
        // Deep nesting is seen where an entry is expected.
        assert_is!(fault, HeaderFault::NotJson { .. } | HeaderFault::BadEntry { .. });
    }
    assert_is!(
        fault_of(b"\x02\0\0\0\0\0\0\0{\xff", &["not JSON"]),
        HeaderFault::NotJson { .. }
    );
}

#[test]
fn an_entry_that_describes_no_tensor() {
    let entries = [
        r#"3"#,
        r#"{}"#,
        r#"{"dtype":"U8","shape":[1]}"#,
        r#"{"dtype":8,"shape":[1],"data_offsets":[0,1]}"#,
        r#"{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}"#,
        r#"{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}"#,
        r#"{"dtype":"U8","shape":[1],"data_offsets":[0]}"#,
        r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}"#,
        r#"{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}"#,
        r#"{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,1]}"#,
    ];
    for entry in entries {
        let fault = header_fault(
            &format!(r#"{{"some.weight":{entry}}}"#),
            1,
            &["tensor \"some.weight\""],
        );
        assert_is!(fault, HeaderFault::BadEntry { .. });
    }
    let fault = header_fault(r#"{"__metadata__":{"format":1}}"#, 0, &["__metadata__"]);
    assert_is!(fault, HeaderFault::BadMetadata { .. });
}

#[test]
fn a_header_that_is_not_utf_8_where_nothing_is_read() {
    for unread in [&b"\"x\":\"\xff\""[..], b"\"x\":{\"\xff\":1}"] {
        let entry = [
            b"{\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],",
            unread,
            b"}}",
        ]
        .concat();
        let bytes = [&(entry.len() as u64).to_le_bytes()[..], &entry, &[7]].concat();
        assert_is!(
            fault_of(&bytes, &["not UTF-8 at byte"]),
            HeaderFault::NotJson { .. }
        );
    }
}

#[test]
fn a_tensor_listed_twice() {
    let header = format!(
        "{{{},{}}}",
        tensor("w", "U8", "[1]", 0, 1),
        tensor("w", "U8", "[1]", 1, 2)
    );
    assert_is!(
        header_fault(&header, 2, &["tensor \"w\": listed twice"]),
        HeaderFault::Duplicate { .. }
    );
}

#[test]
fn an_unknown_dtype() {
    let header = format!("{{{}}}", tensor("w", "F7", "[1]", 0, 1));
    let fault = header_fault(&header, 1, &["tensor \"w\": unknown dtype \"F7\""]);
    assert_is!(fault, HeaderFault::UnknownDtype { .. });
}

#[test]
fn offsets_that_run_backwards_or_out_of_the_file() {
    let header = format!("{{{}}}", tensor("w", "U8", "[1]", 1, 0));
    assert_is!(
        header_fault(&header, 1, &["tensor \"w\"", "1 to 0"]),
        HeaderFault::Backwards { .. }
    );
    let header = format!("{{{}}}", tensor("w", "U8", "[9]", 0, 9));
    let fault = header_fault(&header, 8, &["tensor \"w\"", "0 to 9", "8 bytes of data"]);
    assert_is!(fault, HeaderFault::OutOfRange { .. });
    let header = format!("{{{}}}", tensor("w", "U8", "[1]", u64::MAX - 1, u64::MAX));
    let fault = header_fault(&header, 8, &["tensor \"w\"", &u64::MAX.to_string()]);
    assert_is!(fault, HeaderFault::OutOfRange { .. });
}

#[test]
fn a_shape_that_does_not_fit_its_bytes() {
    let header = format!("{{{}}}", tensor("w", "BF16", "[2,3]", 0, 11));
    let fault = header_fault(
        &header,
        11,
        &[
            "tensor \"w\"",
            "[2, 3] of BF16 takes 12 bytes",
            "0 to 11 are 11 bytes",
        ],
    );
    assert_is!(fault, HeaderFault::WrongSize { needed: Some(12), .. });
    for (dtype, shape) in [
        ("F4", "[3]"),
        ("U8", "[4294967296,4294967296]"),
        ("F64", "[4611686018427387904]"),
    ] {
        let header = format!("{{{}}}", tensor("w", dtype, shape, 0, 1));
        let fault = header_fault(&header, 1, &["tensor \"w\"", "no whole number of bytes"]);
        assert_is!(fault, HeaderFault::WrongSize { needed: None, .. });
    }
}

#[test]
fn a_misaligned_tensor() {
    let header = format!(
        "{{{},{}}}",
        tensor("byte", "U8", "[1]", 0, 1),
        tensor("w", "F32", "[1]", 1, 5)
    );
    let fault = header_fault(&header, 5, &["tensor \"w\"", "begin at 1", "4 bytes of a F32"]);
    assert_is!(fault, HeaderFault::Misaligned { .. });
}

#[test]
fn tensors_that_overlap() {
    let header = format!(
        "{{{},{}}}",
        tensor("a", "U8", "[4]", 0, 4),
        tensor("b", "U8", "[4]", 3, 7)
    );
    let fault = header_fault(
        &header,
        7,
        &["tensor \"b\": begins at 3", "tensor \"a\" that ends at 4"],
    );
    assert_is!(fault, HeaderFault::Overlap { .. });
    let header = format!(
        "{{{},{}}}",
        tensor("a", "U8", "[4]", 0, 4),
        tensor("b", "U8", "[4]", 0, 4)
    );
    assert_is!(
        header_fault(&header, 4, &["\"a\"", "\"b\""]),
        HeaderFault::Overlap { .. }
    );
}

#[test]
fn bytes_that_belong_to_no_tensor() {
    let header = format!(
        "{{{},{}}}",
        tensor("a", "U8", "[4]", 0, 4),
        tensor("b", "U8", "[4]", 6, 10)
    );
    let fault = header_fault(&header, 10, &["2 bytes", "before tensor \"b\"", "4 to 6"]);
    assert_is!(fault, HeaderFault::Hole { .. });
    let header = format!("{{{}}}", tensor("a", "U8", "[4]", 0, 4));
    let fault = header_fault(&header, 7, &["3 bytes", "after the last one", "4 to 7"]);
    assert_is!(fault, HeaderFault::TrailingBytes { .. });
}

#[test]
fn names_that_would_break_the_line_are_escaped() {
    let header = format!("{{{}}}", tensor("a\\nb", "F7", "[1]", 0, 1));
    header_fault(&header, 1, &["tensor \"a\\nb\""]);
}

#[test]
fn what_a_header_says_is_shown_as_it_is_and_not_as_it_would_look() {
    let foul = "F\u{9b}2J\u{202e}\u{3164}";
    let shown = r"F\u{9b}2J\u{202e}\u{3164}";
    let header = format!("{{{}}}", tensor("w", foul, "[1]", 0, 1));
    header_fault(&header, 1, &["unknown dtype \"", shown]);
}

#[test]
fn a_message_stays_short_whatever_the_file_holds() {
    let long = "n".repeat(100_000);
    let faults = [
        header_fault(
            &format!("{{{}}}", tensor(&long, "U8", "[1]", 0, 1)),
            1,
            &["longer than 1024 bytes"],
        ),
        header_fault(
            &format!("{{{}}}", tensor("w", &long, "[1]", 0, 1)),
            1,
            &["unknown dtype"],
        ),
        header_fault(
            &format!("{{\"w\":{{\"shape\":\"{long}\"}}}}"),
            1,
            &["tensor \"w\""],
        ),
    ];
    for fault in faults {
        assert!(fault.to_string().len() < 400, "{fault}");
    }
}
