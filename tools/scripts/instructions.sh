#!/usr/bin/env bash
# Counts the client's instructions for an operation, kv-bench's own included, and compares them with
# those of bench/instructions.txt. Fails if one takes more than 4 % more. Over shared memory, so that
# everything is in one process; counted by valgrind, so that nothing else on the machine matters.
#
#   tools/scripts/instructions.sh            compares
#   tools/scripts/instructions.sh --record   writes bench/instructions.txt anew
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

command -v valgrind >/dev/null || {
    echo "instructions lacks valgrind: apt-get install valgrind" >&2
    exit 1
}
# As for memcheck.sh: without libc rustix looks for a vDSO that is not there.
cargo build --release --locked --no-default-features --features rustix/use-libc \
    -p farside-bench -p farside-server --bin kv-bench --bin kv-server \
    --target-dir "${CARGO_TARGET_DIR:-target}/instructions"
bench=${CARGO_TARGET_DIR:-target}/instructions/release/kv-bench
said=$(mktemp)
trap 'rm -f "$said"' EXIT

# All instructions of a run with so many operations.
all() {
    local operations=$1
    shift
    # What waits for time to pass takes fifty times as long here.
    valgrind --tool=cachegrind --cache-sim=no --cachegrind-out-file=/dev/null "$bench" ycsb \
        --records 1000 --limit-seconds 0 --warmup-seconds 0 --operations "$operations" "$@" \
        >"$said" 2>&1 || { cat "$said" >&2; exit 1; }
    sed -n 's/,//g; s/.*I *refs: *//p' "$said"
}

# The difference of two runs, so that start, load and end do not count.
count() {
    local name=$1 few many
    shift
    few=$(all 100000 "$@")
    many=$(all 300000 "$@")
    echo "$name $(((many - few) / 200000))"
}

counted=$(
    count get --workload c --depth 1
    count get_in_flight --workload c --depth 16
    count get_and_put --workload a --depth 1
    count get_and_put_in_flight --workload a --depth 16
)
if [ "${1:-}" = --record ]; then
    tee bench/instructions.txt <<<"$counted"
    exit
fi
join <(sort bench/instructions.txt) <(sort <<<"$counted") | awk '
    { ratio = $3 / $2; printf "%-22s %6d now, %6d recorded: %.3f\n", $1, $3, $2, ratio }
    ratio > 1.04 { failed = 1; printf "%s takes more instructions than recorded\n", $1 }
    ratio < 0.96 { printf "%s takes fewer: record it (--record)\n", $1 }
    END { exit failed || NR == 0 }'
