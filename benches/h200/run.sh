#!/usr/bin/env bash
# Every GPU figure of BENCHMARKS.md, ours beside the alternatives, in one run on one machine.
# usage: benches/h200/run.sh BIN_DIR [STEP ...]   steps: machine attach memory load cold copy cost
#   BIN_DIR holds weightd, load_time, plain_read and attach_time, built with --release.
#   Needs python3 with torch and safetensors; other loaders (instanttensor, fastsafetensors,
#   runai-model-streamer) are measured where they are installed.
set -euo pipefail
bin=$(realpath "$1")
shift
cd "$(dirname "$0")"
steps=${*:-machine attach memory load cold copy cost}
memory_model=${MEMORY_MODEL:-/dev/shm/weightd-8b}
disk_model=${DISK_MODEL:-/root/weightd-8b}
export WEIGHTD_SOCKET_DIR=${TMPDIR:-/tmp}/weightd-bench-$$
trap '"$bin/weightd" stop >/dev/null 2>&1 || true' EXIT

drop_caches() { sync; echo 3 >/proc/sys/vm/drop_caches; }
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits; }
make_models() {
    [ -e "$memory_model/config.json" ] || python3 make_checkpoint.py "$memory_model"
    if [ ! -e "$disk_model/config.json" ]; then
        mkdir -p "$disk_model" && cp "$memory_model"/* "$disk_model"/ && sync
    fi
}
serve() {
    "$bin/weightd" preload --model "$1" --device cuda >"$WEIGHTD_SOCKET_DIR.ready" 2>"$WEIGHTD_SOCKET_DIR.log" &
    until grep -q READY "$WEIGHTD_SOCKET_DIR.ready"; do
        kill -0 $! 2>/dev/null || { cat "$WEIGHTD_SOCKET_DIR.log" >&2; exit 1; }
        sleep 0.05
    done
    grep -E 'loaded ' "$WEIGHTD_SOCKET_DIR.log"
}

for step in $steps; do
    echo "== $step"
    case $step in
    machine)
        date -u +%F
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
        uname -r
        nproc
        grep -m1 'model name' /proc/cpuinfo
        "$bin/weightd" --version
        ;;
    attach)
        "$bin/attach_time" cuda 8b
        "$bin/attach_time" cuda 1000
        "$bin/attach_time" cuda 5000
        python3 torch_ipc.py all 2>&1 | grep -v Warning
        ;;
    memory)
        make_models
        before=$(used)
        serve "$memory_model"
        sleep 1
        echo "device memory: $(($(used) - before)) MiB for $(stat -c %s "$memory_model/model.safetensors") bytes of file"
        echo "processes on the device: $(nvidia-smi --query-compute-apps=pid --format=csv,noheader | wc -l)"
        "$bin/weightd" stop
        ;;
    load)
        make_models
        for model in "$memory_model" "$disk_model"; do
            cat "$model/model.safetensors" >/dev/null
            for tp in 1 4; do "$bin/load_time" "$model" cuda "$tp" | tail -3; done
            python3 load_peers.py "$model/model.safetensors" 2>&1 | grep -v Warning
        done
        ;;
    cold)
        make_models
        for _ in 1 2 3; do
            for chunk_kib in 4096 16384; do
                drop_caches
                "$bin/plain_read" "$disk_model" direct 16 "$chunk_kib"
            done
            drop_caches
            "$bin/load_time" "$disk_model" cuda 1 16 4096 1 | tail -1
        done
        ;;
    copy)
        "$bin/attach_time" cuda 8b 10 copy
        python3 -c "
import torch, time
a = torch.empty(8 << 30, dtype=torch.uint8, device='cuda'); b = torch.empty_like(a); b.copy_(a); torch.cuda.synchronize()
begin = time.perf_counter(); [b.copy_(a) for _ in range(10)]; torch.cuda.synchronize()
print(f'device to device, torch: {10 * a.numel() / 1e9 / (time.perf_counter() - begin):.0f} GB/s copied')"
        ;;
    cost)
        make_models
        # From disk: there files are known by their times, and no digest is asked for.
        serve "$disk_model"
        for _ in 1 2 3 4 5; do
            begin=$(date +%s%N)
            "$bin/weightd" attach --model "$disk_model" --device cuda --all
            echo "whole process: $((($(date +%s%N) - begin) / 1000)) us"
        done
        for _ in 1 2 3; do
            begin=$(date +%s%N)
            "$bin/weightd" attach --help >/dev/null
            echo "process alone: $((($(date +%s%N) - begin) / 1000)) us"
        done
        "$bin/weightd" stop
        ;;
    esac
done
