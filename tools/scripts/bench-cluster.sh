#!/usr/bin/env bash
# Measures the throughput of clusters of 1, 2, 4, 8 and 16 servers, in turns, and draws it over the
# number of servers. All of them and the clients share this machine, so the network is emulated: each
# server's device executes at most RATE chains a second. RATE=0 leaves the emulation out.
#
#   tools/scripts/bench-cluster.sh [FOLDER]    writes FOLDER/*.json and FOLDER/report.html;
#                                              target/bench-cluster by default
#
# `SERVERS`, `DISTRIBUTIONS`, `ROUNDS`, `SECONDS_EACH`, `RATE`, `THREADS` and `DEPTH` change it.
# Needs kv-bench and kv-server, release builds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=${1:-target/bench-cluster}
bench=${CARGO_TARGET_DIR:-target}/release/kv-bench
emulated=(--emulate-rate "${RATE:-2000}")
[ "${RATE:-2000}" != 0 ] || emulated=()
mkdir -p "$folder"

for ((round = 1; round <= ${ROUNDS:-3}; round++)); do
    for servers in ${SERVERS:-1 2 4 8 16}; do
        for distribution in ${DISTRIBUTIONS:-uniform zipfian}; do
            json=$folder/$distribution-$servers-$round.json
            "$bench" ycsb --workload c --distribution "$distribution" --records 100000 \
                --servers "$servers" "${emulated[@]}" \
                --threads "${THREADS:-8}" --depth "${DEPTH:-64}" \
                --seconds "${SECONDS_EACH:-15}" --warmup-seconds 4 --limit-seconds 0 \
                --json "$json" >/dev/null
            rate=$(grep -o '"throughput_ops_s": *[0-9]*' "$json")
            echo "round $round, $distribution, $servers servers: ${rate##*[ :]} operations/s"
        done
    done
done
"$bench" report "$folder" -o "$folder/report.html"
