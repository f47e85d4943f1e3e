#!/usr/bin/env bash
# Runs a command, and at the same time with one core: the longest tests of the simulator, random
# schedules for a minute, the tests with an etcd that fails, those of the Python package, lints
# without RDMA, and the build with the oldest supported Rust. A test with a virtual machine keeps only
# one core busy. Fails if any of them fails; then the end of what COMMAND printed comes last.
#
#   tools/scripts/beside.sh COMMAND...
#
# The caller sets up the environment for verbs first: . tools/scripts/verbs-env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

output=$(mktemp) first=$(mktemp)
trap 'rm -f "$output" "$first"' EXIT
export FARSIDE_SIMULATION_SECONDS=${FARSIDE_SIMULATION_SECONDS:-60}
{
    nice cargo test --locked --workspace --test simulation -- \
        --test-threads=1 --nocapture pairs:: removals:: random::seeds &&
        # They wait most of the time.
        nice cargo test --locked --workspace --test stores -- \
            --test-threads=4 etcd_failures:: etcd_login:: &&
        CARGO_BUILD_JOBS=1 nice tools/scripts/test-python.sh &&
        CARGO_BUILD_JOBS=1 nice cargo clippy --workspace --no-default-features --lib --bins \
            --locked -- -D warnings &&
        CARGO_BUILD_JOBS=1 nice tools/scripts/msrv.sh
} >"$output" 2>&1 &
beside=$! failed=0 ended=
"$@" 2>&1 | tee "$first" || failed=$?
[ $failed -eq 0 ] || ended=$(printf '\nfailed: %s\n' "$*"; tail -n 60 "$first")
wait $beside || failed=$?
cat "$output"
[ -z "$ended" ] || echo "$ended"
exit $failed
