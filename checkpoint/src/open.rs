//! Opening a checkpoint's directory.

use crate::config::ModelConfig;
use crate::digest::Hash;
use crate::error::{CheckpointError, IndexFault};
use crate::files::SourceFile;
use crate::header::{self, StoredTensor};
use crate::hub;
use crate::index::Index;
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;
use std::sync::Mutex;
use weightd_core::content::manifest::MAX_NAMES;

/// A checkpoint directory whose configuration, index and headers were read and checked, and whose
/// files stay open.
#[derive(Debug)]
pub struct Checkpoint {
    config: ModelConfig,
    config_file: SourceFile,
    index_file: Option<SourceFile>,
    files: Vec<SourceFile>,
    tensors: BTreeMap<String, StoredTensor>,
    /// Computed at most once, whoever asks at the same time.
    pub(crate) digest: Mutex<Option<Hash>>,
}

impl Checkpoint {
    /// Reads configuration, index and headers of the checkpoint in `dir`, and no weights. Each
    /// file is opened once. [`HubCache::find`](crate::HubCache::find) says where the directory of a
    /// repository is.
    pub fn open(dir: &Path) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open_files(dir).map_err(|fault| match hub::completion(dir, &fault) {
            Some(remedy) => CheckpointError::InSnapshot {
                fault: Box::new(fault),
                remedy,
            },
            None => fault,
        })
    }

    fn open_files(dir: &Path) -> Result<Checkpoint, CheckpointError> {
        let directory = open_directory(dir)?;
        let open = |name: &str| SourceFile::open(&directory, dir, name);
        let Some(mut config_file) = open(CONFIG)? else {
            return Err(match list_safetensors(&directory, dir) {
                Err(error @ CheckpointError::OtherFormat { .. }) => error,
                _ => CheckpointError::NoConfig { dir: dir.to_owned() },
            });
        };
        let config = config_file.read_all(CONFIG_CAP)?;
        let config = ModelConfig::parse(&config).map_err(|fault| CheckpointError::Config {
            path: config_file.path.clone(),
            fault,
        })?;

        let mut index_file = open(INDEX)?;
        let (index, mut files) = match &mut index_file {
            Some(file) => {
                let (index, files) = open_indexed(file, open)?;
                (Some(index), files)
            }
            None => (None, vec![open_only(&directory, dir, open)?]),
        };
        check_sizes(&files)?;
        let tensors = read_headers(&mut files, index_file.as_ref())?;
        if let (Some(index), Some(file)) = (index, &index_file) {
            check_index(&index, &files, &tensors).map_err(|fault| index_fault(file, fault))?;
        }
        let checkpoint = Checkpoint {
            config,
            config_file,
            index_file,
            files,
            tensors,
            digest: Mutex::default(),
        };
        // What was read above belongs to the files as they were when they were opened.
        checkpoint.unchanged()?;
        Ok(checkpoint)
    }

    /// What `config.json` says.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The safetensors files that belong to the checkpoint, in the order of their names.
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// Every tensor of these files, by name.
    pub fn tensors(&self) -> &BTreeMap<String, StoredTensor> {
        &self.tensors
    }

    /// The sum of the sizes of all files, in bytes: `config.json`, the weights and the index, which
    /// [`CheckpointId::bytes`](weightd_core::content::CheckpointId::bytes) leaves out.
    pub fn bytes(&self) -> u64 {
        self.all_files().map(|(_, file)| file.bytes).sum()
    }

    /// Asks the kernel again about every file: an error names the first that changed, shrank or
    /// grew since it was opened. What was read is only good if this holds afterwards.
    pub fn unchanged(&self) -> Result<(), CheckpointError> {
        self.all_files().try_for_each(|(_, file)| file.unchanged())
    }

    /// `config.json`, the index if there is one, then the safetensors files: the order in which
    /// identity and digest take them.
    pub(crate) fn all_files(&self) -> impl Iterator<Item = (Part, &SourceFile)> {
        let config = std::iter::once((Part::Config, &self.config_file));
        let index = self.index_file.iter().map(|file| (Part::Index, file));
        let weights = self.files.iter().map(|file| (Part::Weights, file));
        config.chain(index).chain(weights)
    }
}

/// What a file is to its checkpoint; the numbers are those of the digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Part {
    Config = 0,
    Index = 1,
    Weights = 2,
}

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const ONLY_FILE: &str = "model.safetensors";
/// The most that is read of `config.json`, in bytes; real ones reach 100 KB.
const CONFIG_CAP: u64 = 4 << 20;
/// The most that is read of an index, in bytes; that of a model with 384 experts in 61 layers
/// takes some 20 MB.
const INDEX_CAP: u64 = 64 << 20;

/// The most that all weights may take, in bytes: several times the largest model's. It bounds what
/// is kept per chunk of them.
const WEIGHTS_CAP: u64 = 16 << 40;

fn open_directory(dir: &Path) -> Result<OwnedFd, CheckpointError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let path = || dir.to_owned();
    rustix::fs::open(dir, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT => CheckpointError::NoSuchDirectory { path: path() },
        Errno::NOTDIR => CheckpointError::NotADirectory { path: path() },
        errno => CheckpointError::io("open", dir, errno),
    })
}

/// Opens the files that the index names, in the order of their names. Other safetensors files
/// are not part of the checkpoint: some carry the same weights once more in one file.
fn open_indexed(
    index_file: &mut SourceFile,
    open: impl Fn(&str) -> Result<Option<SourceFile>, CheckpointError>,
) -> Result<(Index, Vec<SourceFile>), CheckpointError> {
    let bytes = index_file.read_all(INDEX_CAP)?;
    let index = Index::parse(&bytes).map_err(|fault| index_fault(index_file, fault))?;
    let mut files = Vec::new();
    for name in index.files() {
        let missing = || IndexFault::MissingFile {
            tensor: index.a_tensor_of(name),
            file: name.to_owned(),
        };
        files.push(open(name)?.ok_or_else(|| index_fault(index_file, missing()))?);
    }
    Ok((index, files))
}

/// Opens the one safetensors file of a directory without an index.
fn open_only(
    directory: &OwnedFd,
    dir: &Path,
    open: impl Fn(&str) -> Result<Option<SourceFile>, CheckpointError>,
) -> Result<SourceFile, CheckpointError> {
    if let Some(file) = open(ONLY_FILE)? {
        return Ok(file);
    }
    let found = list_safetensors(directory, dir)?;
    match found.as_slice() {
        [name] if !is_one_of_several(name) => {
            open(name)?.ok_or_else(|| CheckpointError::NoSafetensors { dir: dir.to_owned() })
        }
        _ => Err(CheckpointError::NoIndex {
            dir: dir.to_owned(),
            found,
        }),
    }
}

/// Whether `name` is `NAME-00001-of-00006.safetensors`, one of several files that transformers
/// writes: the others, and the index, are missing.
fn is_one_of_several(name: &str) -> bool {
    let stem = name.trim_end_matches(".safetensors");
    let count = stem
        .rsplit_once("-of-")
        .and_then(|(_, count)| count.parse::<u32>().ok());
    count.is_some_and(|count| count > 1)
}

/// The names of the safetensors files in the directory, in order; an error if there is none.
fn list_safetensors(directory: &OwnedFd, dir: &Path) -> Result<Vec<String>, CheckpointError> {
    /// How weights are stored elsewhere.
    const OTHERS: [&str; 10] = [
        "bin", "pt", "pth", "gguf", "ggml", "ckpt", "h5", "msgpack", "onnx", "npz",
    ];
    let (mut safetensors, mut others) = (Vec::new(), Vec::new());
    let failed = |errno| CheckpointError::io("list", dir, errno);
    for entry in rustix::fs::Dir::read_from(directory).map_err(failed)? {
        let name = String::from_utf8_lossy(entry.map_err(failed)?.file_name().to_bytes()).into_owned();
        match name.rsplit_once('.') {
            Some((_, "safetensors")) => safetensors.push(name),
            Some((_, extension)) if OTHERS.contains(&extension) => others.push(name),
            _ => {}
        }
    }
    safetensors.sort();
    others.sort();
    match (safetensors.is_empty(), others.is_empty()) {
        (false, _) => Ok(safetensors),
        (true, false) => Err(CheckpointError::OtherFormat {
            dir: dir.to_owned(),
            found: others,
        }),
        (true, true) => Err(CheckpointError::NoSafetensors { dir: dir.to_owned() }),
    }
}

fn check_sizes(files: &[SourceFile]) -> Result<(), CheckpointError> {
    let mut bytes = 0u64;
    for file in files {
        bytes = bytes.saturating_add(file.bytes);
        if bytes > WEIGHTS_CAP {
            return Err(CheckpointError::TooLarge {
                path: file.path.clone(),
                bytes,
                cap: WEIGHTS_CAP,
            });
        }
    }
    Ok(())
}

/// Reads the header of every file. All tensors of a file count, also those that the index does not
/// name, because engines load whole files.
fn read_headers(
    files: &mut [SourceFile],
    index_file: Option<&SourceFile>,
) -> Result<BTreeMap<String, StoredTensor>, CheckpointError> {
    let mut tensors = BTreeMap::<String, StoredTensor>::new();
    for number in 0..files.len() {
        let read = header::read(&mut files[number], number)?;
        if tensors.len() + read.len() > MAX_NAMES {
            let (path, cap) = (files[number].path.clone(), MAX_NAMES);
            return Err(CheckpointError::TooManyTensors { path, cap });
        }
        for (tensor, stored) in read {
            match tensors.entry(tensor) {
                Entry::Vacant(entry) => _ = entry.insert(stored),
                Entry::Occupied(other) => {
                    let fault = IndexFault::StoredTwice {
                        first: files[other.get().file].name.clone(),
                        second: files[number].name.clone(),
                        tensor: other.remove_entry().0,
                    };
                    let index_file =
                        index_file.expect("names in one file differ, and an index names several");
                    return Err(index_fault(index_file, fault));
                }
            }
        }
    }
    Ok(tensors)
}

fn check_index(
    index: &Index,
    files: &[SourceFile],
    tensors: &BTreeMap<String, StoredTensor>,
) -> Result<(), IndexFault> {
    // Both are in the order of the names.
    let mut tensors = tensors.iter();
    let mut is_there = |tensor: &str, file: &str| {
        let found = tensors.find(|(name, _)| name.as_str() >= tensor);
        found.is_some_and(|(name, stored)| name == tensor && files[stored.file].name == file)
    };
    match index
        .file_of
        .iter()
        .find(|(tensor, file)| !is_there(tensor, file))
    {
        None => Ok(()),
        Some((tensor, file)) => Err(IndexFault::MissingTensor {
            tensor: tensor.clone(),
            file: file.to_string(),
        }),
    }
}

fn index_fault(file: &SourceFile, fault: IndexFault) -> CheckpointError {
    CheckpointError::Index {
        path: file.path.clone(),
        fault,
    }
}
