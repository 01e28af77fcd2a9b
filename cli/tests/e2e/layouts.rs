//! How weights are spread and held, from the command line to the bytes that an engine maps.

use crate::checkpoints::*;
use crate::harness::*;
use rustix::process::Signal;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// By file and tensor: element type, shape, SHA-256.
type Digests = BTreeMap<String, BTreeMap<String, (String, Vec<u64>, String)>>;

/// Of llama with tensor and pipeline parallel size 2, as vLLM 0.32 loads it.
const EXPECTED: &str = include_str!("../../../tests/data/vllm/llama_tp2_pp2.json");

const VLLM: [&str; 4] = ["--pipeline-parallel-size", "2", "--layout", "vllm"];

#[test]
fn saved_ranks_are_what_vllm_loads() {
    let (site, llama) = (Site::new(), model("llama"));
    let mut launcher = site.preload(&llama, 2, &VLLM);
    let saved = site.path().join("saved");
    let save = ["--all", "--verify", "--save", saved.to_str().unwrap()];
    let ran = site.attach(&llama, 2, &[&VLLM[..], &save].concat());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let expected: Digests = serde_json::from_str(EXPECTED).unwrap();
    for (file, tensors) in expected {
        let found = digests(&saved.join(format!("dp0_{file}")));
        for (name, expected) in tensors {
            assert_eq!(found.get(&name), Some(&expected), "{file}: {name}");
        }
    }
    launcher.signal(Signal::INT);
    launcher.wait();
    site.assert_clean();
}

#[test]
fn whoever_holds_weights_otherwise_is_another_engine() {
    let (site, llama) = (Site::new(), model("llama"));
    let plan = site.path().join("plan.json");
    fs::write(&plan, r#"{"model.layers.*.mlp.gate_proj": "colwise"}"#).unwrap();
    let plan = ["--tp-plan", plan.to_str().unwrap()];
    let _launcher = site.preload(&llama, 2, &[]);
    let differs = |more: &[&str], fields: &str| {
        let error = site
            .attach(&llama, 2, &[&["--rank", "0"], more].concat())
            .error(1);
        let expected = format!("the daemon serves something else: {fields} (asked for ");
        assert!(error.contains(&expected), "{error}");
    };
    differs(&["--layout", "vllm"], "layout");
    differs(&["--dtype", "float16"], "dtype");
    differs(&["--pipeline-parallel-size", "2"], "pp_size");
    differs(&["--data-parallel-size", "2"], "dp_size");
    differs(&["--enable-expert-parallel"], "enable_expert_parallel");
    differs(&["--pp-layer-partition", "4"], "extra.weightd.pp_layer_partition");
    differs(&plan, "extra.weightd.tp_plan");
}

#[test]
fn weights_that_were_cast_and_split_by_a_plan_verify() {
    let (site, llama) = (Site::new(), model("llama"));
    let plan = site.path().join("plan.json");
    fs::write(
        &plan,
        json!({ "layers.*.mlp.gate_proj": "colwise", "lm_head": "colwise_gather_output" }).to_string(),
    )
    .unwrap();
    let options = ["--dtype", "float32", "--tp-plan", plan.to_str().unwrap()];
    let _launcher = site.preload(&llama, 2, &options);
    let saved = site.path().join("saved");
    let save = ["--rank", "1", "--verify", "--save", saved.to_str().unwrap()];
    let ran = site.attach(&llama, 2, &[&options[..], &save].concat());
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let found = digests(&saved.join("dp0_pp0_tp1.safetensors"));
    let shape = |name: &str| (found[name].0.as_str(), found[name].1.clone());
    assert_eq!(
        shape("model.layers.0.mlp.gate_proj.weight"),
        ("F32", vec![176, 128])
    );
    assert_eq!(
        shape("model.layers.0.mlp.up_proj.weight"),
        ("F32", vec![352, 128])
    );
    assert_eq!(shape("lm_head.weight"), ("F32", vec![500, 128]));
}

#[test]
fn a_plan_of_a_model_says_what_each_rank_will_hold() {
    let (site, llama) = (Site::new(), model("llama"));
    let args = |more: &[&'static str]| -> Vec<Value> {
        let model = ["plan", "--model", llama.to_str().unwrap(), "-t", "2", "--json"];
        site.json(&[&model[..], &VLLM, more].concat())
    };
    let plan = &args(&[])[0];
    let ranks = plan["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 4);
    let expected: Digests = serde_json::from_str(EXPECTED).unwrap();
    for (rank, (file, tensors)) in ranks.iter().zip(&expected) {
        let file_of_rank = format!("pp{}_tp{}.safetensors", rank["pp_rank"], rank["tp_rank"]);
        assert_eq!(&file_of_rank, file);
        let planned = rank["tensors"].as_array().unwrap();
        assert_eq!(planned.len(), tensors.len());
        for tensor in planned {
            let (dtype, shape, _) = &tensors[tensor["name"].as_str().unwrap()];
            assert_eq!(
                (&tensor["dtype"], &tensor["shape"]),
                (&json!(dtype), &json!(shape))
            );
        }
        let sum: u64 = planned
            .iter()
            .map(|tensor| tensor["bytes"].as_u64().unwrap())
            .sum();
        assert_eq!(rank["bytes"], sum);
    }
    let embedding = &ranks[1]["tensors"].as_array().unwrap();
    let embedding = embedding
        .iter()
        .find(|tensor| tensor["name"] == "model.embed_tokens.weight")
        .unwrap();
    assert_eq!(embedding["zero_rows"], json!([488, 512]));
    assert_eq!(
        embedding["sources"][0]["part"],
        json!({ "dim": 0, "ranges": [[512, 1000]] })
    );
    let bytes = |rank: &Value| rank["bytes"].as_u64().unwrap();
    assert_eq!(plan["totals"]["bytes"], ranks.iter().map(bytes).sum::<u64>());
    assert_eq!(plan["totals"]["largest"], ranks.iter().map(bytes).max().unwrap());

    let human = site
        .run(&["plan", "--model", llama.to_str().unwrap(), "-t", "2"])
        .stdout;
    let line = "  model.layers.0.mlp.down_proj.weight BF16 [128, 176] 45056 bytes: 0..176 of dimension 1 of [128, 352]";
    assert!(human.lines().any(|found| found == line), "{human}");
    assert!(human.contains("imbalance"), "{human}");
}

#[test]
fn what_cannot_be_split_is_refused_before_anything_is_started() {
    let (site, llama) = (Site::new(), model("llama"));
    let copy = copy_of(&llama, &site.path().join("unknown"));
    let config = copy.join("config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    json["architectures"] = json!(["StrangeForCausalLM"]);
    fs::write(&config, json.to_string()).unwrap();
    let error = finish(site.on_model("preload", &copy, 2, &[])).error(1);
    assert!(
        error.contains("StrangeForCausalLM")
            && error.contains("--tp-plan")
            && error.contains("model.layers.*."),
        "{error}"
    );
    let error = finish(site.on_model("preload", &llama, 2, &["--enable-expert-parallel"])).error(1);
    assert!(error.contains("expert parallelism"), "{error}");
    let error = finish(site.on_model("preload", &llama, 2, &["--dtype", "int8"])).stderr;
    assert!(error.contains("bfloat16"), "{error}");
    let missing = ["--tp-plan", "/nowhere.json"];
    let error = finish(site.on_model("preload", &llama, 2, &missing)).error(1);
    assert!(error.contains("/nowhere.json"), "{error}");
    site.assert_clean();
}

fn digests(path: &Path) -> BTreeMap<String, (String, Vec<u64>, String)> {
    let file = fs::read(path).unwrap();
    let (size, rest) = file.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*size) as usize);
    let header: BTreeMap<String, Value> = serde_json::from_slice(header).unwrap();
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    tensors
        .map(|(name, tensor)| {
            let at = |number: usize| tensor["data_offsets"][number].as_u64().unwrap() as usize;
            let digest = Sha256::digest(&data[at(0)..at(1)]);
            let digest = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            let shape = serde_json::from_value(tensor["shape"].clone()).unwrap();
            (
                name,
                (tensor["dtype"].as_str().unwrap().to_owned(), shape, digest),
            )
        })
        .collect()
}
