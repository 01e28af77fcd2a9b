//! Loading into device memory, verifying what is mapped, and saving it.

mod drafts;
#[path = "../made/mod.rs"]
mod made;
mod quantized;
mod scrub;
mod verify;

use made::{SMALL, data, tensor_parallel, world};
use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::json;
use std::num::NonZero;
use std::path::Path;
use weightd_checkpoint::{
    Checkpoint, CheckpointError, DigestAlong, LoadError, LoadOptions, Loaded, NodePlan, Progress, Rank,
    Sharding, ShardingOptions, load, save,
};
use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{DeviceUuid, Dtype, HandleKind};
use weightd_core::plan::placement::{Node, Placement, place};
use weightd_gpu::{Device, DeviceKind, Mapping, MemoryError, Weights};

fn try_load(
    checkpoint: &Checkpoint,
    sharding: &ShardingOptions,
    options: &LoadOptions,
) -> Result<Loaded, LoadError> {
    let parallel = &sharding.parallel;
    let placements = place(parallel, &Node::single(parallel.data)).unwrap();
    let devices: Vec<Device> = placements
        .iter()
        .map(|placement| Device::host(placement.device))
        .collect();
    let ranks: Vec<(Placement, DeviceUuid)> = placements
        .into_iter()
        .zip(devices.iter().map(Device::uuid))
        .collect();
    let plan = NodePlan::new(
        &Sharding::new(checkpoint, sharding).unwrap(),
        &ranks,
        HandleKind::Memfd,
    )
    .unwrap();
    let progress = Progress::new(&plan);
    let loaded = load(checkpoint, &plan, &devices, options, None, &progress)?;
    assert!(
        progress
            .ranks()
            .all(|(written, total)| written == total && total > 0)
    );
    Ok(loaded)
}

/// Each rank's weights as an engine maps them.
fn map(loaded: Loaded) -> Vec<(Placement, Weights)> {
    let map = |rank: weightd_checkpoint::LoadedRank| {
        let device = rank.manifest.regions()[0].device;
        let mapping = Mapping::import(rank.region.handle, rank.region.fd, rank.region.bytes, device).unwrap();
        (
            rank.placement,
            Weights::new(rank.manifest, vec![mapping]).unwrap(),
        )
    };
    loaded.ranks.into_iter().map(map).collect()
}

fn mapped(checkpoint: &Checkpoint, tp: u32) -> Vec<(Placement, Weights)> {
    map(try_load(
        checkpoint,
        &tensor_parallel(tp),
        &LoadOptions::of(DeviceKind::Cpu),
    )
    .unwrap())
}

fn stored_bytes(checkpoint: &Checkpoint) -> u64 {
    checkpoint.tensors().values().map(|tensor| tensor.bytes).sum()
}

#[test]
fn what_is_loaded_is_what_the_checkpoint_holds_for_each_rank() {
    for (name, tensors, aliases) in [("llama", 39, 0), ("qwen3", 35, 1)] {
        let checkpoint = Checkpoint::open(&data(name)).unwrap();
        for tp in [1, 2, 4] {
            let mut bytes = 0;
            for (placement, weights) in mapped(&checkpoint, tp) {
                let verified = weightd_checkpoint::verify(
                    &checkpoint,
                    &tensor_parallel(tp),
                    Rank::of(&placement),
                    &weights,
                )
                .unwrap();
                assert_eq!((verified.tensors, verified.aliases), (tensors, aliases), "{name}");
                bytes += verified.bytes;
            }
            assert!(bytes >= stored_bytes(&checkpoint), "{name} at tp {tp}: {bytes}");
        }
    }
}

#[test]
fn each_byte_is_read_once_whatever_the_number_of_ranks() {
    for name in ["llama", "qwen3"] {
        let checkpoint = Checkpoint::open(&data(name)).unwrap();
        for (tp, dp) in [(1, 1), (4, 1), (2, 3)] {
            let stats = try_load(&checkpoint, &world(tp, 1, dp), &LoadOptions::of(DeviceKind::Cpu))
                .unwrap()
                .stats;
            assert_eq!(stats.bytes_read, stored_bytes(&checkpoint));
            assert!(stats.bytes_written >= stats.bytes_read * u64::from(dp));
        }
    }
}

#[test]
fn a_checkpoint_that_is_not_cached_is_read_past_the_cache_unless_it_is_shared() {
    use rustix::fs::{Advice, OFlags, fadvise};
    // On the file system where this is built: that of temporary files may be memory.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for entry in std::fs::read_dir(data("llama")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    // Whether that can be shown here: the files leave the cache, and can be read past it.
    let evict = || {
        checkpoint.files().iter().all(|source| {
            source.file.sync_all().unwrap();
            fadvise(&source.file, 0, None, Advice::DontNeed).unwrap();
            let flags = OFlags::RDONLY | OFlags::DIRECT;
            let direct = rustix::fs::open(&source.path, flags, rustix::fs::Mode::empty());
            direct.is_ok() && weightd_gpu::resident(&source.file, 0, 0) == Some(0)
        })
    };
    let (never, free) = (DigestAlong::Never, DigestAlong::WhereFree);
    for (shared, digest) in [(false, never), (false, free), (true, free)] {
        let shown = evict();
        let options = LoadOptions {
            shared,
            digest,
            ..LoadOptions::of(DeviceKind::Cpu)
        };
        let loaded = try_load(&checkpoint, &tensor_parallel(2), &options).unwrap();
        let path = loaded.stats.path;
        // The digest comes along exactly where all of it comes from disk.
        let all = checkpoint.files().iter().map(|file| file.bytes).sum();
        let expected = if loaded.digest.is_some() {
            all
        } else {
            stored_bytes(&checkpoint)
        };
        assert_eq!(loaded.stats.bytes_read, expected);
        assert_eq!(path.buffered + path.direct, expected);
        assert_eq!(loaded.digest.is_some(), shown && !shared && digest == free);
        if let Some(digest) = loaded.digest {
            assert_eq!(checkpoint.digest(&options, &Progress::default()).unwrap(), digest);
        }
        match shown {
            true if !shared => {
                assert!(path.direct > path.buffered, "{path:?}");
                // Chunks of the digest are whole blocks.
                assert_eq!(path.slack > 0, loaded.digest.is_none(), "{path:?}");
            }
            true => assert_eq!((path.direct, path.slack), (0, 0)),
            false => eprintln!("skipped: files cannot be evicted, or have no O_DIRECT, here"),
        }
        for (placement, weights) in map(loaded) {
            weightd_checkpoint::verify(&checkpoint, &tensor_parallel(2), Rank::of(&placement), &weights)
                .unwrap();
        }
    }
}

#[test]
fn a_node_that_needs_half_of_every_tensor_does_not_read_the_rest_for_the_digest() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for entry in std::fs::read_dir(data("llama")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    for source in checkpoint.files() {
        source.file.sync_all().unwrap();
        rustix::fs::fadvise(&source.file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }
    let sharding = tensor_parallel(2);
    let (placement, device) = (
        place(&sharding.parallel, &Node::single(1)).unwrap()[0],
        Device::host(0),
    );
    let rules = Sharding::new(&checkpoint, &sharding).unwrap();
    let plan = NodePlan::new(&rules, &[(placement, device.uuid())], HandleKind::Memfd).unwrap();
    let options = LoadOptions {
        digest: DigestAlong::WhereFree,
        gap_bytes: 0,
        ..LoadOptions::default()
    };
    let progress = Progress::new(&plan);
    let loaded = load(&checkpoint, &plan, &[device], &options, None, &progress).unwrap();
    assert_eq!(loaded.digest, None);
    assert!(
        loaded.stats.bytes_read < stored_bytes(&checkpoint) * 3 / 4,
        "{:?}",
        loaded.stats
    );
}

#[test]
fn ranks_that_fit_one_by_one_and_not_together_are_refused() {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let kib = |name: &str| -> u64 {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap()
    };
    // One tensor, of which each rank holds a copy of its own: two thirds of what there is.
    let bytes = (kib("MemAvailable:") + kib("SwapFree:")) * 1024 / 3 * 2;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    std::fs::write(dir.path().join("config.json"), SMALL.config().to_string()).unwrap();
    let elements = bytes / 2;
    let header = json!({ "model.norm.weight": { "dtype": "BF16", "shape": [elements], "data_offsets": [0, elements * 2] } })
        .to_string();
    let path = dir.path().join("model.safetensors");
    let start = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    std::fs::write(&path, &start).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    if file.set_len(start.len() as u64 + elements * 2).is_err() {
        return; // A file system without room for such a file has nothing to load from either.
    }
    let error = try_load(
        &Checkpoint::open(dir.path()).unwrap(),
        &tensor_parallel(2),
        &LoadOptions::of(DeviceKind::Cpu),
    )
    .unwrap_err();
    assert!(matches!(error, LoadError::Room { ranks: 2, .. }), "{error}");
    assert!(
        error.to_string().starts_with("2 ranks together: no room for "),
        "{error}"
    );
}

#[test]
fn a_file_that_changed_since_it_was_opened_is_not_loaded() {
    let made = SMALL.make();
    let checkpoint = made.open();
    let file = &checkpoint.files()[1];
    std::fs::OpenOptions::new()
        .write(true)
        .open(&file.path)
        .unwrap()
        .set_len(file.bytes - 1)
        .unwrap();
    let error = try_load(
        &checkpoint,
        &tensor_parallel(2),
        &LoadOptions::of(DeviceKind::Cpu),
    )
    .unwrap_err();
    assert!(
        matches!(error, LoadError::Checkpoint(CheckpointError::Changed { .. })),
        "{error}"
    );
    assert!(
        error.to_string().contains("model-00002-of-00002.safetensors"),
        "{error}"
    );
}

#[test]
fn a_model_larger_than_the_machine_is_refused_before_it_is_read() {
    // 2^43 bytes that a sparse file has and no machine's memory.
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), SMALL.config().to_string()).unwrap();
    let bytes = 1u64 << 43;
    let header = json!({ "a.weight": { "dtype": "BF16", "shape": [bytes / 2], "data_offsets": [0, bytes] } })
        .to_string();
    let path = dir.path().join("model.safetensors");
    std::fs::write(
        &path,
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat(),
    )
    .unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    if file.set_len(8 + header.len() as u64 + bytes).is_err() {
        return; // A file system without room for such a file has nothing to load from either.
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let error = try_load(
        &checkpoint,
        &tensor_parallel(1),
        &LoadOptions::of(DeviceKind::Cpu),
    )
    .unwrap_err();
    assert!(
        matches!(
            error,
            LoadError::Room {
                ranks: 1,
                source: MemoryError::OutOfMemory { .. }
            }
        ),
        "{error}"
    );
}

#[test]
fn saved_weights_are_those_that_were_mapped() {
    let checkpoint = Checkpoint::open(&data("qwen3")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("made/for/this");
    for (placement, weights) in mapped(&checkpoint, 2) {
        for _ in 0..2 {
            let path = save(&weights, &placement, &out).unwrap();
            assert_eq!(
                path,
                out.join(format!("dp0_pp0_tp{}.safetensors", placement.tp_rank))
            );
            let file = std::fs::read(&path).unwrap();
            let (_, metadata) = SafeTensors::read_metadata(&file).unwrap();
            let aliases = metadata.metadata().clone().unwrap();
            assert_eq!(aliases["lm_head.weight"], "model.embed_tokens.weight");
            let saved = SafeTensors::deserialize(&file).unwrap();
            assert_eq!(saved.len(), weights.tensors().len());
            for view in weights.tensors() {
                let tensor = saved.tensor(view.name).unwrap();
                assert_eq!(tensor.dtype().to_string(), view.dtype.name());
                assert!(
                    tensor
                        .shape()
                        .iter()
                        .map(|&size| size as u64)
                        .eq(view.shape.iter().copied())
                );
                assert_eq!(Some(tensor.data()), view.contiguous());
            }
        }
    }
    assert_eq!(
        std::fs::read_dir(&out).unwrap().count(),
        2,
        "nothing partial is left"
    );
}

#[test]
fn strided_views_are_saved_as_their_elements_in_order() {
    let region = Device::host(0).allocate(24).unwrap();
    region.write(0, &(0..24).collect::<Vec<u8>>()).unwrap();
    let mut builder = ManifestBuilder::new();
    let device = region.device();
    let number = builder.region(Region {
        handle: HandleKind::Memfd,
        bytes: 24,
        device,
        legacy: None,
    });
    let mut add = |name: &str, dtype, shape: &[u64], strides: Option<&[u64]>, offset| {
        let kind = TensorKind::Parameter;
        builder.tensor(
            name,
            TensorSpec {
                kind,
                persistent: true,
                dtype,
                shape,
                strides,
                region: number,
                offset,
            },
        );
    };
    add("columns", Dtype::BF16, &[3, 2], Some(&[4, 1]), 4);
    add("all", Dtype::U8, &[24], None, 0);
    let export = region.export().unwrap();
    let mapping = Mapping::import(export.handle, export.fd, export.bytes, device).unwrap();
    let weights = Weights::new(builder.finish().unwrap(), vec![mapping]).unwrap();

    let dir = tempfile::tempdir().unwrap();
    let rank = place(&tensor_parallel(1).parallel, &Node::single(1)).unwrap()[0];
    let file = std::fs::read(save(&weights, &rank, dir.path()).unwrap()).unwrap();
    let saved = SafeTensors::deserialize(&file).unwrap();
    let columns = saved.tensor("columns").unwrap();
    assert_eq!(
        (columns.shape(), columns.data()),
        (&[3, 2][..], &[4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23][..])
    );
    assert_eq!(saved.tensor("all").unwrap().data(), (0..24).collect::<Vec<u8>>());
}

#[test]
fn a_directory_that_cannot_be_made_is_named() {
    let (_, weights) = mapped(&Checkpoint::open(&data("llama")).unwrap(), 1).remove(0);
    let rank = place(&tensor_parallel(1).parallel, &Node::single(1)).unwrap()[0];
    let error = save(&weights, &rank, Path::new("/dev/null/weights")).unwrap_err();
    assert!(
        error.to_string().starts_with("/dev/null/weights: cannot save"),
        "{error}"
    );
    assert!(error.to_string().contains("; give a directory that"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn options_change_nothing_that_is_loaded(
        digest in any::<bool>(), checksums in any::<bool>(), workers in 1usize..5, chunk_bytes in 0u64..20_000, gap_bytes in 0u64..3000, tp in prop::sample::select(vec![1u32, 2, 4]),
    ) {
        let made = SMALL.make();
    let checkpoint = made.open();
        let options = LoadOptions {
            workers: NonZero::new(workers).unwrap(), cold_workers: NonZero::<usize>::MIN, chunk_bytes, gap_bytes, shared: false,
            digest: if digest { DigestAlong::Always } else { DigestAlong::Never }, checksums,
        };
        let loaded = try_load(&checkpoint, &tensor_parallel(tp), &options).unwrap();
        let all = checkpoint.files().iter().map(|file| file.bytes).sum();
        prop_assert_eq!(loaded.stats.bytes_read, if digest { all } else { stored_bytes(&checkpoint) });
        let expected = digest.then(|| checkpoint.digest(&options, &Progress::default()).unwrap());
        prop_assert_eq!(loaded.digest, expected);
        for (placement, weights) in map(loaded) {
            weightd_checkpoint::verify(&checkpoint, &tensor_parallel(tp), Rank::of(&placement), &weights).unwrap();
        }
    }
}
