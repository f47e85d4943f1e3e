#!/usr/bin/env bash
# Compares a GET through the client libraries of other languages with one in Rust, on shared memory
# and on one core: target/bench-clients.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

release=${CARGO_TARGET_DIR:-target}/release
cargo build --release --locked --bin kv-server --example get-from-c
cargo build --release --locked -p farside-c
folder=$(mktemp -d /dev/shm/bench-clients.XXXXXX)
server=shm://$folder/kv.sock
"$release/kv-server" --listen "$server" --memory 64MiB 2>"$folder/log" &
trap 'kill %1 2>/dev/null || cat "$folder/log" >&2; wait; rm -rf "$folder"' EXIT
taskset -c "$(($(nproc) - 1))" "$release/examples/get-from-c" "$server" "$release/libfarside.so" |
    tee "${release%/*}/bench-clients.txt"
