//! Every input of every fuzz target's corpus, on stable.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

type Body = fn(&[u8]);

/// The bodies of the fuzz targets, by the names of the targets. What is new in `fuzz/fuzz_targets/` comes in here too.
fn bodies() -> BTreeMap<&'static str, Body> {
    let bodies: [(_, Body); 9] = [
        ("attach_session", weightd_core::fuzz::attach_session),
        ("frame_decoder", weightd_core::fuzz::frame_decoder),
        ("manifest", weightd_core::fuzz::manifest),
        ("message", weightd_core::fuzz::message),
        ("pair", weightd_core::fuzz::pair),
        ("read_plan", weightd_core::fuzz::read_plan),
        ("safetensors_header", weightd_checkpoint::fuzz::safetensors_header),
        ("server_session", weightd_core::fuzz::server_session),
        ("tp_plan", weightd_checkpoint::fuzz::tp_plan),
    ];
    bodies.into()
}

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz")
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    entries.map(|entry| entry.expect("an entry").path()).collect()
}

fn stems(directory: &str) -> BTreeSet<String> {
    let stem = |path: PathBuf| {
        path.file_stem()
            .expect("a name")
            .to_str()
            .expect("text")
            .to_owned()
    };
    entries(&fuzz().join(directory)).into_iter().map(stem).collect()
}

#[test]
fn every_target_has_a_corpus_and_is_replayed() {
    let replayed: BTreeSet<String> = bodies().into_keys().map(str::to_owned).collect();
    assert_eq!(stems("fuzz_targets"), replayed, "see bodies()");
    assert_eq!(
        stems("corpus"),
        replayed,
        "a corpus for each target, and no other"
    );
}

#[test]
fn every_input_of_every_corpus_passes() {
    for (target, body) in bodies() {
        let inputs = entries(&fuzz().join("corpus").join(target));
        assert!(!inputs.is_empty(), "{target} has no input");
        for input in inputs {
            let bytes = fs::read(&input).expect("a readable input");
            if std::panic::catch_unwind(|| body(&bytes)).is_err() {
                panic!("{} fails", input.display());
            }
        }
    }
}
