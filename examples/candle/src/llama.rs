//! A Llama, and generation of one token after another.

use anyhow::{Context, Result, bail, ensure};
use candle_core::{D, DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama, LlamaConfig};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// What the `config.json` of a checkpoint says: the model, and the element type of its weights.
pub fn config(model: &Path) -> Result<(Config, DType)> {
    let path = model.join("config.json");
    let json = fs::read(&path).map_err(anyhow::Error::from);
    let config = json.and_then(|json| parse(serde_json::from_slice(&json)?));
    config.with_context(|| path.display().to_string())
}

/// What candle's Llama needs of a config. What it would overlook, and then compute nonsense, is refused.
fn parse(mut config: Value) -> Result<(Config, DType)> {
    // Since version 5 transformers writes all that concerns rotary embedding into one object.
    let rope = config["rope_parameters"].take();
    if !rope.is_null() {
        config["rope_theta"] = rope["rope_theta"].clone();
        if rope["rope_type"] != "default" {
            config["rope_scaling"] = rope;
        }
    }
    let plain = config["model_type"] == "llama"
        && [&Value::Null, &json!("silu")].contains(&&config["hidden_act"])
        && config["attention_bias"] != true
        && config["mlp_bias"] != true;
    ensure!(plain, "this example knows Llama only, without biases");
    let head_dim = config["head_dim"].as_u64();
    let dtype = match config["dtype"].as_str().or(config["torch_dtype"].as_str()) {
        Some("bfloat16") => DType::BF16,
        Some("float16") => DType::F16,
        Some("float32") => DType::F32,
        other => bail!("this example knows no weights of type {other:?}"),
    };

    let config: LlamaConfig = serde_json::from_value(config)?;
    let config = config.into_config(false);
    let expected = config.hidden_size / config.num_attention_heads;
    ensure!(
        head_dim.is_none_or(|head_dim| head_dim == expected as u64),
        "this example knows no head_dim but hidden_size / num_attention_heads"
    );
    Ok((config, dtype))
}

/// A model with what it has seen so far.
#[derive(Debug)]
pub struct Generator {
    model: Llama,
    cache: Cache,
    device: Device,
    /// How many tokens it has seen.
    position: usize,
}

impl Generator {
    pub fn new(config: &Config, weights: VarBuilder<'_>) -> Result<Generator> {
        let device = weights.device().clone();
        let cache = Cache::new(true, weights.dtype(), config, &device)?;
        let model = Llama::load(weights, config)?;
        // A GPU may be at work still, and who measures wants to know when the model is there.
        device.synchronize()?;
        Ok(Generator {
            model,
            cache,
            device,
            position: 0,
        })
    }

    /// Takes in tokens, and says which is the most likely to follow them.
    pub fn next_after(&mut self, tokens: &[u32]) -> Result<u32> {
        let input = Tensor::new(tokens, &self.device)?.unsqueeze(0)?;
        let logits = self.model.forward(&input, self.position, &mut self.cache)?;
        self.position += tokens.len();
        Ok(logits.argmax(D::Minus1)?.squeeze(0)?.to_scalar()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{Memory, Weight};
    use crate::weights;
    use candle_core::safetensors::MmapedSafetensors;
    use std::path::PathBuf;

    const PROMPT: [u32; 5] = [1, 17, 230, 999, 4];
    /// What transformers 5.19 makes of it, in float32.
    const GREEDY: [u32; 24] = [
        830, 695, 338, 915, 302, 302, 302, 302, 407, 481, 989, 176, 302, 407, 481, 989, 176, 302, 407, 481,
        989, 176, 302, 989,
    ];

    fn model() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/llama")
    }

    fn generate(weights: VarBuilder<'_>) -> Vec<u32> {
        let (config, _) = config(&model()).unwrap();
        let mut generator = Generator::new(&config, weights).unwrap();
        let mut ids = vec![generator.next_after(&PROMPT).unwrap()];
        while ids.len() < 24 {
            let last = ids[ids.len() - 1];
            ids.push(generator.next_after(&[last]).unwrap());
        }
        ids
    }

    #[test]
    fn generates_what_transformers_generates() {
        let weights = weights::from_disk(&model(), DType::F32, &Device::Cpu).unwrap();
        assert_eq!(generate(weights), GREEDY);
    }

    #[test]
    fn weights_in_memory_are_as_good_as_files() {
        let files = weights::safetensors_of(&model()).unwrap();
        // SAFETY: nobody writes to the test data.
        let files = unsafe { MmapedSafetensors::multi(&files) }.unwrap();
        let tensors = files.tensors();
        let weights = tensors.iter().map(|(name, tensor)| Weight {
            name,
            dtype: tensor.dtype().try_into().unwrap(),
            shape: tensor.shape().to_vec(),
            memory: Memory::Host(tensor.data()),
        });
        let cached = weights::from_cache(weights, DType::F32, &Device::Cpu).unwrap();
        let read = weights::from_disk(&model(), DType::F32, &Device::Cpu).unwrap();
        assert_eq!(generate(cached), generate(read));
    }

    #[test]
    fn a_model_that_would_be_computed_wrongly_is_refused() {
        let config =
            || -> Value { serde_json::from_slice(&fs::read(model().join("config.json")).unwrap()).unwrap() };
        assert!(parse(config()).is_ok());
        for (key, value) in [
            ("model_type", json!("qwen3")),
            ("hidden_act", json!("gelu")),
            ("attention_bias", json!(true)),
            ("head_dim", json!(32)),
            (
                "rope_parameters",
                json!({"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0}),
            ),
        ] {
            let mut config = config();
            config[key] = value;
            assert!(parse(config).is_err(), "{key}");
        }
    }
}
