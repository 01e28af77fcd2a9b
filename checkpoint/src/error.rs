//! What can be wrong with a checkpoint, by cause.

use crate::rules::Rank;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use weightd_core::content::Dtype;
use weightd_core::plan::placement::Parallel;
use weightd_core::text::short;

/// Why a checkpoint cannot be used. Each message is one line that says what is wrong, where, and
/// what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum CheckpointError {
    /// Nothing is there.
    #[error("{}: no such directory; give the directory that holds config.json and the safetensors files", .path.display())]
    NoSuchDirectory { path: PathBuf },
    /// A snapshot of the Hugging Face cache is not whole.
    #[error("{fault}; {remedy}")]
    InSnapshot {
        #[source]
        fault: Box<CheckpointError>,
        remedy: String,
    },
    /// A file was given for the directory.
    #[error("{}: not a directory; give the directory that holds config.json and the safetensors files", .path.display())]
    NotADirectory { path: PathBuf },
    /// The directory has no `config.json`.
    #[error("{}: no config.json; give a directory as `save_pretrained` of transformers writes it", .dir.display())]
    NoConfig { dir: PathBuf },
    /// The directory has no weights at all.
    #[error("{}: no safetensors files; is the download complete?", .dir.display())]
    NoSafetensors { dir: PathBuf },
    /// The directory has weights, but none as safetensors.
    #[error(
        "{}: no safetensors files, only {}; weightd reads safetensors alone: convert the weights with \
         `save_pretrained` of transformers", .dir.display(), list(.found)
    )]
    OtherFormat { dir: PathBuf, found: Vec<String> },
    /// Several safetensors files, and nothing says which belong together.
    #[error(
        "{}: holds {} but no model.safetensors.index.json to say which files belong together; download or write \
         the index too, or keep a single file",
        .dir.display(), list(.found)
    )]
    NoIndex { dir: PathBuf, found: Vec<String> },
    /// A fifo, socket, device or directory where a file should be.
    #[error("{}: is {kind}; a checkpoint consists of regular files", .path.display())]
    NotRegular { path: PathBuf, kind: &'static str },
    /// A symbolic link to nothing.
    #[error("{}: is a symbolic link to nothing; is the download complete?", .path.display())]
    DanglingLink { path: PathBuf },
    /// A JSON file beyond any that a model needs.
    #[error("{}: {bytes} bytes, and {cap} is the most that is read; is it the right file?", .path.display())]
    FileTooLarge { path: PathBuf, bytes: u64, cap: u64 },
    /// More weights than any model has.
    #[error(
        "{}: with this file, the weights take {bytes} bytes, and {cap} is the most that is read; are the files right?",
        .path.display()
    )]
    TooLarge { path: PathBuf, bytes: u64, cap: u64 },
    /// More tensors than any model has.
    #[error("{}: with this file, there are more than {cap} tensors; are the files right?", .path.display())]
    TooManyTensors { path: PathBuf, cap: usize },
    /// A file was written, truncated or replaced after it was opened.
    #[error(
        "{}: changed while it was read ({}); load again when nothing writes to it",
        .path.display(), difference(*.was_bytes, *.now_bytes)
    )]
    Changed {
        path: PathBuf,
        was_bytes: u64,
        now_bytes: u64,
    },
    /// The operating system refused.
    #[error("{}: cannot {doing}: {source}{}", .path.display(), hint(.source))]
    Io {
        doing: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// `config.json` is not what it should be.
    #[error("{}: {fault}", .path.display())]
    Config { path: PathBuf, fault: ConfigFault },
    /// The index is not what it should be, or contradicts the files.
    #[error("{}: {fault}", .path.display())]
    Index { path: PathBuf, fault: IndexFault },
    /// The header of a safetensors file is not what it should be.
    #[error("{}: {fault}; {}", .path.display(), .fault.remedy())]
    Header { path: PathBuf, fault: HeaderFault },
    /// A quantization was asked for that the checkpoint does not have.
    #[error(
        "quantization {asked:?}: the weights of this checkpoint are not quantized (config.json has no \
         quantization_config), and weightd does not quantize while loading; give a checkpoint that is \
         quantized with it, or leave the option out"
    )]
    OnlineQuantization { asked: String },
    /// An override of a quantization that the checkpoint does not have.
    #[error(
        "the weights of this checkpoint are not quantized (config.json has no quantization_config), and weightd does \
         not quantize while loading; give a checkpoint that is quantized, or leave the override out"
    )]
    OverrideOfNothing,
    /// The rank is outside the world.
    #[error(
        "rank dp {} pp {} tp {} is outside the world of {} x {} x {}: ranks count from 0",
        .rank.dp, .rank.pp, .rank.tp, .parallel.data, .parallel.pipeline, .parallel.tensor
    )]
    NoSuchRank { rank: Rank, parallel: Parallel },
    /// A name that weightd keeps for itself.
    #[error(
        "extra field {name:?} of the key: names that begin with \"weightd.\" are weightd's own; use another"
    )]
    ReservedName { name: String },
    /// Another quantization was asked for than the checkpoint has.
    #[error(
        "quantization {asked:?}: config.json says quantization_config.quant_method {stored:?}; ask for that, or \
         leave the option out"
    )]
    OtherQuantization { asked: String, stored: String },
    /// A text of the key is longer than a key may be.
    #[error("key field {field}: {bytes} bytes, and {cap} is the most that a key carries; shorten it")]
    KeyTooLong { field: String, bytes: usize, cap: usize },
}

/// What is wrong with `config.json`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum ConfigFault {
    #[error("not JSON ({detail}); download or write the file again")]
    NotJson { detail: String },
    #[error("{fault}; correct the file")]
    TooMuch { fault: TooMuch },
    #[error("field {field}: is {found}, expected {expected}; correct the file")]
    WrongType {
        field: String,
        found: String,
        expected: &'static str,
    },
    #[error("field {field}: {found} is out of range, expected 1 to {most}; correct the file")]
    OutOfRange { field: String, found: String, most: u64 },
    #[error("field {field}: missing, and needed to know what the model is; add it")]
    Missing { field: &'static str },
    #[error("field {field}: {bytes} bytes, and {cap} is the most; correct the file")]
    TooLong { field: String, bytes: usize, cap: usize },
}

/// More in a JSON text than in any that a model has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("more than {cap} {what}, and no model needs as many")]
pub struct TooMuch {
    /// What there is too much of: values, or objects.
    pub what: &'static str,
    /// The most that is read.
    pub cap: usize,
}

/// What is wrong with `model.safetensors.index.json`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum IndexFault {
    #[error("not an index as transformers writes it ({detail}); download or write the file again")]
    Malformed { detail: String },
    #[error("weight_map names no tensor; download or write the file again")]
    Empty,
    #[error("weight_map names tensor {tensor:?} twice, in {first:?} and {second:?}; keep one of them")]
    NamedTwice {
        tensor: String,
        first: String,
        second: String,
    },
    #[error(
        "tensor {tensor:?} is said to be in \"{file}\", which is not the plain name of a file beside the index; correct the index"
    )]
    NotAPlainName { tensor: String, file: String },
    #[error("tensor {tensor:?} is said to be in {file:?}, which is not there; is the download complete?")]
    MissingFile { tensor: String, file: String },
    #[error(
        "tensor {tensor:?} is said to be in {file:?}, whose header lacks it; index and files are not of one checkpoint"
    )]
    MissingTensor { tensor: String, file: String },
    #[error(
        "tensor {tensor:?} is stored twice, in {first:?} and {second:?}, so that engines may differ in which they take; remove one"
    )]
    StoredTwice {
        tensor: String,
        first: String,
        second: String,
    },
}

/// What is wrong with the header of a safetensors file. Offsets count from the start of the data,
/// as in the header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum HeaderFault {
    #[error("truncated: the header needs {needed} bytes and the file has {found}")]
    Truncated { needed: u64, found: u64 },
    #[error("header of {bytes} bytes, and the format allows {cap}")]
    Oversized { bytes: u64, cap: u64 },
    #[error("the header is not JSON ({detail})")]
    NotJson { detail: String },
    #[error("tensor {tensor:?}: is not {{dtype, shape, data_offsets}} ({detail})")]
    BadEntry { tensor: String, detail: String },
    #[error("__metadata__ is not a map of texts ({detail})")]
    BadMetadata { detail: String },
    #[error("tensor {tensor:?}: listed twice")]
    Duplicate { tensor: String },
    #[error("more than {cap} tensors, and no model has as many")]
    TooMany { cap: usize },
    #[error("tensor {tensor:?}: unknown dtype \"{dtype}\"")]
    UnknownDtype { tensor: String, dtype: String },
    #[error("tensor {tensor:?}: data_offsets {begin} to {end} run backwards")]
    Backwards { tensor: String, begin: u64, end: u64 },
    #[error(
        "tensor {tensor:?}: data_offsets {begin} to {end} lie outside the {data} bytes of data that the file holds"
    )]
    OutOfRange {
        tensor: String,
        begin: u64,
        end: u64,
        data: u64,
    },
    #[error("tensor {tensor:?}: data_offsets begin at {begin}, not a multiple of the {width} bytes of a {}", .dtype.name())]
    Misaligned {
        tensor: String,
        begin: u64,
        dtype: Dtype,
        width: u64,
    },
    #[error("tensor {tensor:?}: shape {shape:?} of {} takes {}, and data_offsets {begin} to {end} are {} bytes", .dtype.name(), takes(.needed), end - begin)]
    WrongSize {
        tensor: String,
        shape: Vec<u64>,
        dtype: Dtype,
        needed: Option<u64>,
        begin: u64,
        end: u64,
    },
    #[error("tensor {tensor:?}: begins at {begin}, inside tensor {other:?} that ends at {end}")]
    Overlap {
        tensor: String,
        begin: u64,
        other: String,
        end: u64,
    },
    #[error("{} bytes that belong to no tensor before tensor {tensor:?} (data from {from} to {begin})", begin - from)]
    Hole { tensor: String, from: u64, begin: u64 },
    #[error("{} bytes that belong to no tensor after the last one (data from {from} to {data})", data - from)]
    TrailingBytes { from: u64, data: u64 },
}

impl CheckpointError {
    pub(crate) fn io(doing: &'static str, path: &Path, source: impl Into<std::io::Error>) -> CheckpointError {
        CheckpointError::Io {
            doing,
            path: path.to_owned(),
            source: source.into(),
        }
    }
}

impl HeaderFault {
    fn remedy(&self) -> &'static str {
        match self {
            HeaderFault::UnknownDtype { .. } => "convert the tensor to a type of the safetensors format",
            HeaderFault::Misaligned { .. } => {
                "write the file again with the safetensors library, which aligns tensors"
            }
            _ => "download or write the file again",
        }
    }
}

/// What stands in a file, as far as a message shows it.
pub(crate) fn excerpt(text: impl Display) -> String {
    const SHOWN: usize = 200;
    short(&text.to_string(), SHOWN)
}

/// The first names of a list, and how many more there are.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 4;
    let shown = names
        .iter()
        .take(SHOWN)
        .map(excerpt)
        .collect::<Vec<_>>()
        .join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn difference(was_bytes: u64, now_bytes: u64) -> String {
    match was_bytes == now_bytes {
        true => "its times moved".to_owned(),
        false => format!("{was_bytes} bytes then, {now_bytes} now"),
    }
}

fn hint(error: &std::io::Error) -> &'static str {
    use rustix::io::Errno;
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => "; raise the limit with `ulimit -n`",
        Some(Errno::ACCESS) => "; let this user read it",
        _ => "",
    }
}

fn takes(needed: &Option<u64>) -> String {
    match needed {
        Some(bytes) => format!("{bytes} bytes"),
        None => "no whole number of bytes that 64 bits hold".to_owned(),
    }
}
