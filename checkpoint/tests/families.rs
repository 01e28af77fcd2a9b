//! Ranks compared with what vLLM itself loads: in its layout for every family in `tests/data/families`, and in
//! the checkpoint's for every quantized checkpoint in `tests/data/quantized`.

mod made;

use made::execute::execute;
use made::{Made, Tensor, data, known, ranks, width, world};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use weightd_checkpoint::{
    Checkpoint, KeyOptions, Layout, NodePlan, Rank, RuleError, Sharding, ShardingOptions,
};
use weightd_core::content::HandleKind;
use weightd_core::plan::experts::ExpertPlacement;

#[test]
fn ranks_hold_what_vllm_loads() {
    let compared = compare_all("families", "vllm_", |case, error| panic!("{case}: {error}"));
    assert!(compared > 5000, "only {compared} tensors were compared");
}

#[test]
fn quantized_ranks_hold_what_vllm_loads_of_each_tensor() {
    let mut refused = Vec::new();
    let compared = compare_all("quantized", "checkpoint_", |case, error| {
        refused.push((case, error))
    });
    assert!(compared > 5000, "only {compared} tensors were compared");
    // vLLM loads these experts' weights, and cannot load their scales.
    for (case, error) in &refused {
        let cuts = matches!(error, RuleError::CutsUnit { tensor, unit: 128, .. }
            if tensor.contains(".experts."));
        assert!(cuts, "{case}: {error}");
    }
    let refused: Vec<&str> = refused.iter().map(|(case, _)| case.as_str()).collect();
    let blocks_of_192 =
        ["tp2_pp1", "tp4_pp1"].map(|run| format!("quantized/qwen3_moe_fp8_block192/checkpoint_{run}.json"));
    assert_eq!(refused, blocks_of_192);
}

#[test]
fn what_vllm_refuses_to_split_is_refused() {
    let mut refused = 0;
    for dir in checkpoints("quantized") {
        let Ok(runs) = fs::read(dir.join("refused.json")) else {
            continue;
        };
        let runs: BTreeMap<String, String> = serde_json::from_slice(&runs).unwrap();
        let made = make(&dir);
        for (run, why) in runs {
            let options = configuration(&dir.join(run), Layout::Checkpoint);
            let error = Sharding::new(&made.open(), &options).err();
            let context = format!(
                "{} with {:?}: vLLM says {why}, here {error:?}",
                dir.display(),
                options.parallel
            );
            // One rank serves whatever is stored, as it is; and that vLLM fails in another way is no refusal.
            if options.parallel.tensor > 1 && why.starts_with("ValueError") {
                assert!(error.is_some(), "{context}");
                refused += 1;
            }
        }
    }
    assert!(refused > 5, "only {refused} refusals were compared");
}

/// The rules' number, and a hash of what they make of all checkpoints here.
const RULES: (&str, &str) = (
    "1",
    "065cfa83d43455e6173c26e1d585308defe457397c637c4fcdfdda1fbfd35eb5",
);

#[test]
fn other_rules_have_another_number() {
    let mut hash = Sha256::new();
    let mut number = String::new();
    for (folder, prefix, layout) in [
        ("families", "vllm_", Layout::Vllm),
        ("families", "vllm_", Layout::Checkpoint),
        ("quantized", "checkpoint_", Layout::Checkpoint),
    ] {
        for dir in checkpoints(folder) {
            let checkpoint = make(&dir).open();
            for path in files(&dir, prefix) {
                let options = configuration(&path, layout);
                let Ok(sharding) = Sharding::new(&checkpoint, &options) else {
                    continue;
                };
                let all = ranks(&options.parallel);
                let plan = NodePlan::new(&sharding, &all, HandleKind::Memfd).unwrap();
                for rank in plan.ranks() {
                    rank.manifest
                        .tensors()
                        .for_each(|tensor| hash.update(format!("{tensor:?}")));
                    rank.manifest
                        .aliases()
                        .for_each(|alias| hash.update(format!("{alias:?}")));
                }
                hash.update(format!("{:?} {:?}", plan.read().sources(), plan.read().fills()));
                let key = KeyOptions::new(options).key(&checkpoint, checkpoint.identity(), Rank::default());
                number = key.unwrap().extra["weightd.rules"].clone();
            }
        }
    }
    assert_eq!(
        (number.as_str(), hex(&hash.finalize()).as_str()),
        RULES,
        "ranks hold something else: add one to RULES in src/rules/mod.rs, and put both here (the hash alone, if only \
         plans are printed otherwise)"
    );
}

/// Compares all runs of all checkpoints in a folder, and says how many tensors are as expected. Those that
/// are refused are for `refused` to judge.
fn compare_all(folder: &str, prefix: &str, mut refused: impl FnMut(String, RuleError)) -> usize {
    let layout = if prefix == "vllm_" {
        Layout::Vllm
    } else {
        Layout::Checkpoint
    };
    let (mut compared, mut wrong) = (0, Vec::new());
    for dir in checkpoints(folder) {
        let made = make(&dir);
        let checkpoint = made.open();
        for path in files(&dir, prefix) {
            let context = path.strip_prefix(data("")).unwrap().display().to_string();
            match compare(&checkpoint, &path, layout) {
                Ok((same, differing)) => {
                    compared += same;
                    wrong.extend(differing.into_iter().map(|tensor| format!("{context}: {tensor}")));
                }
                Err(error) => refused(context, error),
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} are wrong, first\n{}",
        wrong.len(),
        wrong[..wrong.len().min(30)].join("\n")
    );
    compared
}

type Expected = BTreeMap<String, BTreeMap<String, (String, Vec<u64>, String)>>;

/// How many tensors are as expected, and which are not.
fn compare(checkpoint: &Checkpoint, path: &Path, layout: Layout) -> Result<(usize, Vec<String>), RuleError> {
    let expected: Expected = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    // Of these vLLM holds something else.
    let differs = fs::read(path.with_file_name("differs.json")).unwrap_or_else(|_| b"{}".to_vec());
    let differs: BTreeMap<String, String> = serde_json::from_slice(&differs).unwrap();
    let options = configuration(path, layout);
    let sharding = Sharding::new(checkpoint, &options)?;
    let plan = NodePlan::new(&sharding, &ranks(&options.parallel), HandleKind::Memfd).unwrap();
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
        if layout == Layout::Checkpoint {
            let listed = |name: &str| expected[&file].contains_key(name) || differs.contains_key(name);
            let more = held.keys().filter(|name| !listed(name));
            wrong.extend(more.map(|name| format!("{file} {name}: vLLM does not hold it on this rank")));
        }
    }
    Ok((same, wrong))
}

fn checkpoints(folder: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(data(folder))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = entries
        .filter(|path| path.join("tensors.json").exists())
        .collect();
    found.sort();
    found
}

/// What the file's name says: `vllm_dp2_tp2_pp1ep.json`.
fn configuration(path: &Path, layout: Layout) -> ShardingOptions {
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
        layout,
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

/// The checkpoint in a folder, with the bytes that its expected values were made with.
fn make(dir: &Path) -> Made {
    let read = |name: &str| fs::read(dir.join(name)).unwrap();
    let config: Value = serde_json::from_slice(&read("config.json")).unwrap();
    let tensors: BTreeMap<String, (String, Vec<u64>)> =
        serde_json::from_slice(&read("tensors.json")).unwrap();
    let tensors: Vec<Tensor> = tensors
        .into_iter()
        .map(|(name, (dtype, shape))| (name, known(&dtype), shape))
        .collect();
    Made::filled(&config, &[tensors], |name, dtype, elements| {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        let mut bytes = Vec::with_capacity((elements * width(dtype)) as usize);
        for i in 0..elements as u32 {
            let word = (hash as u32).wrapping_add(i.wrapping_mul(0x9e37_79b1));
            // Finite and below 2, where it is a float.
            let bits = match dtype {
                "F32" => (word >> 16 & 0xbfff) << 16,
                "BF16" | "F16" => word >> 16 & 0xbfff,
                "F8_E4M3" => word >> 16 & 0xbf,
                "I8" | "U8" => word >> 16,
                _ => word,
            };
            bytes.extend_from_slice(&u64::from(bits).to_le_bytes()[..width(dtype) as usize]);
        }
        bytes
    })
}
