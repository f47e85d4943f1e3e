#!/usr/bin/env bash
# Compares kv-resp over shared memory with redis-server: GET and SET of 64 bytes with 50 connections
# at pipeline 1, 16 and 64, by redis-benchmark. Servers run on processor 0, redis-benchmark on
# processor 1, in turns. Both have one thread.
#
# Prints requests per second and p50 in ms of each round. Writes a table of medians to
# target/bench-resp/README.md, which can become a folder of bench/results as it is. `ROUNDS=5` and
# `REQUESTS=300000` set how long it takes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

rounds=${ROUNDS:-5}
requests=${REQUESTS:-300000}
port=${PORT:-7571}
[ "$(nproc)" -ge 2 ] || { echo "bench-resp: this needs two processors" >&2; exit 1; }
command -v redis-server >/dev/null || { echo "bench-resp: redis-server is missing" >&2; exit 1; }

target=${CARGO_TARGET_DIR:-target}
cargo build --release --locked -p farside-resp -p farside-server --bins
PATH=$(realpath "$target")/release:$PATH

results=$target/bench-resp
mkdir -p "$results"
work=$(mktemp -d "${TMPDIR:-/tmp}/farside-bench-resp.XXXXXX")
pids=()
stop() {
    trap - EXIT
    kill "${pids[@]}" 2>/dev/null || true
    wait "${pids[@]}" 2>/dev/null || true
    rm -rf "$work"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

serve() {
    taskset -c 0 "$@" >>"$work/log" 2>&1 &
    pids+=("$!")
}
# Waits until a port answers.
await() {
    for _ in $(seq 100); do
        (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null && return
        sleep 0.1
    done
    cat "$work/log" >&2
    exit 1
}
serve kv-server --listen "shm://$work/kv.sock" --memory 1GiB
for _ in $(seq 100); do [ ! -S "$work/kv.sock" ] || break; sleep 0.1; done
serve kv-resp --server "shm://$work/kv.sock" --listen "tcp://127.0.0.1:$port"
serve redis-server --port "$((port + 1))" --save '' --dir "$work"
await "$port"
await "$((port + 1))"

# Each line: operation, depth, round, server, requests per second, p50.
measure() {
    local name=$1 port=$2 depth=$3 round=$4
    taskset -c 1 redis-benchmark -p "$port" -t set,get -n "$requests" -c 50 -P "$depth" -r 100000 \
        -d 64 --csv | sed 's/"//g; 1d' |
        awk -F, -v name="$name" -v depth="$depth" -v round="$round" \
            '{ print $1, depth, round, name, $2, $5 }' | tee -a "$work/rows"
}
# Both have all keys before the first round.
for number in 0 1; do
    redis-benchmark -p "$((port + number))" -t set -n 500000 -c 50 -P 16 -r 100000 -d 64 -q >/dev/null
done
for round in $(seq "$rounds"); do
    for depth in 1 16 64; do
        # The order alternates, so that a slow change of the machine favours neither.
        order="0 1"
        [ "$((round % 2))" -eq 1 ] || order="1 0"
        for number in $order; do
            names=(kv-resp redis)
            measure "${names[number]}" "$((port + number))" "$depth" "$round"
        done
    done
done

# The median of numbers, one a line.
median() { sort -n | awk '{ all[NR] = $1 } END { print all[int((NR + 1) / 2)] }'; }
# The values of a column: operation, depth, server, column.
values() {
    awk -v op="$1" -v depth="$2" -v name="$3" -v column="$4" \
        '$1 == op && $2 == depth && $4 == name { print $column }' "$work/rows"
}
# kv-resp's value divided by redis' one, in each round.
ratios() {
    paste <(values "$1" "$2" kv-resp "$3") <(values "$1" "$2" redis "$3") |
        awk '$2 > 0 { printf "%.2f\n", $1 / $2 }'
}
{
    echo "# kv-resp beside redis"
    echo
    echo "    ROUNDS=$rounds REQUESTS=$requests tools/scripts/bench-resp.sh"
    echo
    echo "Commit $(git rev-parse --short HEAD), redis $(redis-server --version | sed 's|.*v=\([^ ]*\) .*|\1|')," \
        "$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), $(nproc) processors," \
        "Linux $(uname -r), on $(date +%F)."
    echo "50 connections, values of 64 bytes, 100,000 keys; one thread each. Medians of $rounds rounds;"
    echo "the ratios are medians of the ratios of each round."
    echo
    echo "| operation | pipeline | redis, requests/s | kv-resp | times redis | p50 of redis, ms" \
        "| kv-resp | times redis |"
    echo "|---|---|---|---|---|---|---|---|"
    for operation in GET SET; do
        for depth in 1 16 64; do
            echo "| $operation | $depth" \
                "| $(values "$operation" "$depth" redis 5 | median)" \
                "| $(values "$operation" "$depth" kv-resp 5 | median)" \
                "| $(ratios "$operation" "$depth" 5 | median)" \
                "| $(values "$operation" "$depth" redis 6 | median)" \
                "| $(values "$operation" "$depth" kv-resp 6 | median)" \
                "| $(ratios "$operation" "$depth" 6 | median) |"
        done
    done
} | tee "$results/README.md"
