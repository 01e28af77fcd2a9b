//! The checkpoints that the tests load.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};
use weightd_checkpoint::Checkpoint;

/// A checkpoint that transformers wrote: `llama` or `qwen3`.
pub fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/data")
        .join(name)
}

/// Copies a checkpoint, so that it can be changed.
pub fn copy_of(model: &Path, to: &Path) -> PathBuf {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(model).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    to.to_owned()
}

/// A checkpoint so large that its loading can be met half-way: `bytes` zeros, which take no room
/// on disk.
pub fn large_checkpoint(to: &Path, bytes: u64) -> PathBuf {
    fs::create_dir_all(to).unwrap();
    let config = r#"{ "architectures": ["PlainModel"], "model_type": "plain", "torch_dtype": "float32" }"#;
    fs::write(to.join("config.json"), config).unwrap();
    let entry = serde_json::json!({ "dtype": "F32", "shape": [bytes / 4], "data_offsets": [0, bytes] });
    let mut header = serde_json::json!({ "weight": entry }).to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    let path = to.join("model.safetensors");
    fs::write(&path, &file).unwrap();
    let whole = file.len() as u64 + bytes;
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(whole)
        .unwrap();
    to.to_owned()
}

/// Waits until a change of the model's files would show in their times; false where the file system has no
/// such times.
pub fn is_steady(model: &Path) -> bool {
    let until = Instant::now() + Duration::from_secs(10);
    while Instant::now() < until {
        if Checkpoint::open(model).unwrap().identity().files.is_some() {
            return true;
        }
        sleep(Duration::from_millis(100));
    }
    false
}
