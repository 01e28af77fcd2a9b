//! Checkpoints made for tests: any config.json, any tensors, bytes that tell where they belong.
#![allow(dead_code)] // Each test target uses its part.

pub mod execute;
pub mod generated;
pub mod methods;

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use weightd_checkpoint::{Checkpoint, ShardingOptions};
use weightd_core::content::DeviceUuid;
use weightd_core::plan::placement::{Node, Parallel, Placement, place};

/// A directory with a checkpoint, removed when dropped.
pub struct Made {
    dir: TempDir,
}

/// A tensor to write: name, safetensors type, shape.
pub type Tensor = (String, &'static str, Vec<u64>);

impl Made {
    /// Writes `config` and each list of tensors as one file, with an index if there are several.
    pub fn new(config: &Value, files: &[Vec<Tensor>]) -> Made {
        Made::filled(config, files, |name, dtype, elements| {
            content(name, elements * width(dtype))
        })
    }

    /// The same, with the bytes that `bytes` gives for name, type and number of elements.
    pub fn filled(
        config: &Value,
        files: &[Vec<Tensor>],
        bytes: impl Fn(&str, &str, u64) -> Vec<u8> + Copy,
    ) -> Made {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let mut map = serde_json::Map::new();
        for (number, tensors) in files.iter().enumerate() {
            let name = match files.len() {
                1 => "model.safetensors".to_owned(),
                count => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
            };
            std::fs::write(dir.path().join(&name), safetensors(tensors, bytes)).unwrap();
            map.extend(tensors.iter().map(|(tensor, ..)| (tensor.clone(), json!(name))));
        }
        if files.len() > 1 {
            let index = json!({ "metadata": {}, "weight_map": map });
            std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        }
        Made { dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn open(&self) -> Checkpoint {
        Checkpoint::open(self.path()).unwrap()
    }
}

fn safetensors(tensors: &[Tensor], bytes: impl Fn(&str, &str, u64) -> Vec<u8>) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    // The widest first, so that all are aligned.
    let mut tensors: Vec<&Tensor> = tensors.iter().collect();
    tensors.sort_by_key(|(_, dtype, _)| std::cmp::Reverse(width(dtype)));
    for (name, dtype, shape) in tensors {
        let start = data.len();
        data.extend(bytes(name, dtype, shape.iter().product()));
        header.insert(
            name.clone(),
            json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, data.len()] }),
        );
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    file
}

/// A type that is used in tests, as a name that lives on.
pub fn known(dtype: &str) -> &'static str {
    const KNOWN: [&str; 9] = [
        "F8_E4M3", "F8_E8M0", "U8", "I8", "BF16", "F16", "F32", "I32", "I64",
    ];
    KNOWN
        .into_iter()
        .find(|known| *known == dtype)
        .unwrap_or_else(|| panic!("{dtype} is not used in tests"))
}

pub fn width(dtype: &str) -> u64 {
    match dtype {
        "F8_E4M3" | "F8_E8M0" | "U8" | "I8" => 1,
        "BF16" | "F16" => 2,
        "F32" | "I32" => 4,
        "I64" => 8,
        other => panic!("{other} is not used in tests"),
    }
}

/// Bytes without a short period, and different for every name.
pub fn content(name: &str, bytes: u64) -> Vec<u8> {
    let mut state = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as u8
    };
    (0..bytes).map(|_| next()).collect()
}

/// The sizes of a decoder.
#[derive(Clone, Copy, Debug)]
pub struct Decoder {
    pub architecture: &'static str,
    pub layers: u64,
    pub hidden: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub intermediate: u64,
    pub vocabulary: u64,
}

pub const SMALL: Decoder = Decoder {
    architecture: "LlamaForCausalLM",
    layers: 2,
    hidden: 24,
    heads: 8,
    kv_heads: 4,
    head_dim: 3,
    intermediate: 40,
    vocabulary: 30,
};

impl Decoder {
    pub fn config(&self) -> Value {
        json!({
            "architectures": [self.architecture], "model_type": "llama", "hidden_size": self.hidden,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "intermediate_size": self.intermediate, "vocab_size": self.vocabulary,
            "num_hidden_layers": self.layers, "tie_word_embeddings": false, "dtype": "bfloat16",
        })
    }

    /// All tensors, the attention's and MLP's biases included; the head's own too.
    pub fn tensors(&self) -> Vec<Tensor> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut tensors: Vec<(String, Vec<u64>)> = Vec::new();
        tensors.push((
            "model.embed_tokens.weight".into(),
            vec![self.vocabulary, self.hidden],
        ));
        for layer in 0..self.layers {
            let mut linear = |name: &str, out: u64, input: u64| {
                tensors.push((format!("model.layers.{layer}.{name}.weight"), vec![out, input]));
                tensors.push((format!("model.layers.{layer}.{name}.bias"), vec![out]));
            };
            linear("self_attn.q_proj", q, self.hidden);
            linear("self_attn.k_proj", kv, self.hidden);
            linear("self_attn.v_proj", kv, self.hidden);
            linear("self_attn.o_proj", self.hidden, q);
            linear("mlp.gate_proj", self.intermediate, self.hidden);
            linear("mlp.up_proj", self.intermediate, self.hidden);
            linear("mlp.down_proj", self.hidden, self.intermediate);
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                tensors.push((format!("model.layers.{layer}.{norm}.weight"), vec![self.hidden]));
            }
            if self.architecture.starts_with("Qwen3") {
                for norm in ["self_attn.q_norm", "self_attn.k_norm"] {
                    tensors.push((format!("model.layers.{layer}.{norm}.weight"), vec![self.head_dim]));
                }
            }
        }
        tensors.push(("model.norm.weight".into(), vec![self.hidden]));
        tensors.push(("lm_head.weight".into(), vec![self.vocabulary, self.hidden]));
        tensors
            .into_iter()
            .map(|(name, shape)| (name, "BF16", shape))
            .collect()
    }

    /// As two files.
    pub fn make(&self) -> Made {
        let mut first = self.tensors();
        let second = first.split_off(first.len() / 2);
        Made::new(&self.config(), &[first, second])
    }
}

/// A checkpoint that transformers wrote.
pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/data")
        .join(name)
}

/// A world of so many tensor parallel ranks.
pub fn tensor_parallel(tp: u32) -> ShardingOptions {
    world(tp, 1, 1)
}

/// A world of these sizes.
pub fn world(tensor: u32, pipeline: u32, data: u32) -> ShardingOptions {
    ShardingOptions::new(Parallel {
        tensor,
        pipeline,
        data,
    })
}

/// All ranks of a world on one node, each on a device of its own.
pub fn ranks(parallel: &Parallel) -> Vec<(Placement, DeviceUuid)> {
    let placements = place(parallel, &Node::single(parallel.data)).unwrap();
    placements
        .into_iter()
        .map(|placement| (placement, DeviceUuid([placement.local_rank as u8; 16])))
        .collect()
}
