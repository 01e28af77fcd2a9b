//! Tensor parallel plans, applied to small models.

use crate::{
    Checkpoint, FloatDtype, Layout, ModelPart, NodePlan, Rank, RuleError, Sharding, ShardingOptions, TpPlan,
};
use crate::{Draft, PlanError};
use serde_json::{Map, Value, json};
use std::fs;
use std::sync::OnceLock;
use weightd_core::content::{DeviceUuid, Dtype, HandleKind};
use weightd_core::fuzz::Input;
use weightd_core::plan::experts::ExpertPlacement;
use weightd_core::plan::placement::{Node, Parallel, place};

macro_rules! model {
    ($name:literal) => {
        (
            include_str!(concat!("../../../tests/data/families/", $name, "/config.json")),
            include_str!(concat!("../../../tests/data/families/", $name, "/tensors.json")),
        )
    };
}
/// What Hugging Face transformers wrote, without the weights.
const MODELS: [(&str, &str); 3] = [model!("llama_tied"), model!("glm4_moe"), model!("gpt_oss")];

/// Parses a plan, from text or from parts of names of the model, and applies it. Checks that
///
/// * nothing panics, and a plan that is one has a hash that another spelling of it has too;
/// * where the rules are applied, every rank is planned, and what it holds lies inside what is stored;
/// * with one rank a plan changes nothing.
pub fn tp_plan(input: &[u8]) {
    let mut input = Input::new(input);
    let checkpoint = &models()[input.below(MODELS.len())];
    let mut options = options(&mut input);
    let text = if input.flag() {
        input.rest().to_vec()
    } else {
        made_of_names(&mut input, checkpoint).to_string().into_bytes()
    };
    let Ok(plan) = TpPlan::parse(&text) else {
        return;
    };
    let spelled: Value = serde_json::from_slice(&text).expect("a plan is JSON");
    let again = serde_json::to_vec_pretty(&spelled).expect("JSON");
    assert_eq!(TpPlan::parse(&again).expect("a plan").hash(), plan.hash());
    options.tp_plan = Some(plan);
    apply(checkpoint, &options);
    options.parallel = Parallel {
        tensor: 1,
        pipeline: 1,
        data: 1,
    };
    options.experts = None;
    options.layer_partition = None;
    if let (Ok(with), Ok(without)) = (
        held(checkpoint, &options),
        held(
            checkpoint,
            &ShardingOptions {
                tp_plan: None,
                ..options.clone()
            },
        ),
    ) {
        assert_eq!(with, without, "one rank holds everything");
    }
}

fn models() -> &'static [Checkpoint] {
    static MADE: OnceLock<Vec<Checkpoint>> = OnceLock::new();
    MADE.get_or_init(|| {
        MODELS
            .iter()
            .map(|(config, tensors)| made(config, tensors))
            .collect()
    })
}

/// A checkpoint of zeros, whose directory is gone once it is open.
fn made(config: &str, tensors: &str) -> Checkpoint {
    let tensors: Map<String, Value> = serde_json::from_str(tensors).expect("names, types and shapes");
    let (mut header, mut end) = (Map::new(), 0);
    for (name, tensor) in tensors {
        let dtype = tensor[0].as_str().expect("a type");
        let shape: Vec<u64> = serde_json::from_value(tensor[1].clone()).expect("a shape");
        let elements = shape.iter().product();
        let bytes = Dtype::from_name(dtype).and_then(|dtype| dtype.bytes(elements));
        let start = end;
        end += bytes.expect("a known type");
        header.insert(
            name,
            json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}),
        );
    }
    let mut header = Value::Object(header).to_string();
    header.push_str(&" ".repeat(8 - header.len() % 8));
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("model.safetensors");
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    let bytes = file.len() as u64 + end;
    fs::write(&path, file).expect("a header");
    let weights = fs::OpenOptions::new().write(true).open(&path);
    weights
        .and_then(|weights| weights.set_len(bytes))
        .expect("a sparse file");
    fs::write(dir.path().join("config.json"), config).expect("a configuration");
    Checkpoint::open(dir.path()).expect("a checkpoint")
}

fn options(input: &mut Input<'_>) -> ShardingOptions {
    let parallel = Parallel {
        tensor: 1 + input.below(9) as u32,
        pipeline: 1 + (input.below(8) as u32).saturating_sub(5),
        data: 1 + (input.below(8) as u32).saturating_sub(5),
    };
    ShardingOptions {
        part: match input.below(8) {
            6 => ModelPart::Draft(Draft::Mtp),
            7 => ModelPart::Draft(Draft::Eagle),
            _ => ModelPart::Target,
        },
        layout: input.one_of(&[Layout::Checkpoint, Layout::Vllm]),
        dtype: input.one_of(&[
            FloatDtype::Auto,
            FloatDtype::Bfloat16,
            FloatDtype::Float16,
            FloatDtype::Float32,
        ]),
        experts: input.one_of(&[
            None,
            Some(ExpertPlacement::Linear),
            Some(ExpertPlacement::RoundRobin),
        ]),
        ..ShardingOptions::new(parallel)
    }
}

/// Names of the model's own modules, whole or with parts replaced, and styles.
fn made_of_names(input: &mut Input<'_>, checkpoint: &Checkpoint) -> Value {
    let names: Vec<&str> = checkpoint.tensors().keys().map(String::as_str).collect();
    let styles = [
        "colwise",
        "rowwise",
        "colwise_rep",
        "packed_colwise",
        "packed_rowwise",
        "embedding_rowwise",
        "qkv_colwise",
        "heads_colwise",
        "replicated",
        "grouped_gemm",
        "diagonal",
    ];
    let mut plan = Map::new();
    while !input.is_empty() {
        let name = names[input.short() as usize % names.len()];
        let parts: Vec<&str> = name
            .split('.')
            .map(|part| {
                if part.parse::<u32>().is_ok() && input.flag() {
                    "*"
                } else {
                    part
                }
            })
            .collect();
        let first = usize::from(input.below(8) == 7);
        let last = parts.len() - input.below(3).min(parts.len() - first);
        plan.insert(parts[first..last].join("."), json!(input.one_of(&styles)));
    }
    Value::Object(plan)
}

fn apply(checkpoint: &Checkpoint, options: &ShardingOptions) {
    let Ok(sharding) = Sharding::new(checkpoint, options) else {
        return;
    };
    let placements = place(&options.parallel, &Node::single(options.parallel.data)).expect("a small world");
    let ranks: Vec<_> = placements
        .into_iter()
        .map(|placement| (placement, DeviceUuid([0; 16])))
        .collect();
    match NodePlan::new(&sharding, &ranks, HandleKind::Memfd) {
        Ok(plan) => {
            assert_eq!(plan.ranks().len(), ranks.len());
            for (rank, written) in plan.ranks().iter().zip(plan.read().written()) {
                assert!(*written <= rank.region_bytes);
            }
        }
        Err(error @ PlanError::Read(_)) => panic!("rules that were applied give a plan: {error}"),
        Err(_) => {}
    }
}

/// Names, types and sizes of what a single rank holds.
fn held(
    checkpoint: &Checkpoint,
    options: &ShardingOptions,
) -> Result<Vec<(String, Dtype, Option<u64>)>, RuleError> {
    let sharding = Sharding::new(checkpoint, options)?;
    let held = sharding.held(Rank::default());
    Ok(held
        .map(|held| (held.name.to_string(), held.dtype, held.bytes()))
        .collect())
}
