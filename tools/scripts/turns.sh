#!/usr/bin/env bash
# Compares the throughput of GETs of two builds of kv-bench, in turns, so that both see the same
# load and clock of the machine. A thousand records fit into the processor's caches: what is left is
# the client and kv-bench. Prints M operations/s of every round, and the ratio of the means.
#
#   tools/scripts/turns.sh BEFORE AFTER    two folders, each with kv-bench and kv-server
#
# For an older commit: `git worktree add FOLDER COMMIT`, then `cargo build --release` there.
set -euo pipefail

[ $# = 2 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folders=("$1" "$2")
rounds=6

# Prints M operations/s.
measure() {
    "$1/kv-bench" ycsb --workload c --depth "$2" --records 1000 --value-size 64 --seconds 2 \
        --warmup-seconds 0.5 --limit-seconds 0 --distribution zipfian --threads 1 2>/dev/null |
        sed -n 's/^all: \([0-9,]*\) ops.*/\1/p' | tr -d , | awk '{ printf "%.3f\n", $1 / 1e6 }'
}

for depth in 1 16; do
    rates=("" "")
    for ((round = 0; round < rounds; round++)); do
        for build in 0 1; do
            # Each build goes first in half of the rounds.
            ((which = (build + round) % 2)) || true
            rates[which]+="$(measure "${folders[which]}" "$depth") "
        done
    done
    echo "C, depth $depth | ${rates[0]}| ${rates[1]}" | awk -F'|' '
        function mean(text, all, n, sum, i) {
            n = split(text, all, " ")
            for (i = 1; i <= n; i++) sum += all[i]
            return sum / n
        }
        { printf "%s|%s|%s| %.3f\n", $1, $2, $3, mean($3) / mean($2) }'
done
