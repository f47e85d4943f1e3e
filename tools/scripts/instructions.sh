#!/usr/bin/env bash
# Counts the client's instructions for an operation, including kv-bench's own, and compares them
# with bench/instructions.txt. Fails if an operation takes over 4 % more. Uses shared memory, where
# the client runs every verb itself. Valgrind counts, so other load on the machine does not matter.
#
#   tools/scripts/instructions.sh            compares
#   tools/scripts/instructions.sh --record   writes bench/instructions.txt anew
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

command -v valgrind >/dev/null || {
    echo "counting instructions needs valgrind: apt-get install valgrind" >&2
    exit 1
}
# With use-libc, because otherwise rustix reads the kernel's vDSO, which fails under valgrind.
cargo build --release --locked --no-default-features --features rustix/use-libc \
    -p farside-bench -p farside-server --bin kv-bench --bin kv-server \
    --target-dir "${CARGO_TARGET_DIR:-target}/instructions"
bench=${CARGO_TARGET_DIR:-target}/instructions/release/kv-bench
output=$(mktemp)
trap 'rm -f "$output"' EXIT

# Prints the instructions of the measured phase, divided by its operations.
count() {
    local name=$1 operations=200000
    shift
    valgrind --fair-sched=yes --tool=callgrind --callgrind-out-file=/dev/null \
        --toggle-collect='*phases::Shared*::measure*' "$bench" ycsb --records 1000 \
        --limit-seconds 0 --warmup-seconds 0 --operations $operations "$@" >"$output" 2>&1 ||
        { cat "$output" >&2; exit 1; }
    echo "$name $(($(sed -n 's/.*Collected *: *//p' "$output") / operations))"
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
    ratio < 0.96 { printf "%s takes fewer instructions: record them with --record\n", $1 }
    END { exit failed || NR == 0 }'
