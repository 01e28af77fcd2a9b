"""Lets vLLM's CPU build load what only its CUDA build accepts.

Parameters are created and filled by vLLM's own code; what is replaced is what comes before and after that: the questions
about the device (a Hopper GPU, is the answer) and the choice of kernels, none of which runs here.
"""
import importlib, pkgutil, sys

import vllm.platforms
from vllm.platforms.interface import DeviceCapability, PlatformEnum

REAL = vllm.platforms.current_platform
HOPPER = DeviceCapability(9, 0)


class Hopper:
    """The CPU platform, except for the questions that choose a quantization method."""
    _enum = PlatformEnum.CUDA
    supported_quantization = []

    def __getattr__(self, name): return getattr(REAL, name)
    def is_cpu(self): return False
    def is_cuda(self): return True
    def is_cuda_alike(self): return True
    def get_device_capability(self, *a, **k): return HOPPER
    def has_device_capability(self, capability, *a, **k):
        return HOPPER >= (DeviceCapability(*capability) if isinstance(capability, tuple) else
                          DeviceCapability(capability // 10, capability % 10))
    def is_device_capability(self, capability, *a, **k): return capability in (90, (9, 0))
    def is_device_capability_family(self, capability, *a, **k): return capability == 90


class Kernel:
    """Stands for any linear kernel: it is asked for nothing while weights are created and loaded."""
    def __init__(self, *arguments, **named): pass
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return lambda *arguments, **named: None


QUANTIZATION = "vllm.model_executor.layers.quantization."


def install():
    import vllm.model_executor.kernels.linear as linear
    import vllm.model_executor.layers.quantization as methods
    import vllm.model_executor.layers.fused_moe.oracle.fp8 as fp8
    import vllm.model_executor.layers.fused_moe.oracle.int_wna16 as wna16
    import vllm.model_executor.layers.fused_moe.oracle.mxfp4 as mxfp4
    import vllm.model_executor.layers.fused_moe.oracle.nvfp4 as nvfp4
    import vllm.model_executor.layers.fused_moe.oracle.int8 as int8
    methods.get_quantization_config("gptq")  # imports every method
    experts = importlib.import_module(QUANTIZATION + "compressed_tensors.compressed_tensors_moe")
    for module in pkgutil.iter_modules(experts.__path__):
        if "flydsl" not in module.name: importlib.import_module(f"{experts.__name__}.{module.name}")  # for ROCm

    hopper = Hopper()
    choose = linear.choose_mp_linear_kernel

    def mixed_precision(config, *a, **k):
        chosen = choose(config, *a, **k)  # refuses where every CUDA kernel does
        return type(chosen.__name__, (Kernel,), {})

    replaced = {
        "choose_mp_linear_kernel": mixed_precision,
        "init_fp8_linear_kernel": Kernel, "init_int8_linear_kernel": Kernel, "init_nvfp4_linear_kernel": Kernel,
        "init_wfp8_a16_linear_kernel": Kernel, "init_mxfp4_linear_kernel": Kernel, "init_mxfp8_linear_kernel": Kernel,
        "cutlass_fp8_supported": lambda: True, "cutlass_block_fp8_supported": lambda: True,
        "select_fp8_moe_backend": lambda *a, **k: (fp8.Fp8MoeBackend.TRITON, None),
        "select_wna16_moe_backend": lambda *a, **k: (wna16.WNA16MoEBackend.MARLIN, None),
        "select_mxfp4_moe_backend": lambda *a, **k: (mxfp4.Mxfp4MoeBackend.MARLIN, None),
        "select_nvfp4_moe_backend": lambda *a, **k: (nvfp4.NvFp4MoeBackend.MARLIN, None),
        "select_int8_moe_backend": lambda *a, **k: (int8.Int8MoeBackend.TRITON, None),
    }
    for name, module in list(sys.modules.items()):
        if not (name.startswith(QUANTIZATION) or name.startswith("vllm.model_executor.kernels.linear")): continue
        if name.startswith(QUANTIZATION):
            for what, by in replaced.items():
                if what in vars(module): setattr(module, what, by)
        if "current_platform" in vars(module): module.current_platform = hopper
