#!/usr/bin/env bash
# The resident memory of a server, beyond the weights, with COUNT tensors (default 10,000), after 100 attaches.
# usage: benches/server_memory.sh [COUNT]; WEIGHTD names the binary.
set -euo pipefail
cd "$(dirname "$0")/.."
weightd=${WEIGHTD:-target/release/weightd}
dir=$(mktemp -d)
trap '"$weightd" stop --socket-dir "$dir/sockets" >/dev/null 2>&1 || true; rm -rf "$dir"' EXIT
python3 benches/make_many_tensors.py "$dir/model" "${1:-10000}"
"$weightd" preload --model "$dir/model" --device cpu --socket-dir "$dir/sockets" >"$dir/ready" 2>"$dir/log" &
until grep -q READY "$dir/ready"; do
    kill -0 $! || { cat "$dir/log" >&2; exit 1; }
    sleep 0.1
done
pid=$("$weightd" status --json --socket-dir "$dir/sockets" | python3 -c 'import json, sys; print(json.loads(sys.stdin.readline())["pid"])')
for _ in $(seq 100); do
    "$weightd" attach --model "$dir/model" --device cpu --socket-dir "$dir/sockets" --all >/dev/null 2>&1
done
grep -E 'VmHWM|VmRSS|RssAnon|RssFile|RssShmem' "/proc/$pid/status"
