#!/bin/bash
# How fast a checkpoint loads from disk, beside what the disk gives to plain reads in the same rounds.
#
# usage: benches/cold_load.sh MODEL [cpu|cuda [TP [ROUNDS]]]
#
# Build first: cargo build --release -p weightd-checkpoint --examples
# BIN names the directory with load_time and plain_read, where they were built elsewhere. As root the
# whole page cache is dropped before each run, otherwise the checkpoint's files are evicted from it.
set -euo pipefail

model=${1:?usage: benches/cold_load.sh MODEL [cpu|cuda [TP [ROUNDS]]]}
device=${2:-cpu}
tp=${3:-1}
rounds=${4:-3}
bin=${BIN:-${CARGO_TARGET_DIR:-target}/release/examples}

runs() {
    for workers in 1 2 4 8 16; do
        for chunk_kib in 1024 4096 16384; do
            echo "plain_read $model direct $workers $chunk_kib"
        done
    done
    for workers in 2 8 16; do
        echo "plain_read $model buffered $workers 4096"
    done
    # What the loader chooses, then other numbers of workers and chunk sizes.
    for options in "" "2 1024 " "4 4096 " "8 1024 " "8 4096 " "16 4096 " "16 16384 "; do
        echo "load_time $model $device $tp ${options}1"
    done
}

echo "$(date -u +%FT%TZ) $(uname -r) $(nproc) cores, $(df --output=source,fstype "$model" | tail -n 1)"
for round in $(seq "$rounds"); do
    # In any order: a disk that saves up speed while it is idle favours whatever follows a slow run.
    runs | shuf | while read -r program args; do
        "$bin/plain_read" "$model" evict
        { echo 3 > /proc/sys/vm/drop_caches; } 2> /dev/null || true
        # shellcheck disable=SC2086 # several words
        "$bin/$program" $args | grep GB/s
    done
done | awk '
    function median(key,    values, count, i, j, kept) {
        count = split(speeds[key], values, " ")
        for (i = 2; i <= count; i++) {
            kept = values[i] + 0
            for (j = i - 1; j >= 1 && values[j] + 0 > kept; j--) values[j + 1] = values[j]
            values[j + 1] = kept
        }
        return values[int((count + 1) / 2)]
    }
    { print; fflush() }
    / GB\/s/ {
        match($0, /[0-9.]+ GB\/s/)
        key = $0
        sub(/:.*/, "", key)
        speeds[key] = speeds[key] " " substr($0, RSTART, RLENGTH - 5)
        if (/^plain/) plain[key] = 1
        else if (key ~ /chosen$/) chosen = key
    }
    END {
        for (key in plain) if (median(key) > disk) { disk = median(key); best = key }
        printf "medians: %s %.2f GB/s; as chosen, %s %.2f GB/s; ratio %.2f\n",
            best, disk, chosen, median(chosen), median(chosen) / disk
        for (key in speeds) printf "median %.2f GB/s of%s: %s\n", median(key), speeds[key], key | "sort"
    }'
