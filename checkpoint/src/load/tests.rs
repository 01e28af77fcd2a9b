use super::*;
use crate::tests::data;
use weightd_core::content::Dtype;
use weightd_core::plan::cast::Cast;
use weightd_core::plan::read::{Fill, Part, Rect, Source};
use weightd_gpu::Mapping;

const OPTIONS: LoadOptions = LoadOptions {
    workers: NonZero::new(3).unwrap(),
    cold_workers: NonZero::new(5).unwrap(),
    chunk_bytes: 4 << 10,
    gap_bytes: 0,
    shared: false,
    digest: DigestAlong::Never,
    checksums: false,
};

fn run(checkpoint: &Checkpoint, plan: &ReadPlan, regions: &[Region]) -> Result<Progress, LoadError> {
    let progress = Progress::of(plan);
    let pipeline = Pipeline {
        files: checkpoint.files(),
        read: plan,
        devices: &[],
        regions,
        progress: &progress,
        hashes: &Hashes::new(checkpoint),
        checksums: &[],
    };
    pipeline
        .run(&OPTIONS, None)
        .map_err(|failure| failure.of(|local| 100 + local))?;
    Ok(progress)
}

fn regions(plan: &ReadPlan) -> Vec<Region> {
    plan.regions()
        .iter()
        .map(|&bytes| Device::host(0).allocate(bytes).unwrap())
        .collect()
}

fn mapped(region: Region) -> Mapping {
    let (device, export) = (region.device(), region.export().unwrap());
    Mapping::import(export.handle, export.fd, export.bytes, device).unwrap()
}

/// The 128 columns of 1000 rows of a bfloat16 tensor, and its bytes.
fn embedding(checkpoint: &Checkpoint) -> (Source, Vec<u8>) {
    let tensor = &checkpoint.tensors()["model.embed_tokens.weight"];
    assert_eq!(
        (tensor.dtype, tensor.shape.as_slice()),
        (Dtype::BF16, &[1000, 128][..])
    );
    let mut bytes = vec![0; tensor.bytes as usize];
    checkpoint.files()[tensor.file]
        .read_exact_at(&mut bytes, tensor.offset)
        .unwrap();
    let (file, offset) = (tensor.file as u32, tensor.offset);
    (
        Source {
            file,
            offset,
            bytes: tensor.bytes,
            element: 2,
            parts: Vec::new(),
        },
        bytes,
    )
}

fn plan(checkpoint: &Checkpoint, regions: Vec<u64>, source: Source, fills: Vec<Fill>) -> ReadPlan {
    let files = checkpoint.files().iter().map(|file| file.bytes).collect();
    ReadPlan::new(files, regions, vec![source], fills).unwrap()
}

#[test]
fn a_plan_is_executed_with_all_of_its_operations() {
    let checkpoint = Checkpoint::open(&data("llama")).unwrap();
    let (mut source, stored) = embedding(&checkpoint);
    // One rank gets all of it, cast; another the right half of every row, each row followed by 64
    // bytes of something else, and zeroes behind.
    let cast = Cast::new(Dtype::BF16, Dtype::F32);
    let right = Rect {
        start: 128,
        pitch: 256,
        width: 128,
        rows: 1000,
    };
    let whole = Rect::range(0, source.bytes);
    source.parts = vec![
        Part {
            from: whole,
            rank: 0,
            to: 256,
            to_pitch: 2 * source.bytes,
            cast,
        },
        Part {
            from: right,
            rank: 1,
            to: 0,
            to_pitch: 192,
            cast: None,
        },
        Part {
            from: right,
            rank: 2,
            to: 0,
            to_pitch: 256,
            cast,
        },
    ];
    let fill = Fill {
        rank: 1,
        offset: 192_000,
        bytes: 1000,
    };
    let plan = plan(
        &checkpoint,
        vec![256 + 512_000, 193_000, 256_000],
        source,
        vec![fill],
    );
    let regions = regions(&plan);
    regions[1].write(192_000, &[7; 1000]).unwrap();

    let progress = run(&checkpoint, &plan, &regions).unwrap();
    assert_eq!(progress.bytes_read(), 256_000);
    assert_eq!(
        progress.ranks().collect::<Vec<_>>(),
        [(512_000, 512_000), (129_000, 129_000), (256_000, 256_000)]
    );
    let [first, second, third] = <[Region; 3]>::try_from(regions).unwrap().map(mapped);
    // The value of a bfloat16 is that of an f32 with the same upper half.
    let wide = |bytes: &[u8]| -> Vec<u8> {
        bytes
            .chunks(2)
            .flat_map(|half| [0, 0, half[0], half[1]])
            .collect()
    };
    assert_eq!(first.host().unwrap()[256..], wide(&stored));
    let right = |row: usize| &stored[row * 256 + 128..][..128];
    for row in 0..1000 {
        assert_eq!(&second.host().unwrap()[row * 192..][..128], right(row));
        assert_eq!(second.host().unwrap()[row * 192 + 128..][..64], [0; 64]);
        assert_eq!(third.host().unwrap()[row * 256..][..256], wide(right(row)));
    }
    assert_eq!(second.host().unwrap()[192_000..], [0; 1000]);
}

#[test]
fn a_file_that_ends_early_stops_every_worker_with_an_error() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(data("qwen3").join(name), dir.path().join(name)).unwrap();
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let (mut source, _) = embedding(&checkpoint);
    let whole = Rect::range(0, source.bytes);
    source.parts = vec![Part {
        from: whole,
        rank: 0,
        to: 0,
        to_pitch: source.bytes,
        cast: None,
    }];
    let end = source.offset + source.bytes - 1;
    let plan = plan(&checkpoint, vec![source.bytes], source, vec![]);
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(dir.path().join("model.safetensors"))
        .unwrap();
    file.set_len(end).unwrap();
    let error = run(&checkpoint, &plan, &regions(&plan)).unwrap_err();
    assert!(
        matches!(error, LoadError::Checkpoint(CheckpointError::Changed { .. })),
        "{error}"
    );
}

#[test]
fn a_device_that_refuses_a_write_is_named_by_its_global_rank() {
    let checkpoint = Checkpoint::open(&data("llama")).unwrap();
    let (mut source, _) = embedding(&checkpoint);
    let whole = Rect::range(0, source.bytes);
    source.parts = vec![Part {
        from: whole,
        rank: 0,
        to: 0,
        to_pitch: source.bytes,
        cast: None,
    }];
    let plan = plan(&checkpoint, vec![source.bytes], source, vec![]);
    let small = [Device::host(0).allocate(5000).unwrap()];
    let error = run(&checkpoint, &plan, &small).unwrap_err();
    assert!(
        matches!(
            error,
            LoadError::Device {
                rank: 100,
                source: MemoryError::OutOfBounds { .. }
            }
        ),
        "{error}"
    );
}
