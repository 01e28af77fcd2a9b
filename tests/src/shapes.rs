//! Tensors of the sizes that benchmarks speak of.

/// Names and shapes (bf16) of an 8B Llama as an engine holds it: 195 tensors, 16 GB, with q, k, v and
/// gate, up fused.
pub fn llama_8b() -> Vec<(String, Vec<u64>)> {
    const HIDDEN: u64 = 4096;
    const INTERMEDIATE: u64 = 14336;
    const VOCABULARY: u64 = 128_256;
    let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![VOCABULARY, HIDDEN])];
    for layer in 0..32 {
        let mut add = |name: &str, shape: &[u64]| {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), shape.to_vec()));
        };
        add("self_attn.qkv_proj", &[6144, HIDDEN]);
        add("self_attn.o_proj", &[HIDDEN, HIDDEN]);
        add("mlp.gate_up_proj", &[2 * INTERMEDIATE, HIDDEN]);
        add("mlp.down_proj", &[HIDDEN, INTERMEDIATE]);
        add("input_layernorm", &[HIDDEN]);
        add("post_attention_layernorm", &[HIDDEN]);
    }
    tensors.push(("model.norm.weight".to_owned(), vec![HIDDEN]));
    tensors.push(("lm_head.weight".to_owned(), vec![VOCABULARY, HIDDEN]));
    tensors
}

/// `count` tensors of `shape`.
pub fn many(count: usize, shape: &[u64]) -> Vec<(String, Vec<u64>)> {
    (0..count)
        .map(|number| (format!("model.layers.{number}.weight"), shape.to_vec()))
        .collect()
}
