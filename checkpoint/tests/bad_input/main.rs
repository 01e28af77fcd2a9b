//! Each way in which a checkpoint can be broken is one error: typed by cause, on one line, naming
//! the file, the tensor and the numbers.

macro_rules! assert_is {
    ($error:expr, $pattern:pat) => {{
        let error = $error;
        assert!(matches!(error, $pattern), "{error:?}");
    }};
}

mod change;
mod config;
mod directory;
mod header;
mod index;
mod numbers;
mod works;

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use weightd_checkpoint::{Checkpoint, CheckpointError, ConfigFault, HeaderFault, IndexFault};
use weightd_core::text::is_hidden;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/data")
        .join(name)
}

/// A directory of links to a checkpoint that transformers wrote, so that single files can be
/// replaced.
fn linked(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(data(name).canonicalize().unwrap()).unwrap() {
        let path = entry.unwrap().path();
        symlink(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    dir
}

/// Replaces a file of a linked directory.
fn replace(dir: &TempDir, name: &str, bytes: impl AsRef<[u8]>) {
    let path = dir.path().join(name);
    let _ = fs::remove_file(&path);
    fs::write(path, bytes).unwrap();
}

/// The error of opening `dir`; its message is one line that holds all of `expected`.
#[track_caller]
fn error(dir: &Path, expected: &[&str]) -> CheckpointError {
    let error = Checkpoint::open(dir).expect_err("broken");
    check_message(&error, expected);
    error
}

#[track_caller]
fn check_message(error: &CheckpointError, expected: &[&str]) {
    let message = error.to_string();
    for part in expected {
        assert!(message.contains(part), "{part:?} is missing in: {message}");
    }
    assert!(
        !message.contains(is_hidden),
        "more than one line, or not all of it to be seen: {message:?}"
    );
}
