"""What vLLM holds on each rank after it loaded a checkpoint and before any post-processing, as digests.

Nothing of vLLM is replaced: each rank is a process that builds the model with vLLM's own loader under its own groups.
Only parameters count; vLLM computes its buffers (such as rotary tables) itself.
"""
import hashlib, multiprocessing, os, socket, traceback
from pathlib import Path

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
                  TRANSFORMERS_VERBOSITY="error")

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.torch_utils import set_default_torch_dtype

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32"}


def ranks(model, tp, pp=1, dp=1, ep=False):
    """{"pp0_tp0.safetensors": {tensor: [dtype, shape, SHA-256]}}; names start with dp0_ where dp is not 1."""
    sizes, ports = (tp, pp, dp, ep), [free_port(), free_port()]
    os.environ["VLLM_DIST_IDENT"] = identity = f"vllm-ranks-{os.getpid()}-{ports[0]}"
    # Forked, not spawned: importing vLLM takes longer than all the rest.
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    places = [(d, p, t) for d in range(dp) for p in range(pp) for t in range(tp)]
    children = [fork.Process(target=child, args=(queue, place, model, sizes, ports)) for place in places]
    answers = {}
    try:
        for c in children: c.start()
        while len(answers) < len(children):
            place, answer = queue.get(timeout=300)
            if isinstance(answer, str): raise RuntimeError(answer)
            answers[place] = answer
    finally:
        for c in children: c.terminate()
        for c in children: c.join()
        for leftover in Path("/dev/shm").glob(identity + "*"): leftover.unlink()  # vLLM does not
    prefix = "dp{}_pp{}_tp{}" if dp > 1 else "pp{1}_tp{2}"
    return {prefix.format(*place) + ".safetensors": answers[place] for place in places}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def child(queue, place, model, sizes, ports):
    try:
        queue.put((place, digests(load(place, model, *sizes, ports))))
    except BaseException:
        queue.put((place, traceback.format_exc()))


def load(place, model, tp, pp, dp, ep, ports):
    torch.set_num_threads(1)
    # Memory that nothing writes is NaN, so digests() sees it.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    d, p, t = place
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
    config = EngineArgs(model=model, tensor_parallel_size=tp, pipeline_parallel_size=pp, enable_expert_parallel=ep,
                        data_parallel_size=dp, data_parallel_rank=d if dp > 1 else None,
                        data_parallel_address="127.0.0.1", distributed_executor_backend="mp", enforce_eager=True,
                        skip_tokenizer_init=True, max_model_len=64, use_tqdm_on_load=False).create_engine_config()
    # Where data parallel ranks meet: vLLM takes a port for itself in each process, and they have to agree.
    config.parallel_config.data_parallel_master_port = ports[1]
    config.parallel_config._data_parallel_master_port_list = []
    with set_current_vllm_config(config):
        init_distributed_environment(world_size=tp * pp, rank=p * tp + t, local_rank=p * tp + t, backend="gloo",
                                     distributed_init_method=f"tcp://127.0.0.1:{ports[0]}")
        ensure_model_parallel_initialized(tp, pp)
        loader = get_model_loader(config.load_config)
        with set_default_torch_dtype(config.model_config.dtype):
            module = loader.create_model(config, config.model_config)
            loader.load_weights(module, config.model_config)
    return module


def digests(module):
    out = {}
    for name, parameter in module.named_parameters():  # without the second names of tied ones
        data = parameter.detach().contiguous()
        if data.is_floating_point() and data.isnan().any(): raise RuntimeError(f"{name}: not all loaded")
        digest = hashlib.sha256(data.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        out[name] = [DTYPES[data.dtype], list(data.shape), digest]
    return out
