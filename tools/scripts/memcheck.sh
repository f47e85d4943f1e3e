#!/usr/bin/env bash
# Runs a client that makes every operation, over shared memory, under valgrind's memcheck. Fails
# with every error that valgrind reports, and with memory that the client lost.
#
#   tools/scripts/memcheck.sh [ROUNDS]
set -euo pipefail

command -v valgrind >/dev/null || {
    echo "memcheck lacks valgrind: apt-get install valgrind" >&2
    exit 1
}
rounds=${1:-10}
cargo build --locked --no-default-features -p farside-server --bin kv-server
# Without libc rustix asks the kernel for its vDSO, which is not where valgrind's programs may look.
cargo build --locked --no-default-features --features rustix/use-libc -p farside-tests \
    --bin every-operation
built=${CARGO_TARGET_DIR:-target}/debug

folder=$(mktemp -d)
# GRACE is long, because everything takes fifty times as long here.
"$built/kv-server" --listen "shm://$folder/kv.sock" --memory 512MiB --index 8KiB --grace-ms 5000 \
    2>"$folder/log" &
server=$!
trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true; rm -r "$folder"' EXIT
for _ in $(seq 100); do
    [ ! -S "$folder/kv.sock" ] || break
    kill -0 $server 2>/dev/null || { cat "$folder/log" >&2; exit 1; }
    sleep 0.1
done
valgrind --error-exitcode=9 --leak-check=full --show-leak-kinds=definite,indirect \
    --errors-for-leak-kinds=definite,indirect --track-fds=no --fair-sched=yes \
    "$built/every-operation" "shm://$folder/kv.sock" "$rounds"
echo "memcheck found nothing in $rounds rounds of every operation"
