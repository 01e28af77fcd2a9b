//! Ranks compared with what vLLM itself loads, for every family in `tests/data/families`.

mod made;

use made::execute::execute;
use made::{Made, Tensor, data, ranks, world};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use weightd_checkpoint::{Checkpoint, Layout, NodePlan, PlanError, ShardingOptions};
use weightd_core::content::HandleKind;
use weightd_core::plan::experts::ExpertPlacement;

#[test]
fn ranks_hold_what_vllm_loads() {
    let (mut compared, mut wrong) = (0, Vec::new());
    for family in families() {
        let made = make(&family);
        let checkpoint = made.open();
        for path in files(&family, "vllm_") {
            let context = path.strip_prefix(data("families")).unwrap().display().to_string();
            match compare(&checkpoint, &path) {
                Ok((same, differing)) => {
                    compared += same;
                    wrong.extend(differing.into_iter().map(|tensor| format!("{context}: {tensor}")));
                }
                Err(error) => wrong.push(format!("{context}: {error}")),
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} are wrong, first\n{}",
        wrong.len(),
        wrong[..wrong.len().min(30)].join("\n")
    );
    assert!(compared > 5000, "only {compared} tensors were compared");
}

type Expected = BTreeMap<String, BTreeMap<String, (String, Vec<u64>, String)>>;

/// How many tensors are as expected, and which are not.
fn compare(checkpoint: &Checkpoint, path: &Path) -> Result<(usize, Vec<String>), PlanError> {
    let expected: Expected = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let options = configuration(path);
    let plan = NodePlan::new(checkpoint, &options, &ranks(&options.parallel), HandleKind::Memfd)?;
    let held = execute(checkpoint, &plan);
    assert_eq!(held.len(), expected.len(), "{}", path.display());
    let (mut same, mut wrong) = (0, Vec::new());
    for (rank, held) in plan.ranks().iter().zip(&held) {
        let place = rank.placement;
        let dp = if options.parallel.data > 1 {
            format!("dp{}_", place.dp_rank)
        } else {
            String::new()
        };
        let file = format!("{dp}pp{}_tp{}.safetensors", place.pp_rank, place.tp_rank);
        for (name, expected) in &expected[&file] {
            let found = held.get(name).map(|(shape, bytes)| {
                let tensor = rank.manifest.get(name).unwrap();
                (
                    tensor.dtype.name().to_owned(),
                    shape.clone(),
                    hex(&Sha256::digest(bytes)),
                )
            });
            match found.as_ref() == Some(expected) {
                true => same += 1,
                false => wrong.push(format!("{file} {name}: {expected:?}, found {found:?}")),
            }
        }
    }
    Ok((same, wrong))
}

fn families() -> Vec<PathBuf> {
    let entries = fs::read_dir(data("families"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut families: Vec<_> = entries.filter(|path| path.is_dir()).collect();
    families.sort();
    families
}

/// What the file's name says: `vllm_dp2_tp2_pp1ep.json`.
fn configuration(path: &Path) -> ShardingOptions {
    let stem = path.file_stem().unwrap().to_str().unwrap();
    let (sizes, experts) = match stem.strip_suffix("ep") {
        Some(sizes) => (sizes, Some(ExpertPlacement::Linear)),
        None => (stem, None),
    };
    let size = |of: &str| {
        let part = sizes.split('_').find_map(|part| part.strip_prefix(of));
        part.map_or(1, |number| number.parse().unwrap())
    };
    ShardingOptions {
        layout: Layout::Vllm,
        experts,
        ..world(size("tp"), size("pp"), size("dp"))
    }
}

fn files(dir: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let named = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(prefix);
    let mut files: Vec<_> = entries.filter(named).collect();
    files.sort();
    files
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The checkpoint of a family, with the bytes that its expected values were made with.
fn make(family: &Path) -> Made {
    let read = |name: &str| fs::read(family.join(name)).unwrap();
    let config: Value = serde_json::from_slice(&read("config.json")).unwrap();
    let tensors: BTreeMap<String, (String, Vec<u64>)> =
        serde_json::from_slice(&read("tensors.json")).unwrap();
    let tensors: Vec<Tensor> = tensors
        .into_iter()
        .map(|(name, (dtype, shape))| (name, if dtype == "F32" { "F32" } else { "BF16" }, shape))
        .collect();
    Made::filled(&config, &[tensors], |name, dtype, elements| {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        // Of a bfloat16; and the upper half of a float32.
        let element = |i: u64| {
            let bits = (hash as u32).wrapping_add((i as u32).wrapping_mul(0x9e37_79b1)) >> 16 & 0xbfff;
            let [low, high, ..] = bits.to_le_bytes();
            let padding: &[u8] = if dtype == "F32" { &[0, 0] } else { &[] };
            padding.iter().copied().chain([low, high]).collect::<Vec<_>>()
        };
        (0..elements).flat_map(element).collect()
    })
}
