#!/usr/bin/env bash
# Builds the example for NVIDIA GPUs. Needs pip, gcc and g++, but neither a GPU nor a CUDA toolkit: compiler, headers and
# libraries to link with are wheels of PyPI (some 900 MB), and the driver's library, which no wheel has, is made here
# of its function names alone. The first build takes about a quarter of an hour on two cores.
#
#   CARGO_TARGET_DIR   where the build goes             (default: target)
#   TOOLKIT            where the wheels go              (default: cuda in there)
#   CUDA_COMPUTE_CAP   the architecture to compile for  (default: 90, for H100 and H200)
set -euo pipefail
cd "$(dirname "$0")"

target=${CARGO_TARGET_DIR:-$PWD/target}
toolkit=${TOOLKIT:-$target/cuda}
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90}
export CUDAFORGE_THREADS=${CUDAFORGE_THREADS:-$(nproc)}
export CUDA_HOME=$toolkit/nvidia/cu13

if [ ! -e "$toolkit/complete" ]; then
    python3 -m pip install --quiet --upgrade --target "$toolkit" \
        "nvidia-cuda-nvcc==13.0.*" "nvidia-cuda-crt==13.0.*" "nvidia-nvvm==13.0.*" \
        "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cccl==13.0.*" "nvidia-cuda-nvrtc==13.0.*" \
        "nvidia-cublas==13.0.*" "nvidia-curand==10.4.0.*"

    # Wheels have no names without a version, which is what a linker looks for.
    (cd "$CUDA_HOME/lib" && for library in lib{cudart,cublas,cublasLt,curand,nvrtc}.so.[0-9]*; do
        ln -sf "$library" "${library%%.so.*}.so"
    done)

    # Whoever runs the binary has the driver. All words that could be functions of it will do.
    grep -ohE '\bcu[A-Z]\w+' "$CUDA_HOME/include/cuda.h" | sort -u | sed 's/.*/void &(void) {}/' |
        gcc -w -x c -shared -Wl,-soname,libcuda.so.1 -o "$CUDA_HOME/lib/libcuda.so" -
    touch "$toolkit/complete"
fi

export PATH=$CUDA_HOME/bin:$PATH
cargo build --release --features cuda
ls -l "$target/release/weightd-example-candle"
