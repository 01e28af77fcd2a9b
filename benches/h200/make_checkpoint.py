"""Write a random bf16 checkpoint with the shapes of an 8B Llama (16 GB) as Hugging Face transformers lays it out.

usage: python3 make_checkpoint.py DIR [LAYERS]     one file, model.safetensors, beside config.json
"""
import json, os, sys
import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, KV_HEADS = 4096, 14336, 128256, 32, 8
directory, layers = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 32
os.makedirs(directory, exist_ok=True)
kv = HIDDEN // HEADS * KV_HEADS
shapes = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "lm_head.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
}
for layer in range(layers):
    for name, shape in {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }.items():
        shapes[f"model.layers.{layer}.{name}.weight"] = shape
tensors = {name: torch.randn(*shape, device="cuda", dtype=torch.bfloat16).cpu() for name, shape in shapes.items()}
save_file(tensors, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
config = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS, "num_hidden_layers": layers, "vocab_size": VOCABULARY,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}
with open(os.path.join(directory, "config.json"), "w") as file:
    json.dump(config, file, indent=2)
