use super::*;
use crate::tests::{copy_of, data, write_safetensors};
use proptest::prelude::*;
use std::fs;
use std::path::Path;
use weightd_core::content::Dtype;
use weightd_core::plan::read::Source;

/// The digest as the module's head describes it, from whole files.
fn reference(files: &[(u8, Vec<u8>)]) -> Hash {
    let mut text = b"weightd checkpoint digest 1\n".to_vec();
    for (part, bytes) in files {
        text.push(*part);
        text.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        bytes
            .chunks(4 * 1024 * 1024)
            .for_each(|chunk| text.extend_from_slice(blake3::hash(chunk).as_bytes()));
    }
    *blake3::hash(&text).as_bytes()
}

fn digest(checkpoint: &Checkpoint) -> Hash {
    checkpoint
        .digest(&LoadOptions::default(), &Progress::default())
        .unwrap()
}

fn digest_of(dir: &Path) -> Hash {
    digest(&Checkpoint::open(dir).unwrap())
}

/// A checkpoint of one file of three chunks, whose elements lie across their ends.
fn large() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(data("llama").join("config.json"), dir.path().join("config.json")).unwrap();
    let bytes: Vec<u8> = (0..2 * CHUNK_BYTES + 4).map(|i| (i % 251) as u8).collect();
    write_safetensors(
        &dir.path().join("model.safetensors"),
        &[("b", Dtype::F32, &[CHUNK_BYTES / 2 + 1], &bytes)],
    );
    dir
}

#[test]
fn the_digest_is_the_documented_one() {
    let dir = data("llama");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let mut bytes = vec![
        (0, fs::read(dir.join("config.json")).unwrap()),
        (1, fs::read(dir.join("model.safetensors.index.json")).unwrap()),
    ];
    let weights = checkpoint.files().iter();
    bytes.extend(weights.map(|file| (2, fs::read(&file.path).unwrap())));
    assert_eq!(digest(&checkpoint), reference(&bytes));
}

#[test]
fn files_of_several_chunks_are_hashed_chunk_by_chunk() {
    let dir = large();
    let read = |name| fs::read(dir.path().join(name)).unwrap();
    let bytes = [(0, read("config.json")), (2, read("model.safetensors"))];
    assert!(bytes[1].1.len() as u64 > 2 * CHUNK_BYTES);
    assert_eq!(digest_of(dir.path()), reference(&bytes));
}

#[test]
fn equal_bytes_elsewhere_have_the_same_digest() {
    for name in ["llama", "qwen3"] {
        assert_eq!(digest_of(copy_of(name).path()), digest_of(&data(name)));
    }
}

#[test]
fn a_byte_more_in_config_or_index_changes_the_digest() {
    for name in ["config.json", "model.safetensors.index.json"] {
        let copy = copy_of("llama");
        let before = digest_of(copy.path());
        let mut bytes = fs::read(copy.path().join(name)).unwrap();
        bytes.push(b' ');
        fs::write(copy.path().join(name), bytes).unwrap();
        assert_ne!(digest_of(copy.path()), before, "{name}");
    }
}

#[test]
fn progress_counts_every_byte() {
    let (checkpoint, progress) = (Checkpoint::open(&data("llama")).unwrap(), Progress::default());
    checkpoint.digest(&LoadOptions::default(), &progress).unwrap();
    let all = fs::read_dir(data("llama")).unwrap().map(|entry| entry.unwrap());
    let used = all.filter(|entry| entry.file_name() != "generation_config.json");
    let bytes: u64 = used.map(|entry| entry.metadata().unwrap().len()).sum();
    assert_eq!((checkpoint.bytes(), progress.bytes_read()), (bytes, bytes));
}

#[test]
fn bytes_that_are_others_when_they_are_read_again_are_noticed() {
    let dir = large();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let file = fs::read(dir.path().join("model.safetensors")).unwrap();
    let tensor = &checkpoint.tensors()["b"];
    assert_ne!(tensor.offset % 4, 0, "elements lie across the ends of chunks");
    let source = Source {
        file: 0,
        offset: tensor.offset,
        bytes: tensor.bytes,
        element: 4,
        parts: Vec::new(),
    };
    let plan = ReadPlan::new(vec![file.len() as u64], vec![], vec![source], vec![]).unwrap();
    let blocks: Vec<Block> = plan.blocks(CHUNK_BYTES).collect();
    let read = |block: &Block| {
        let range = block.read();
        file[range.start as usize..range.end as usize].to_vec()
    };
    // In any order, as workers are.
    let add = |change: &dyn Fn(usize, &mut Vec<u8>)| {
        let hashes = Hashes::new(&checkpoint);
        for (number, block) in blocks.iter().enumerate().rev() {
            let mut bytes = read(block);
            change(number, &mut bytes);
            hashes.add(block, &bytes)?;
        }
        Ok(hashes.digest())
    };
    assert_eq!(add(&|_, _| {}).unwrap(), digest(&checkpoint));
    let in_header: Result<Hash, CheckpointError> = add(&|number, bytes| bytes[9] ^= (number == 0) as u8);
    assert!(
        matches!(in_header, Err(CheckpointError::Changed { .. })),
        "{in_header:?}"
    );
    let read_twice = add(&|number, bytes| bytes[0] ^= (number == 1) as u8);
    assert!(
        matches!(read_twice, Err(CheckpointError::Changed { .. })),
        "{read_twice:?}"
    );
    // A byte of the data that is read once is just another byte, and another digest.
    let in_data = add(&|number, bytes| bytes[10] ^= (number == 1) as u8);
    assert_ne!(in_data.unwrap(), digest(&checkpoint));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn one_flipped_bit_anywhere_changes_the_digest(
        file in any::<proptest::sample::Index>(),
        at in any::<proptest::sample::Index>(),
        bit in 0u8..8,
    ) {
        let copy = copy_of("llama");
        let checkpoint = Checkpoint::open(copy.path()).unwrap();
        let before = digest(&checkpoint);
        let file = &checkpoint.files()[file.index(checkpoint.files().len())];
        let mut bytes = fs::read(&file.path).unwrap();
        let data = file.parsed.bytes as usize;
        let at = data + at.index(bytes.len() - data);
        bytes[at] ^= 1 << bit;
        fs::write(&file.path, &bytes).unwrap();
        prop_assert_ne!(digest_of(copy.path()), before);
    }
}
