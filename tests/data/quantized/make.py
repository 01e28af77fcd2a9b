"""Makes the reference data of this folder: for each quantized checkpoint its config.json, the list of its tensors, and
the digests of what vLLM holds of each tensor on each rank. See README.md.

usage: make.py [-v] [NAME...]      all without names; -v says where in vLLM's parameters rank 0 has each tensor
"""
import json, struct, sys, tempfile
from math import ceil
from pathlib import Path

sys.dont_write_bytecode = True

import numpy

from vllm_shards import ranks

HERE = Path(__file__).parent
WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1, "I32": 4, "I64": 8}

LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=512, hidden_size=256,
             intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
             max_position_embeddings=256, rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=False,
             bos_token_id=1, eos_token_id=2, dtype="bfloat16",
             rope_parameters=dict(rope_type="default", rope_theta=10000.0))
# Blocks of 128: key and value heads of 128, so that each of them is whole blocks.
BLOCKS = LLAMA | dict(intermediate_size=1024, head_dim=128)
PHI3 = dict(architectures=["Phi3ForCausalLM"], model_type="phi3", pad_token_id=0,
            original_max_position_embeddings=256)
QWEN3_MOE = LLAMA | dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", moe_intermediate_size=512,
                         num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, norm_topk_prob=True,
                         mlp_only_layers=[])
MIXTRAL = LLAMA | dict(architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=4,
                       num_experts_per_tok=2)
DEEPSEEK = LLAMA | dict(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", num_key_value_heads=8,
                        moe_intermediate_size=512, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
                        first_k_dense_replace=1, n_group=2, topk_group=1, topk_method="noaux_tc",
                        scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5, q_lora_rank=256,
                        kv_lora_rank=512, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64,
                        num_nextn_predict_layers=0)
GPT_OSS = LLAMA | dict(architectures=["GptOssForCausalLM"], model_type="gpt_oss", num_key_value_heads=4,
                       intermediate_size=256, num_local_experts=4, num_experts_per_tok=2, sliding_window=128,
                       layer_types=["sliding_attention", "full_attention"], swiglu_limit=7.0, swiglu_alpha=1.702,
                       attention_bias=True,
                       rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0,
                                            beta_slow=1.0, original_max_position_embeddings=4096, truncate=False))


# What a linear module stores: {suffix: [dtype, shape]} of outputs n and inputs k.

def plain(n, k): return {"weight": ["BF16", [n, k]]}


def gptq(bits, group, act="F16"):
    pack = 32 // bits
    def tensors(n, k):
        groups = 1 if group == -1 else ceil(k / group)
        return {"g_idx": ["I32", [k]], "qweight": ["I32", [k // pack, n]], "qzeros": ["I32", [groups, n // pack]],
                "scales": [act, [groups, n]]}
    return tensors


def awq(group):
    return lambda n, k: {"qweight": ["I32", [k, n // 8]], "qzeros": ["I32", [k // group, n // 8]],
                         "scales": ["F16", [k // group, n]]}


def fp8_tensor(shape, static=True):
    return lambda n, k: {"weight": ["F8_E4M3", [n, k]], "weight_scale": ["F32", shape],
                         **({"input_scale": ["F32", shape]} if static else {})}


def fp8_block(scale="weight_scale_inv"):
    return lambda n, k: {"weight": ["F8_E4M3", [n, k]], scale: ["F32", [ceil(n / 128), ceil(k / 128)]]}


def channel(weight, scale):
    return lambda n, k: {"weight": [weight, [n, k]], "weight_scale": [scale, [n, 1]]}


def packed(bits, group, symmetric):
    def tensors(n, k):
        groups = 1 if group is None else k // group
        out = {"weight_packed": ["I32", [n, ceil(k * bits / 32)]], "weight_scale": ["BF16", [n, groups]],
               "weight_shape": ["I64", [2]]}
        return out if symmetric else out | {"weight_zero_point": ["I32", [n * bits // 32, groups]]}
    return tensors


def nvfp4(n, k):
    return {"input_global_scale": ["F32", [1]], "weight_global_scale": ["F32", [1]],
            "weight_packed": ["U8", [n, k // 2]], "weight_scale": ["F8_E4M3", [n, k // 16]]}


# The tensors of a model.

def dense(config, linear):
    """Llama, and what it has in common with the others."""
    yield from model(config, lambda c, i: attention(c, linear), lambda c, i: mlp(c, linear))


def model(config, attention, feed_forward):
    act = {"bfloat16": "BF16", "float16": "F16"}[config["dtype"]]
    h, v = config["hidden_size"], config["vocab_size"]
    yield "lm_head.weight", [act, [v, h]]
    yield "model.embed_tokens.weight", [act, [v, h]]
    for i in range(config["num_hidden_layers"]):
        here = f"model.layers.{i}."
        yield here + "input_layernorm.weight", [act, [h]]
        yield here + "post_attention_layernorm.weight", [act, [h]]
        for name, what in attention(config, i): yield here + "self_attn." + name, what
        for name, what in feed_forward(config, i): yield here + name, what
    yield "model.norm.weight", [act, [h]]


def module(name, tensors): return ((f"{name}.{suffix}", what) for suffix, what in tensors.items())


def attention(c, linear, bias=None):
    h, q, kv = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    for name, n, k in [("k_proj", kv, h), ("o_proj", h, q), ("q_proj", q, h), ("v_proj", kv, h)]:
        yield from module(name, linear(n, k) | ({"bias": [bias, [n]]} if bias else {}))
    if c["model_type"] == "qwen3_moe":
        yield from ((f"{n}_norm.weight", ["BF16", [c["head_dim"]]]) for n in "kq")


def cache_scales(model, names):
    """Scales of a quantized key/value cache."""
    def tensors(config, linear):
        yield from model(config, linear)
        for i in range(config["num_hidden_layers"]):
            yield from ((f"model.layers.{i}.self_attn.{name}", what) for name, what in names.items())
    return tensors


def mlp(c, linear, size=None, at="mlp"):
    h, n = c["hidden_size"], size or c["intermediate_size"]
    for name, a, b in [("down_proj", h, n), ("gate_proj", n, h), ("up_proj", n, h)]:
        yield from module(f"{at}.{name}", linear(a, b))


def qwen3_moe(config, linear, expert=None):
    act = {"bfloat16": "BF16", "float16": "F16"}[config["dtype"]]
    def experts(c, i):
        for e in range(c["num_experts"]):
            yield from mlp(c, expert or linear, c["moe_intermediate_size"], f"mlp.experts.{e}")
        yield "mlp.gate.weight", [act, [c["num_experts"], c["hidden_size"]]]
    yield from model(config, lambda c, i: attention(c, linear), experts)


def mixtral(config, linear):
    act = {"bfloat16": "BF16", "float16": "F16"}[config["dtype"]]
    def experts(c, i):
        h, n, at = c["hidden_size"], c["intermediate_size"], "block_sparse_moe"
        for e in range(c["num_local_experts"]):
            for name, a, b in [("w1", n, h), ("w2", h, n), ("w3", n, h)]:
                yield from module(f"{at}.experts.{e}.{name}", linear(a, b))
        yield f"{at}.gate.weight", [act, [c["num_local_experts"], h]]
    yield from model(config, lambda c, i: attention(c, linear), experts)


def deepseek(config, linear):
    def latent(c, i):
        heads, nope, rope, v = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        h, q, kv = c["hidden_size"], c["q_lora_rank"], c["kv_lora_rank"]
        yield "kv_a_layernorm.weight", ["BF16", [kv]]
        yield "q_a_layernorm.weight", ["BF16", [q]]
        for name, n, k in [("kv_a_proj_with_mqa", kv + rope, h), ("kv_b_proj", heads * (nope + v), kv),
                           ("o_proj", h, heads * v), ("q_a_proj", q, h), ("q_b_proj", heads * (nope + rope), q)]:
            yield from module(name, linear(n, k))
    def experts(c, i):
        if i < c["first_k_dense_replace"]: return (yield from mlp(c, linear))
        n = c["moe_intermediate_size"]
        for e in range(c["n_routed_experts"]): yield from mlp(c, linear, n, f"mlp.experts.{e}")
        yield "mlp.gate.e_score_correction_bias", ["F32", [c["n_routed_experts"]]]
        yield "mlp.gate.weight", ["BF16", [c["n_routed_experts"], c["hidden_size"]]]
        yield from mlp(c, linear, n * c["n_shared_experts"], "mlp.shared_experts")
    yield from model(config, latent, experts)


def phi3(config, linear):
    def fused(c, i):
        h, q, kv = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        yield from module("o_proj", linear(h, q))
        yield from module("qkv_proj", linear(q + 2 * kv, h))
    def feed_forward(c, i):
        h, n = c["hidden_size"], c["intermediate_size"]
        yield from module("mlp.down_proj", linear(h, n))
        yield from module("mlp.gate_up_proj", linear(2 * n, h))
    yield from model(config, fused, feed_forward)


def gpt_oss(config, linear):
    def heads(c, i):
        yield from attention(c, plain, "BF16")
        yield "sinks", ["BF16", [c["num_attention_heads"]]]
    def experts(c, i):
        e, h, n = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
        for name, a, b in [("down_proj", h, n), ("gate_up_proj", 2 * n, h)]:
            yield f"mlp.experts.{name}_bias", ["BF16", [e, a]]
            yield f"mlp.experts.{name}_blocks", ["U8", [e, a, b // 32, 16]]
            yield f"mlp.experts.{name}_scales", ["U8", [e, a, b // 32]]
        yield "mlp.router.bias", ["BF16", [e]]
        yield "mlp.router.weight", ["BF16", [e, h]]
    yield from model(config, heads, experts)


# The entries quantization_config of the configurations.

def gptq_config(bits, group, **more):
    return dict(quant_method="gptq", bits=bits, group_size=group, desc_act=False, sym=True) | more


AWQ = dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm")
FP8_BLOCK = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])


def compressed(format, weights, inputs=None, ignore=("lm_head",)):
    return {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "ignore": list(ignore), "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}}}


def args(bits, type, strategy, dynamic=False, symmetric=True, **more):
    return dict(num_bits=bits, type=type, symmetric=symmetric, strategy=strategy, dynamic=dynamic) | more


DENSE = [(1, 0), (2, 0), (4, 0)]
MOE = DENSE + [(2, 1)]
HALF = dict(dtype="float16")
GATES = ["lm_head", "re:.*mlp.gate$"]
INT8 = compressed("int-quantized", args(8, "int", "channel"), args(8, "int", "token", True))
FP8_TOKEN = args(8, "float", "token", True)
FP8_STATIC = args(8, "float", "tensor")

# name: (configuration, its quantization_config, tensors, linear, [(tp, ep)])
MODELS = {
    "gptq4": (LLAMA | HALF, gptq_config(4, 32), dense, gptq(4, 32), DENSE),
    "gptq8_channel": (LLAMA | HALF, gptq_config(8, -1), dense, gptq(8, -1), DENSE),
    "gptq4_group128": (LLAMA | HALF, gptq_config(4, 128), dense, gptq(4, 128), [(2, 0)]),
    "gptq4_bias": (LLAMA | HALF, gptq_config(4, 32), dense, lambda n, k: gptq(4, 32)(n, k) | {"bias": ["F16", [n]]},
                   [(2, 0)]),
    "gptq4_act": (LLAMA | HALF, gptq_config(4, 32, desc_act=True), dense, gptq(4, 32), [(1, 0), (2, 0)]),
    "gptq8_channel_act": (LLAMA | HALF, gptq_config(8, -1, desc_act=True), dense, gptq(8, -1), [(1, 0), (2, 0)]),
    "awq4": (LLAMA | HALF, AWQ, dense, awq(32), DENSE),
    "awq4_group128": (LLAMA | HALF, AWQ | dict(group_size=128), dense, awq(128), [(2, 0), (4, 0)]),
    "fp8_tensor": (LLAMA, dict(quant_method="fp8", activation_scheme="static"), dense, fp8_tensor([]), DENSE),
    "fp8_tensor1": (LLAMA, dict(quant_method="fp8", activation_scheme="dynamic"), cache_scales(dense, {
        "k_proj.k_scale": ["F32", [1]], "v_proj.v_scale": ["F32", [1]]}), fp8_tensor([1], False), DENSE),
    "fp8_block": (BLOCKS, FP8_BLOCK, dense, fp8_block(), DENSE),
    "fp8_block_kv64": (LLAMA, FP8_BLOCK, dense, fp8_block(), DENSE),
    "fp8_block_mlp640": (BLOCKS | dict(intermediate_size=640), FP8_BLOCK, dense, fp8_block(), DENSE),
    "ct_fp8_block_kv64": (LLAMA, compressed("float-quantized", args(8, "float", "block", block_structure=[128, 128]),
                                            args(8, "float", "group", True, group_size=128)), dense,
                          fp8_block("weight_scale"), DENSE),
    "fbgemm_fp8": (LLAMA, dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0,
                               modules_to_not_convert=["lm_head"]), dense, channel("F8_E4M3", "F32"), DENSE),
    "ct_int8": (LLAMA, INT8, dense, channel("I8", "F32"), DENSE),
    "ct_fp8_channel": (LLAMA, compressed("float-quantized", args(8, "float", "channel"), FP8_TOKEN), dense,
                       channel("F8_E4M3", "F32"), DENSE),
    "ct_fp8_tensor": (LLAMA, compressed("float-quantized", args(8, "float", "tensor"), FP8_STATIC)
                      | dict(kv_cache_scheme=args(8, "float", "tensor")), cache_scales(dense, {
        "k_scale": ["F32", [1]], "v_scale": ["F32", [1]]}), fp8_tensor([1]), DENSE),
    "ct_fp8_block": (BLOCKS, compressed("float-quantized",
                                        args(8, "float", "block", block_structure=[128, 128]),
                                        args(8, "float", "group", True, group_size=128)), dense,
                     fp8_block("weight_scale"), DENSE),
    "ct_int4": (LLAMA, compressed("pack-quantized", args(4, "int", "group", group_size=32)), dense,
                packed(4, 32, True), DENSE),
    "ct_int4_asym": (LLAMA, compressed("pack-quantized", args(4, "int", "group", symmetric=False, group_size=32)),
                     dense, packed(4, 32, False), DENSE),
    "ct_int4_channel": (LLAMA, compressed("pack-quantized", args(4, "int", "channel")), dense, packed(4, None, True),
                        DENSE),
    "ct_int4_group128": (LLAMA, compressed("pack-quantized", args(4, "int", "group", group_size=128)), dense,
                         packed(4, 128, True), [(2, 0), (4, 0)]),
    "ct_nvfp4": (LLAMA, compressed("nvfp4-pack-quantized",
                                   args(4, "float", "tensor_group", group_size=16),
                                   args(4, "float", "tensor_group", "local", group_size=16)), dense, nvfp4, DENSE),
    "gpt_oss_mxfp4": (GPT_OSS, dict(quant_method="mxfp4", modules_to_not_convert=[
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]), gpt_oss, None, MOE),
    "gpt_oss_mxfp4_320": (GPT_OSS | dict(intermediate_size=320), dict(quant_method="mxfp4", modules_to_not_convert=[
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]), gpt_oss, None,
        [(2, 0), (4, 0)]),
    "gpt_oss_mxfp4_5experts": (GPT_OSS | dict(num_local_experts=5), dict(quant_method="mxfp4"), gpt_oss, None, [(2, 1)]),
    "deepseek_fp8_block": (DEEPSEEK, FP8_BLOCK, deepseek, fp8_block(), MOE),
    "qwen3_moe_fp8_block": (QWEN3_MOE | dict(head_dim=128), FP8_BLOCK | dict(
        modules_to_not_convert=["lm_head"] + [f"model.layers.{i}.mlp.gate" for i in range(2)]),
        qwen3_moe, fp8_block(), MOE),
    "qwen3_moe_fp8_block192": (QWEN3_MOE | dict(head_dim=128, moe_intermediate_size=384), FP8_BLOCK | dict(
        modules_to_not_convert=["lm_head"] + [f"model.layers.{i}.mlp.gate" for i in range(2)]),
        qwen3_moe, fp8_block(), [(2, 0), (4, 0), (2, 1)]),
    "mixtral_fp8_tensor": (MIXTRAL, dict(quant_method="fp8", activation_scheme="static", modules_to_not_convert=[
        f"model.layers.{i}.block_sparse_moe.gate" for i in range(2)]), mixtral, fp8_tensor([]), [(1, 0), (2, 0), (2, 1)]),
    "qwen3_moe_gptq4": (QWEN3_MOE | HALF, gptq_config(4, 32), qwen3_moe, gptq(4, 32), MOE[1:]),
    "qwen3_moe_awq4": (QWEN3_MOE | HALF, AWQ | dict(modules_to_not_convert=["mlp.gate"]), qwen3_moe, awq(32), MOE[1:]),
    "phi3_gptq4": (LLAMA | PHI3 | HALF, gptq_config(4, 32), phi3, gptq(4, 32), [(2, 0)]),
    "phi3_awq4": (LLAMA | PHI3 | HALF, AWQ, phi3, awq(32), [(2, 0)]),
    "phi3_fp8_tensor": (LLAMA | PHI3, dict(quant_method="fp8", activation_scheme="static"), phi3, fp8_tensor([]),
                        [(2, 0)]),
    "phi3_fp8_block": (BLOCKS | PHI3, FP8_BLOCK, phi3, fp8_block(), [(2, 0)]),
    "phi3_ct_int4_asym": (LLAMA | PHI3, compressed("pack-quantized", args(4, "int", "group", symmetric=False,
                                                                          group_size=32)),
                          phi3, packed(4, 32, False), [(2, 0)]),
    "deepseek_fp8_block_v32": (DEEPSEEK | dict(v_head_dim=32), FP8_BLOCK, deepseek, fp8_block(), [(4, 0)]),
    "qwen3_moe_ct_fp8_block192": (QWEN3_MOE | dict(head_dim=128, moe_intermediate_size=384), compressed(
        "float-quantized", args(8, "float", "block", block_structure=[128, 128]),
        args(8, "float", "group", True, group_size=128), ignore=GATES), qwen3_moe, fp8_block("weight_scale"), [(2, 0)]),
    "qwen3_moe_ct_fp8_channel": (QWEN3_MOE, compressed("float-quantized", args(8, "float", "channel"), FP8_TOKEN,
                                                       ignore=GATES), qwen3_moe, channel("F8_E4M3", "F32"),
                                 [(2, 0), (2, 1)]),
    "qwen3_moe_ct_nvfp4": (QWEN3_MOE, compressed("nvfp4-pack-quantized",
                                                 args(4, "float", "tensor_group", group_size=16),
                                                 args(4, "float", "tensor_group", "local", group_size=16),
                                                 ignore=GATES), qwen3_moe, nvfp4, [(2, 0)]),
    "qwen3_moe_ct_int4": (QWEN3_MOE, compressed("pack-quantized", args(4, "int", "group", group_size=32),
                                                ignore=GATES), qwen3_moe, packed(4, 32, True), MOE[1:]),
}


def main():
    for name in [a for a in sys.argv[1:] if a != "-v"] or MODELS: make(name)


def make(name):
    config, quantization, tensors, linear, runs = MODELS[name]
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    tensors = dict(tensors(config, linear))
    if config["dtype"] == "float16": tensors = {n: ["F16" if d == "BF16" else d, s] for n, (d, s) in tensors.items()}
    rows = [f"{json.dumps(n)}: {json.dumps(what)}" for n, what in tensors.items()]
    (folder / "tensors.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")
    (folder / "config.json").write_text(json.dumps(config | dict(quantization_config=quantization), indent=2) + "\n")
    differs, refused, held = {}, {}, set()
    for old in folder.glob("*.json"):
        if old.name not in ("config.json", "tensors.json"): old.unlink()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_bytes((folder / "config.json").read_bytes())
        save(tensors, Path(directory) / "model.safetensors")
        for tp, ep in runs:
            run = f"checkpoint_tp{tp}_pp1" + ("ep" if ep else "")
            try:
                found = ranks(directory, tp, 1, 1, bool(ep))
            except Exception as e:
                refused[run] = message(str(e))
                print(f"{name}: {run} refused: {refused[run]}", flush=True)
                continue
            shards = {rank: what["shards"] for rank, what in found.items()}
            (folder / f"{run}.json").write_text(json.dumps(shards, separators=(",", ":")) + "\n")
            for what in found.values():
                differs.update(what["odd"])
                held.update(what["shards"])
            if "-v" in sys.argv: print(json.dumps(found["pp0_tp0.safetensors"], indent=1))
            print(f"{name}: {run}", flush=True)
    if held: differs.update({n: "not held" for n in tensors if n not in held | set(differs)})
    if differs: (folder / "differs.json").write_text(json.dumps(dict(sorted(differs.items())), indent=0) + "\n")
    if refused: (folder / "refused.json").write_text(json.dumps(refused, indent=2) + "\n")


def message(trace):
    """The last message of a trace, without what pydantic adds."""
    if "Value error, " in trace: return "ValueError: " + trace.rsplit("Value error, ")[-1].split(" [type=")[0]
    lines = trace.strip().splitlines()
    start = max(i for i, line in enumerate(lines) if line.startswith('  File "')) + 2
    return "\n".join(lines[start:]).lstrip(" ^\n")


def save(tensors, path):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + numpy.prod(shape, dtype=int).item() * WIDTH[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, (dtype, shape) in tensors.items(): f.write(pattern(name, dtype, shape))


def pattern(name, dtype, shape):
    """Values that say which tensor and which element they are; floats are finite and below 2."""
    seed = 0xCBF29CE484222325
    for byte in name.encode(): seed = (seed ^ byte) * 0x100000001B3 % 2**64  # FNV-1a
    index = numpy.arange(numpy.prod(shape, dtype=int), dtype=numpy.uint32)
    word = index * numpy.uint32(0x9E3779B1) + numpy.uint32(seed % 2**32)
    match dtype:
        case "F32": return ((word >> 16 & 0xBFFF) << 16).astype("<u4").tobytes()
        case "BF16" | "F16": return (word >> 16 & 0xBFFF).astype("<u2").tobytes()
        case "F8_E4M3": return (word >> 16 & 0xBF).astype("u1").tobytes()
        case "I8" | "U8": return (word >> 16 & 0xFF).astype("u1").tobytes()
        case "I32": return word.astype("<u4").tobytes()
        case "I64": return word.astype("<u8").tobytes()


if __name__ == "__main__": main()
