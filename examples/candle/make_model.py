#!/usr/bin/env python3
"""Writes a Llama of a real size with random bfloat16 weights: make_model.py DIR [LAYERS].

32 layers are the shapes of Llama 3.1 8B, 16 GB in four files. Needs torch, and is quick where torch finds a GPU.
"""

import json
import struct
import sys
from pathlib import Path

import torch

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCABULARY, FILES = 4096, 14336, 32, 8, 128256, 4

folder, layers = Path(sys.argv[1]), int((sys.argv[2:] or [32])[0])
folder.mkdir(parents=True, exist_ok=True)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

kv = HIDDEN // HEADS * KV_HEADS
shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
for layer in range(layers):
    for name, shape in {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }.items():
        shapes[f"model.layers.{layer}.{name}.weight"] = shape
shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}

names, per_file = list(shapes), -(-len(shapes) // FILES)
for number in range(FILES):
    header, end, here = {}, 0, names[number * per_file :][:per_file]
    for name in here:
        start, end = end, end + 2 * torch.Size(shapes[name]).numel()
        header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / f"model-{number + 1:05}-of-{FILES:05}.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in here:
            kind = {"dtype": torch.bfloat16, "device": device}
            norm = len(shapes[name]) == 1
            tensor = torch.ones(shapes[name], **kind) if norm else torch.randn(shapes[name], **kind) * 0.02
            file.write(tensor.view(torch.uint8).cpu().numpy().data)

weight_map = {name: f"model-{at // per_file + 1:05}-of-{FILES:05}.safetensors" for at, name in enumerate(names)}
(folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu"}
config |= {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": layers}
config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY}
config |= {"rms_norm_eps": 1e-05, "rope_theta": 500000.0, "max_position_embeddings": 8192}
(folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
