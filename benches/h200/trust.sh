#!/usr/bin/env bash
# What it costs to know that weights are the right ones, on one machine with an NVIDIA GPU and root.
# usage: benches/h200/trust.sh BIN_DIR
#   BIN_DIR holds weightd, load_time and identity_time, built with --release. MEMORY_MODEL (on tmpfs) and
#   DISK_MODEL are made where they are not there.
set -euo pipefail
bin=$(realpath "$1")
cd "$(dirname "$0")"
memory_model=${MEMORY_MODEL:-/dev/shm/weightd-8b}
disk_model=${DISK_MODEL:-/root/weightd-8b}
work=$(mktemp -d)
export WEIGHTD_SOCKET_DIR=$work/sockets XDG_CACHE_HOME=$work/cache
trap '"$bin/weightd" stop >/dev/null 2>&1 || true; rm -rf "$work"' EXIT

drop_caches() { sync; echo 3 >/proc/sys/vm/drop_caches 2>/dev/null || true; }
[ -e "$memory_model/config.json" ] || python3 ../make_llama.py "$memory_model"
[ -e "$disk_model/config.json" ] || { mkdir -p "$disk_model"; cp "$memory_model"/* "$disk_model"/; sync; }

date -u +%F; uname -r; nproc; grep -m1 'model name' /proc/cpuinfo
stat -f -c '%n: %T' "$memory_model" "$disk_model"

echo "== loading to the GPU, with and without digest and checksums (3 times each, twice over)"
cat "$disk_model"/*.safetensors >/dev/null
for round in 1 2; do
    for model in "$memory_model" "$disk_model"; do
        for flags in "" --digest --checksums "--digest --checksums"; do
            echo "-- $model $flags"
            "$bin/load_time" $flags "$model" cuda 1 | grep -v -e ready -e planned
        done
    done
done

echo "== asking"
"$bin/identity_time" "$memory_model" digest
"$bin/identity_time" "$disk_model" digest
drop_caches
"$bin/identity_time" "$disk_model" digest
serve() {
    "$bin/weightd" preload --checksums --model "$1" --device cuda >"$work/ready" 2>"$work/log" &
    until grep -q READY "$work/ready"; do kill -0 $! || { cat "$work/log"; exit 1; }; sleep 0.05; done
    grep -E ' loaded |confine|gave up' "$work/log" || true
}
serve "$disk_model"
attach() { /usr/bin/env time -f '%e s in all' "$bin/weightd" attach --device cuda --all "$@" 2>&1 | grep -v INFO.*lease; }
echo "-- the digest is computed beside serving: attaches meanwhile"
for i in 1 2 3 4 5 6; do attach --model "$disk_model" | head -1; done
until grep -q 'the digest' "$work/log"; do sleep 0.2; done; grep digest "$work/log"
echo "-- attaches when nothing else goes on"
for i in 1 2 3 4 5 6; do attach --model "$disk_model" | head -1; done
echo "-- the same files by a link, a hard link and a bind mount"
mkdir "$work/soft" "$work/bind"; ln -s "$disk_model"/* "$work/soft"
"$bin/identity_time" "$work/soft"; attach --model "$work/soft"
mount --bind "$disk_model" "$work/bind" && { "$bin/identity_time" "$work/bind"; attach --model "$work/bind"; umount "$work/bind"; }
echo "-- the same bytes on tmpfs, then stated"
attach --model "$memory_model"
attach --model "$memory_model" --checkpoint-digest "$("$bin/weightd" digest "$disk_model")"
echo "== scrub"
"$bin/weightd" scrub
"$bin/weightd" scrub
attach --model "$disk_model" --verify=checksums
attach --model "$disk_model" --verify
"$bin/weightd" status
