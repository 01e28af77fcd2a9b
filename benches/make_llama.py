#!/usr/bin/env python3
"""Write a bfloat16 checkpoint with the shapes of an 8B Llama (16 GB), in several files with an index, without PyTorch.

usage: make_llama.py DIR [--layers N] [--files N] [--sparse]

--sparse leaves holes for weights: all zero, no room taken. The bytes are otherwise random, from one seed.
"""
import argparse, json, os, random, struct

HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, KV_HEADS = 4096, 14336, 128256, 32, 8
KV = HIDDEN // HEADS * KV_HEADS
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN), "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
}


def shapes(layers):
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        for name, shape in LAYER.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def size(shape):
    bytes = 2
    for dimension in shape:
        bytes *= dimension
    return bytes


def write(path, tensors, noise):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size(shape)]}
        end += size(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        if noise is None:
            file.truncate(start + end)
            return
        while file.tell() < start + end:
            file.write(noise[: start + end - file.tell()])
            noise = noise[4099:] + noise[:4099]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--sparse", action="store_true")
    args = parser.parse_args()
    os.makedirs(args.dir, exist_ok=True)
    noise = None if args.sparse else random.Random(1).randbytes(64 << 20)
    tensors = list(shapes(args.layers))
    total = sum(size(shape) for _, shape in tensors)
    files, filled = [[] for _ in range(args.files)], 0
    for tensor in tensors:
        files[min(args.files - 1, filled * args.files // total)].append(tensor)
        filled += size(tensor[1])
    weight_map = {}
    for number, held in enumerate(files, 1):
        name = f"model-{number:05}-of-{args.files:05}.safetensors"
        write(os.path.join(args.dir, name), held, noise)
        weight_map.update((tensor, name) for tensor, _ in held)
    with open(os.path.join(args.dir, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file, indent=2)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS, "num_hidden_layers": args.layers, "vocab_size": VOCABULARY,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }
    with open(os.path.join(args.dir, "config.json"), "w") as file:
        json.dump(config, file, indent=2)


main()
