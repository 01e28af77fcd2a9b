//! Writing mapped weights as a safetensors file.

use serde_json::{Map, Value, json};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use weightd_core::plan::placement::Placement;
use weightd_gpu::{TensorView, Weights};

/// Why weights were not saved. The directory has no new file then.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: cannot save the weights: {source}; give a directory that this user can write to and that has room",
    .path.display()
)]
pub struct SaveError {
    /// The file or directory.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

/// Writes the weights of a rank to `dir`, which is made if it is not there, as
/// `dp{dp_rank}_pp{pp_rank}_tp{tp_rank}.safetensors`, and returns the file's path.
///
/// Tensors keep their names, types and shapes; their elements are written in row-major order,
/// also those of strided views. The metadata of the file names each alias with its tensor. The
/// file appears whole, replacing one that was there.
pub fn save(weights: &Weights, placement: &Placement, dir: &Path) -> Result<PathBuf, SaveError> {
    let Placement {
        dp_rank,
        pp_rank,
        tp_rank,
        ..
    } = placement;
    let name = format!("dp{dp_rank}_pp{pp_rank}_tp{tp_rank}.safetensors");
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| SaveError { path, source }
    };
    std::fs::create_dir_all(dir).map_err(failed(dir))?;
    let path = dir.join(&name);
    let partial = dir.join(format!(".{name}.{}.partial", std::process::id()));
    let saved = write_file(weights, &partial).and_then(|()| std::fs::rename(&partial, &path));
    if saved.is_err() {
        // What is left of a failed attempt; if it cannot go, the error says where it is.
        let _ = std::fs::remove_file(&partial);
    }
    saved.map_err(failed(&path))?;
    Ok(path)
}

fn write_file(weights: &Weights, path: &Path) -> io::Result<()> {
    // Wide elements first, so that all are aligned in the file; then by name.
    let mut tensors: Vec<TensorView<'_>> = weights.tensors().collect();
    tensors.sort_by(|a, b| {
        b.dtype
            .bits()
            .cmp(&a.dtype.bits())
            .then_with(|| a.name.cmp(b.name))
    });
    let file = OpenOptions::new().write(true).create_new(true).open(path)?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    write_header(weights, &tensors, &mut out)?;
    for tensor in &tensors {
        let memory = tensor.fetch().map_err(io::Error::other)?;
        tensor.runs(&memory).try_for_each(|run| out.write_all(run))?;
    }
    out.into_inner()
        .map_err(io::IntoInnerError::into_error)?
        .sync_all()
}

/// The header of the format (<https://github.com/huggingface/safetensors#format>).
fn write_header(weights: &Weights, tensors: &[TensorView<'_>], out: &mut BufWriter<File>) -> io::Result<()> {
    let mut header = Map::new();
    let aliases: Map<String, Value> = weights
        .aliases()
        .map(|(alias, tensor)| (alias.to_owned(), json!(tensor.name)))
        .collect();
    if !aliases.is_empty() {
        header.insert("__metadata__".to_owned(), Value::Object(aliases));
    }
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.packed_bytes();
        let entry =
            json!({ "dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [start, end] });
        header.insert(tensor.name.to_owned(), entry);
        start = end;
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)
}
