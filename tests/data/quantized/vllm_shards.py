"""What vLLM holds of each stored tensor on each rank, found by watching it copy.

vLLM keeps fused and renamed tensors. To have them in the checkpoint's names and shapes, every copy into a parameter is
recorded while the checkpoint is loaded: from which region of which stored tensor, to which region of which parameter.
After loading, the bytes of that region of the parameter are compared with those of the region of the stored tensor, so
what is listed is both what vLLM holds in the end and a slice of what is stored.
"""
import functools, hashlib, json, os, sys
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).parent.parent / "families"))

import numpy, torch
from torch.utils._python_dispatch import TorchDispatchMode

import vllm_ranks
import pretend

NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32",
         torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0"}


class Copies(TorchDispatchMode):
    def __init__(self, parameters):
        super().__init__()
        self.stored, self.current, self.found = {}, None, []
        self.parameters = {p.data.untyped_storage().data_ptr(): n for n, p in parameters}

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        out = function(*arguments, **(named or {}))
        if function in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Tensor):
            target, source = arguments[0], arguments[1]
            place = target.untyped_storage().data_ptr()
            if place in self.parameters and self.current: self.found.append((self.current, self.parameters[place], target, source))
        if function is torch.ops.aten.fill_.Scalar and self.current:  # so vLLM copies what has one element
            place = arguments[0].untyped_storage().data_ptr()
            source = self.stored[self.current][0]
            if place in self.parameters and source.numel() == 1:
                self.found.append((self.current, self.parameters[place], arguments[0], source))
        return out

    def watch(self, weights):
        for name, tensor in weights:
            # One storage for each stored tensor, and bytes that a loader can not change under us.
            tensor = tensor.clone()
            self.stored[name] = (tensor, tensor.clone())
            self.current = name
            yield name, tensor


def region(tensor, view):
    """[start, end) in each dimension of a contiguous tensor that a view of it covers, or None."""
    if view.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr(): return None
    if view.numel() == 0: return None
    first = view.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(view.shape, view.stride()))
    shape = tuple(tensor.shape)
    starts = [int(i) for i in numpy.unravel_index(first, shape)] if shape else []
    ends = [int(i) + 1 for i in numpy.unravel_index(last, shape)] if shape else []
    if numpy.prod([e - s for s, e in zip(starts, ends)], dtype=int) != view.numel(): return None
    return list(zip(starts, ends))


def joined(tensor, pristine, copies, parameters):
    """What a rank holds of a tensor that is several projections one after another, and where each part of it was."""
    places = [region(tensor, source) for _, _, _, source in copies]
    names = {parameter for _, parameter, _, _ in copies}
    if None in places or len(names) > 1: return None, f"into {sorted(names)}"
    if all(place == places[0] for place in places):  # one scale, repeated for each projection
        part = pristine[tuple(slice(s, e) for s, e in places[0])]
        same = all(raw(part) == raw(target) and part.dtype == target.dtype for _, _, target, _ in copies)
        return (part if same else None), places[:1]
    along = [d for d in range(tensor.ndim) if len({place[d] for place in places}) > 1]
    if len(along) != 1: return None, places
    part = torch.cat([pristine[tuple(slice(s, e) for s, e in place)] for place in places], along[0])
    whole = parameters[names.pop()].data
    return (part if raw(part) == raw(whole) and part.dtype == whole.dtype else None), places


def raw(tensor): return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def digests(module):
    copies = module.copies
    shards, odd, slices = {}, {}, {}
    several = {}
    for copy in copies.found: several.setdefault(copy[0], []).append(copy)
    for name, parameter, target, source in copies.found:
        tensor, pristine = copies.stored[name]
        if len(several[name]) > 1:
            if name in shards or name in odd: continue
            part, places = joined(tensor, pristine, several[name], dict(module.named_parameters()))
            if part is None: odd[name] = f"{parameter}: {len(several[name])} copies: {places}"
            else:
                shards[name] = [NAMES[part.dtype], list(part.shape), hashlib.sha256(raw(part)).hexdigest()]
                slices[name] = [parameter, places, list(tensor.shape)]
            continue
        place = region(tensor, source)
        if place is None:
            odd[name] = f"{parameter} has {NAMES[target.dtype]} {list(target.shape)} of it, no region of what is stored"
            continue
        part = pristine[tuple(slice(s, e) for s, e in place)]
        if part.dtype != target.dtype:
            odd[name] = f"{parameter} has it cast to {NAMES[target.dtype]}"
            continue
        if raw(part) != raw(target):
            odd[name] = f"{parameter} has other bytes in the end"
            continue
        shards[name] = [NAMES[part.dtype], list(part.shape), hashlib.sha256(raw(part)).hexdigest()]
        slices[name] = [parameter, place, list(tensor.shape)]
    untouched = sorted(set(copies.parameters.values()) - {p for _, p, _, _ in copies.found})
    written = {}
    for _, p, target, _ in copies.found: written[p] = written.get(p, 0) + target.numel()
    partly = {n: [written[n], p.numel()] for n, p in module.named_parameters() if written.get(n, p.numel()) != p.numel()}
    absent = sorted(set(copies.stored) - set(shards) - set(odd))
    return {"shards": dict(sorted(shards.items())), "odd": odd, "slices": slices, "untouched": untouched, "absent": absent,
            "partly": partly}


def loader(load_config):
    real = get_loader(load_config)
    weights, load = real.get_all_weights, real.load_weights

    def load_weights(module, model_config):
        module.copies = copies = Copies(module.named_parameters())
        real.get_all_weights = lambda *a, **k: copies.watch(weights(*a, **k))
        with copies: return load(module, model_config)

    real.load_weights = load_weights
    return real


get_loader = vllm_ranks.get_model_loader
vllm_ranks.get_model_loader = loader
vllm_ranks.digests = digests
vllm_ranks.EngineArgs = functools.partial(vllm_ranks.EngineArgs, allow_deprecated_quantization=True)  # fbgemm_fp8
pretend.install()
ranks = vllm_ranks.ranks
