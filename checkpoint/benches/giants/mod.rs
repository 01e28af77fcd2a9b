//! The largest checkpoints, without their weights: configuration, index and headers, in sparse files.

use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use weightd_checkpoint::{Checkpoint, Layout, NodePlan, Sharding, ShardingOptions};
use weightd_core::content::{DeviceUuid, HandleKind};
use weightd_core::plan::experts::ExpertPlacement;
use weightd_core::plan::placement::{Node, Parallel, place};

/// A model's configuration, its tensors in stored order, and in how many files they are.
pub struct Giant {
    pub name: &'static str,
    config: Value,
    files: u64,
    tensors: Vec<(String, &'static str, Vec<u64>)>,
    /// Whether there are experts to spread.
    has_experts: bool,
}

/// A way to split one.
pub struct Case {
    pub name: &'static str,
    pub options: ShardingOptions,
}

/// The shapes of Llama 3.1 405B.
pub fn llama() -> Giant {
    let (layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary) =
        (126, 16384, 128, 8, 128, 53248, 128256);
    let mut tensors = Tensors(Vec::new());
    tensors.weight("model.embed_tokens", &[vocabulary, hidden]);
    for layer in 0..layers {
        let mut weight =
            |name: &str, shape: &[u64]| tensors.weight(&format!("model.layers.{layer}.{name}"), shape);
        weight("input_layernorm", &[hidden]);
        weight("mlp.down_proj", &[hidden, intermediate]);
        weight("mlp.gate_proj", &[intermediate, hidden]);
        weight("mlp.up_proj", &[intermediate, hidden]);
        weight("post_attention_layernorm", &[hidden]);
        weight("self_attn.k_proj", &[kv_heads * head_dim, hidden]);
        weight("self_attn.o_proj", &[hidden, heads * head_dim]);
        weight("self_attn.q_proj", &[heads * head_dim, hidden]);
        weight("self_attn.v_proj", &[kv_heads * head_dim, hidden]);
    }
    tensors.weight("model.norm", &[hidden]);
    tensors.weight("lm_head", &[vocabulary, hidden]);
    Giant {
        name: "llama 405b",
        config: json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": intermediate,
            "vocab_size": vocabulary, "num_hidden_layers": layers, "tie_word_embeddings": false,
            "dtype": "bfloat16",
        }),
        files: 191,
        tensors: tensors.0,
        has_experts: false,
    }
}

/// The shapes of DeepSeek V3 in bfloat16, without the layer that predicts a further token.
pub fn deepseek() -> Giant {
    let (layers, dense, hidden, heads, vocabulary) = (61, 3, 7168, 128, 129280);
    let (q_lora, kv_lora, nope, rope, value) = (1536, 512, 128, 64, 128);
    let (experts, intermediate, dense_intermediate) = (256, 2048, 18432);
    let mut tensors = Tensors(Vec::new());
    tensors.weight("model.embed_tokens", &[vocabulary, hidden]);
    for layer in 0..layers {
        let layer_name = |name: &str| format!("model.layers.{layer}.{name}");
        let mut weight = |name: &str, shape: &[u64]| tensors.weight(&layer_name(name), shape);
        weight("self_attn.q_a_proj", &[q_lora, hidden]);
        weight("self_attn.q_a_layernorm", &[q_lora]);
        weight("self_attn.q_b_proj", &[heads * (nope + rope), q_lora]);
        weight("self_attn.kv_a_proj_with_mqa", &[kv_lora + rope, hidden]);
        weight("self_attn.kv_a_layernorm", &[kv_lora]);
        weight("self_attn.kv_b_proj", &[heads * (nope + value), kv_lora]);
        weight("self_attn.o_proj", &[hidden, heads * value]);
        let mut mlp = |name: &str, intermediate: u64| {
            weight(&format!("{name}.gate_proj"), &[intermediate, hidden]);
            weight(&format!("{name}.up_proj"), &[intermediate, hidden]);
            weight(&format!("{name}.down_proj"), &[hidden, intermediate]);
        };
        if layer < dense {
            mlp("mlp", dense_intermediate);
        } else {
            (0..experts).for_each(|expert| mlp(&format!("mlp.experts.{expert}"), intermediate));
            mlp("mlp.shared_experts", intermediate);
            weight("mlp.gate", &[experts, hidden]);
        }
        weight("input_layernorm", &[hidden]);
        weight("post_attention_layernorm", &[hidden]);
        if layer >= dense {
            tensors.0.push((
                layer_name("mlp.gate.e_score_correction_bias"),
                "F32",
                vec![experts],
            ));
        }
    }
    tensors.weight("model.norm", &[hidden]);
    tensors.weight("lm_head", &[vocabulary, hidden]);
    Giant {
        name: "deepseek v3",
        config: json!({
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": hidden,
            "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": q_lora,
            "kv_lora_rank": kv_lora, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value,
            "intermediate_size": dense_intermediate, "moe_intermediate_size": intermediate,
            "n_routed_experts": experts, "n_shared_experts": 1, "n_group": 8, "first_k_dense_replace": dense,
            "vocab_size": vocabulary, "num_hidden_layers": layers, "tie_word_embeddings": false,
            "dtype": "bfloat16",
        }),
        files: 163,
        tensors: tensors.0,
        has_experts: true,
    }
}

struct Tensors(Vec<(String, &'static str, Vec<u64>)>);

impl Tensors {
    fn weight(&mut self, module: &str, shape: &[u64]) {
        self.0.push((format!("{module}.weight"), "BF16", shape.to_vec()));
    }
}

impl Giant {
    /// Writes it into `dir`; each file begins where its even share of the bytes does.
    pub fn write(&self, dir: &Path) {
        let bytes = |(_, dtype, shape): &(String, &str, Vec<u64>)| {
            shape.iter().product::<u64>() * if *dtype == "F32" { 4 } else { 2 }
        };
        let total: u64 = self.tensors.iter().map(bytes).sum();
        let (mut file_of, mut before, mut number) = (Map::new(), 0, 0);
        let file_at = |at: u64| u128::from(at) * u128::from(self.files) / u128::from(total);
        for tensors in self.tensors.chunk_by(|tensor, _| {
            let here = file_at(before);
            before += bytes(tensor);
            here == file_at(before)
        }) {
            number += 1;
            let name = format!("model-{number:05}-of-{:05}.safetensors", self.files);
            let (mut header, mut end) = (Map::new(), 0);
            for tensor in tensors {
                let (start, (tensor_name, dtype, shape)) = (end, tensor);
                end += bytes(tensor);
                let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] });
                header.insert(tensor_name.clone(), entry);
                file_of.insert(tensor_name.clone(), json!(name));
            }
            let header = Value::Object(header).to_string();
            let mut file = File::create(dir.join(&name)).unwrap();
            file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
            file.write_all(header.as_bytes()).unwrap();
            file.set_len(8 + header.len() as u64 + end).unwrap();
            // So that nobody who opens it has to wait for the disk.
            file.sync_all().unwrap();
        }
        assert_eq!(number, self.files, "every file has a tensor");
        let index = json!({ "metadata": { "total_size": total }, "weight_map": file_of });
        fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
        fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
    }

    /// The ways to split it that count.
    pub fn cases(&self) -> impl Iterator<Item = Case> {
        cases().filter(|case| self.has_experts || case.options.experts.is_none())
    }
}

/// Over 8 ranks in both layouts, and experts spread over 16.
pub fn cases() -> impl Iterator<Item = Case> {
    let case = |name, data, layout, experts| {
        let tensor = 8;
        let parallel = Parallel {
            tensor,
            pipeline: 1,
            data,
        };
        let options = ShardingOptions {
            layout,
            experts,
            ..ShardingOptions::new(parallel)
        };
        Case { name, options }
    };
    let spread = Some(ExpertPlacement::Linear);
    [
        case("tp 8, checkpoint", 1, Layout::Checkpoint, None),
        case("tp 8, vllm", 1, Layout::Vllm, None),
        case(
            "tp 8, dp 2, experts spread, checkpoint",
            2,
            Layout::Checkpoint,
            spread,
        ),
        case("tp 8, dp 2, experts spread, vllm", 2, Layout::Vllm, spread),
    ]
    .into_iter()
}

/// The plan of one rank alone, as a node with one device makes it.
pub fn plan_one(checkpoint: &Checkpoint, options: &ShardingOptions) -> NodePlan {
    let parallel = options.parallel;
    let placements = place(&parallel, &Node::single(parallel.data)).unwrap();
    let rank = (placements[3], DeviceUuid([3; 16]));
    NodePlan::new(
        &Sharding::new(checkpoint, options).unwrap(),
        &[rank],
        HandleKind::CudaFd,
    )
    .unwrap()
}
