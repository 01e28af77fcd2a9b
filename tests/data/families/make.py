"""Makes the reference data of this folder: for each family a tiny config.json, the list of the checkpoint's tensors,
and the digests of what vLLM holds on each rank of that checkpoint. See README.md.

usage: make.py [FAMILY...]      all families without arguments
"""
import json, struct, sys, tempfile, traceback
from pathlib import Path

sys.dont_write_bytecode = True

import numpy, torch, transformers
from safetensors import safe_open

from vllm_ranks import ranks

HERE = Path(__file__).parent
WIDTH = {"BF16": 2, "F32": 4}

# Sizes at which mistakes show: a vocabulary that is not a multiple of vLLM's padding (64), fewer key/value heads than
# tensor ranks, layers that pipeline ranks do not divide, odd slices of the intermediate dimension.
BASE = dict(vocab_size=1000, hidden_size=96, intermediate_size=344, num_hidden_layers=3, num_attention_heads=8,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
            pad_token_id=0, tie_word_embeddings=False)
SMALL = BASE | dict(vocab_size=499)
MOE = SMALL | dict(moe_intermediate_size=72, num_experts_per_tok=2)
MLA = MOE | dict(num_key_value_heads=8, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
                 n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, n_group=2, topk_group=1)

# (tp, pp, dp, ep)
DENSE_RUNS = [(1, 1, 1, 0), (2, 1, 1, 0), (4, 1, 1, 0), (2, 2, 1, 0)]
MOE_RUNS = DENSE_RUNS + [(2, 1, 1, 1), (4, 1, 1, 1), (1, 2, 1, 1)]
DATA_RUNS = MOE_RUNS + [(2, 1, 2, 0), (2, 1, 2, 1)]

# family: (configuration class of transformers, its arguments, runs)
FAMILIES = {
    "llama": ("Llama", BASE, DENSE_RUNS),
    "llama_bias": ("Llama", SMALL | dict(attention_bias=True, mlp_bias=True), DENSE_RUNS),
    "llama_tied": ("Llama", SMALL | dict(tie_word_embeddings=True), DENSE_RUNS),
    "llama_extra": ("Llama", SMALL | dict(tie_word_embeddings=True), DENSE_RUNS),
    "mistral": ("Mistral", SMALL, DENSE_RUNS),
    "qwen2": ("Qwen2", SMALL | dict(hidden_size=128), DENSE_RUNS),
    "qwen3": ("Qwen3", SMALL, DENSE_RUNS),
    "gemma2": ("Gemma2", SMALL | dict(tie_word_embeddings=True), DENSE_RUNS),
    "gemma3_text": ("Gemma3Text", SMALL | dict(tie_word_embeddings=True), DENSE_RUNS),
    "phi3": ("Phi3", SMALL | dict(hidden_size=128), DENSE_RUNS),
    "mixtral": ("Mixtral", SMALL | dict(intermediate_size=72, num_local_experts=8), DATA_RUNS),
    "qwen2_moe": ("Qwen2Moe", MOE | dict(hidden_size=128, num_experts=10, shared_expert_intermediate_size=88),
                  DATA_RUNS),
    "qwen3_moe": ("Qwen3Moe", MOE | dict(num_experts=8), DATA_RUNS),
    "deepseek_v2": ("DeepseekV2", MLA | dict(q_lora_rank=None, n_group=1, topk_method="greedy"), MOE_RUNS),
    "deepseek_v2_lora": ("DeepseekV2", MLA | dict(q_lora_rank=48, topk_method="group_limited_greedy"), MOE_RUNS),
    "deepseek_v3": ("DeepseekV3", MLA | dict(q_lora_rank=48, topk_method="noaux_tc"), DATA_RUNS),
    "deepseek_v3_mtp": ("DeepseekV3", MLA | dict(q_lora_rank=48, topk_method="noaux_tc", num_nextn_predict_layers=1),
                        MOE_RUNS),
    "olmo2": ("Olmo2", SMALL | dict(hidden_size=128), DENSE_RUNS),
    "glm4": ("Glm4", SMALL | dict(attention_bias=True), DENSE_RUNS),
    "glm4_moe": ("Glm4Moe", MOE | dict(n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1,
                                       use_qk_norm=True, attention_bias=True), DATA_RUNS),
    "granite": ("Granite", SMALL | dict(hidden_size=128, tie_word_embeddings=True), DENSE_RUNS),
    "cohere": ("Cohere", SMALL | dict(hidden_size=128, tie_word_embeddings=True), DENSE_RUNS),
    # vLLM cannot load the norms of key heads that ranks share.
    "cohere_norm": ("Cohere", SMALL | dict(hidden_size=128, num_key_value_heads=4, use_qk_norm=True,
                                           tie_word_embeddings=True), DENSE_RUNS),
    "cohere2": ("Cohere2", SMALL | dict(hidden_size=128, tie_word_embeddings=True), DENSE_RUNS),
    # vLLM has no shared key heads here, and its CPU kernel wants multiples of 32.
    "gpt_oss": ("GptOss", SMALL | dict(num_key_value_heads=4, intermediate_size=128, num_local_experts=8,
                                       num_experts_per_tok=2), DATA_RUNS),
}

# Tensors that published checkpoints have and transformers no longer saves; vLLM drops them.
EXTRA = {
    "llama_extra": {
        "lm_head.weight": ["BF16", [499, 96]],
        "model.layers.0.self_attn.rotary_emb.inv_freq": ["F32", [8]],
    },
    "deepseek_v3_mtp": {
        "model.layers.3.embed_tokens.weight": ["BF16", [499, 96]],
        "model.layers.3.enorm.weight": ["BF16", [96]],
        "model.layers.3.eh_proj.weight": ["BF16", [96, 192]],
        "model.layers.3.input_layernorm.weight": ["BF16", [96]],
        "model.layers.3.self_attn.q_a_proj.weight": ["BF16", [48, 96]],
        "model.layers.3.mlp.experts.7.down_proj.weight": ["BF16", [96, 72]],
        "model.layers.3.shared_head.head.weight": ["BF16", [499, 96]],
    },
}


def main():
    for family in sys.argv[1:] or FAMILIES:
        try:
            make(family)
        except Exception:
            print(f"{family}: no model")
            traceback.print_exc()


def make(family):
    kind, arguments, runs = FAMILIES[family]
    folder = HERE / family
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as model:
        tensors = save(family, kind, arguments, Path(model))
        rows = [f"{json.dumps(name)}: {json.dumps(what)}" for name, what in tensors.items()]
        (folder / "tensors.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")
        (folder / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
        for tp, pp, dp, ep in runs:
            name = "vllm_" + (f"dp{dp}_" if dp > 1 else "") + f"tp{tp}_pp{pp}" + ("ep" if ep else "")
            try:
                found = ranks(model, tp, pp, dp, bool(ep))
            except Exception as e:
                print(f"{family}: no {name}: {e}", flush=True)
                continue
            (folder / f"{name}.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
            print(f"{family}: {name}", flush=True)


def save(family, kind, arguments, model):
    """Saves a model with patterned tensors and says which tensors it has, in stored order."""
    torch.manual_seed(0)
    config = getattr(transformers, kind + "Config")(**arguments)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model)
    path = model / "model.safetensors"
    with safe_open(path, "np") as f:
        slices = {name: f.get_slice(name) for name in f.offset_keys()}
        tensors = {name: [s.get_dtype(), s.get_shape()] for name, s in slices.items()} | EXTRA.get(family, {})
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + numpy.prod(shape, dtype=int).item() * WIDTH[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, (dtype, shape) in tensors.items(): f.write(pattern(name, dtype, shape))
    return tensors


def pattern(name, dtype, shape):
    """Finite values below 2 that say which tensor and which element they are."""
    seed = 0xCBF29CE484222325
    for byte in name.encode(): seed = (seed ^ byte) * 0x100000001B3 % 2**64  # FNV-1a
    index = numpy.arange(numpy.prod(shape, dtype=int), dtype=numpy.uint32)
    bits = (index * numpy.uint32(0x9E3779B1) + numpy.uint32(seed % 2**32)) >> 16 & 0xBFFF
    return (bits << 16).astype("<u4").tobytes() if dtype == "F32" else bits.astype("<u2").tobytes()


if __name__ == "__main__": main()
