#!/usr/bin/env bash
# Counts the client's instructions for an operation, and compares them with bench/instructions.txt.
# Fails if an operation takes over 4 % more. Uses shared memory, where the client runs every verb
# itself. Valgrind counts, so other load on the machine does not matter.
#
# There are two figures for each load: `get` has all instructions of the measured loop, with those of
# kv-bench, and `client_get` those inside the entry points of Session and Pipeline. `floor_get` has
# those of the least that a GET could do: bench/examples/get-floor.rs.
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
    -p farside-bench -p farside-server --bin kv-bench --bin kv-server --example get-floor \
    --target-dir "${CARGO_TARGET_DIR:-target}/instructions"
release=${CARGO_TARGET_DIR:-target}/instructions/release
output=$(mktemp)
profile=$(mktemp)
trap 'rm -f "$output" "$profile"' EXIT

only_puts=(-p readproportion=0 -p updateproportion=1 -p requestdistribution=zipfian --value-size 64)

# The functions of the library that the measured loops call. None of them is inlined, and none calls
# another one.
entry_points='farside::(session::Session::(get|put)_bytes|pipeline::Pipeline::(begin_get|begin_put|poll|wait))$'

# Prints the instructions of the measured phase, and of the calls of entry points in it. Both are
# divided by the operations.
count() {
    local name=$1 operations=200000
    shift
    valgrind --fair-sched=yes --tool=callgrind --callgrind-out-file="$profile" \
        --compress-strings=no --compress-pos=no \
        --toggle-collect='*phases::Shared*::measure*' "$release/kv-bench" ycsb --records 1000 \
        --limit-seconds 0 --warmup-seconds 0 --operations $operations "$@" >"$output" 2>&1 ||
        { cat "$output" >&2; exit 1; }
    echo "$name $(($(sed -n 's/.*Collected *: *//p' "$output") / operations))"
    # After `calls=` comes a line with the position of the call and what it took.
    awk -v name="client_$name" -v operations=$operations -v entry_points="$entry_points" '
        /^cfn=/ { is_entry = $0 ~ entry_points }
        is_call { if (is_entry) sum += $2 }
        { is_call = /^calls=/ }
        END { print name, int(sum / operations); exit !sum }' "$profile" ||
        { echo "the entry points of the client are not in the profile" >&2; exit 1; }
}

# Prints the instructions of the calls of a function of get-floor, divided by the operations.
count_floor() {
    local name=$1 function=$2 depth=$3 operations=204800 # whole batches of kv-bench
    valgrind --tool=callgrind --callgrind-out-file=/dev/null \
        --toggle-collect="get_floor::$function" \
        "$release/examples/get-floor" 1000 "$depth" $operations >"$output" 2>&1 ||
        { cat "$output" >&2; exit 1; }
    echo "$name $(($(sed -n 's/.*Collected *: *//p' "$output") / operations))"
}

counted=$(
    count get --workload c --depth 1
    count get_in_flight --workload c --depth 16
    count get_and_put --workload a --depth 1
    count get_and_put_in_flight --workload a --depth 16
    count put "${only_puts[@]}" --depth 1
    count put_in_flight "${only_puts[@]}" --depth 16
    # The same in a cluster. Here one server means a cluster of one.
    for servers in 1 16; do
        count get_in_cluster_of_$servers --workload c --depth 1 --servers $servers
        count put_in_flight_in_cluster_of_$servers "${only_puts[@]}" --depth 16 --servers $servers
    done
    # The same with the metrics of the client on.
    metrics=(--client-metrics /dev/null)
    count get_with_metrics --workload c --depth 1 "${metrics[@]}"
    count get_in_flight_with_metrics --workload c --depth 16 "${metrics[@]}"
    count put_with_metrics "${only_puts[@]}" --depth 1 "${metrics[@]}"
    count put_in_flight_with_metrics "${only_puts[@]}" --depth 16 "${metrics[@]}"
    count_floor floor_get get_one 1
    count_floor floor_get_in_flight get_interleaved 16
)
if [ "${1:-}" = --record ]; then
    tee bench/instructions.txt <<<"$counted"
    exit
fi
join <(sort bench/instructions.txt) <(sort <<<"$counted") | awk '
    { ratio = $3 / $2; printf "%-39s %6d now, %6d recorded: %.3f\n", $1, $3, $2, ratio }
    ratio > 1.04 { failed = 1; printf "%s takes more instructions than recorded\n", $1 }
    ratio < 0.96 { printf "%s takes fewer instructions: record them with --record\n", $1 }
    END { exit failed || NR == 0 }'
