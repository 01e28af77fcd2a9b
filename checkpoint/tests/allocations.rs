//! What is read takes memory in proportion to its size, whatever stands in it, and is refused before it is
//! taken apart where that cannot be.
//!
//! One test, because all of the process's memory is counted.

use peak_alloc::PeakAlloc;
use std::fs;
use std::path::Path;
use weightd_checkpoint::{Checkpoint, TpPlan};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// The most memory that reading takes for each byte that is read.
const TIMES: usize = 12;
/// The most that a configuration or a plan takes, in bytes, however dense it is.
const KEPT_WHOLE: usize = 64 << 20;

/// The most bytes that `work` has at once, beyond what there was.
fn peak<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let result = work();
    (MEMORY.peak_usage().saturating_sub(before), result)
}

/// Writes a checkpoint and opens it.
fn open(dir: &Path, config: &str, index: Option<&str>, header: &str) -> (usize, Result<usize, String>) {
    fs::write(dir.join("config.json"), config).unwrap();
    let index_path = dir.join("model.safetensors.index.json");
    match index {
        Some(index) => fs::write(index_path, index).unwrap(),
        None => drop(fs::remove_file(index_path)),
    }
    let length = (header.len() as u64).to_le_bytes();
    let file = [&length[..], header.as_bytes()].concat();
    fs::write(dir.join("model.safetensors"), file).unwrap();
    peak(|| match Checkpoint::open(dir) {
        Ok(checkpoint) => Ok(checkpoint.tensors().len()),
        Err(error) => Err(error.to_string()),
    })
}

fn many(count: usize, item: impl Fn(usize) -> String) -> String {
    (0..count).map(item).collect::<Vec<_>>().join(",")
}

#[test]
fn memory_stays_within_a_small_multiple_of_what_is_read() {
    const CONFIG: &str = r#"{"architectures":["A"]}"#;
    const COUNT: usize = 50_000;
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path();
    let entry = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    let tensors = format!("{{{}}}", many(COUNT, |i| format!(r#""{i:x}":{entry}"#)));
    let same = format!("{{{}}}", many(COUNT, |_| format!(r#""":{entry}"#)));
    let texts = many(COUNT, |i| format!(r#""{i:x}":"""#));
    let metadata = format!(r#"{{"__metadata__":{{{texts}}}}}"#);
    let long_name = format!(r#"{{"{}":{entry}}}"#, "n".repeat(10 << 20));
    let long_dtype = format!(r#"{{"a":{}}}"#, entry.replace("U8", &"D".repeat(10 << 20)));
    let long_shape = format!(
        r#"{{"a":{}}}"#,
        entry.replace("[0]", &format!("[{}0]", "0,".repeat(5 << 20)))
    );
    let deep = format!("{{\"a\":{}", "[".repeat(1 << 20));
    for (what, header, tensors) in [
        ("many tensors", tensors, Some(COUNT)),
        ("many tensors of one name", same, None),
        ("many texts", metadata, Some(0)),
        ("a long name", long_name, None),
        ("a long type", long_dtype, None),
        ("a long shape", long_shape, None),
        ("a deep list", deep, None),
    ] {
        let (bytes, opened) = open(dir, CONFIG, None, &header);
        assert_eq!(opened.as_ref().ok().copied(), tensors, "{what}: {opened:?}");
        assert!(
            bytes <= TIMES * header.len(),
            "{what}: {bytes} of {}",
            header.len()
        );
    }
    for (what, index) in [
        ("many tensors", many(COUNT, |i| format!(r#""{i:x}":"a""#))),
        ("many files", many(COUNT, |i| format!(r#""{i:x}":"{i:x}""#))),
        (
            "one tensor many times",
            many(COUNT, |i| format!(r#""a":"{i:x}""#)),
        ),
        ("a deep list", "[".repeat(1 << 20)),
    ] {
        let index = format!(r#"{{"weight_map":{{{index}}}}}"#);
        let (bytes, opened) = open(dir, CONFIG, Some(&index), "{}");
        assert!(opened.is_err(), "{what}");
        assert!(bytes <= TIMES * index.len(), "{what}: {bytes} of {}", index.len());
    }

    // A small text can be much memory here: it is bounded for itself.
    for (what, item, count) in [
        ("numbers", "0", 2_000_000),
        ("lists", "[]", 1_000_000),
        ("objects", "{}", 1_000_000),
        ("objects that hold something", r#"{"":0}"#, 500_000),
        ("as many as may be", r#"{"":0}"#, 65_000),
        ("as many numbers as may be", "0", 260_000),
    ] {
        let list = many(count, |_| item.to_owned());
        let (bytes, opened) = open(
            dir,
            &format!(r#"{{"architectures":["A"],"x":[{list}]}}"#),
            None,
            "{}",
        );
        let is_fine = what.starts_with("as many");
        assert_eq!(opened.is_ok(), is_fine, "{what}: {opened:?}");
        assert!(bytes <= KEPT_WHOLE, "{what}: {bytes}");
        let plan = format!(r#"{{"a":[{list}]}}"#);
        let (bytes, parsed) = peak(|| TpPlan::parse(plan.as_bytes()).map(drop));
        assert!(parsed.is_err(), "{what}");
        assert!(bytes <= KEPT_WHOLE, "{what}: {bytes}");
    }
}
