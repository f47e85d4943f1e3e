#!/usr/bin/env bash
# Runs a command, and at the same time random schedules of the simulator for three minutes, and then
# the build with the oldest supported Rust. A test with a virtual machine keeps only one core busy.
# Fails if any of them fails.
#
#   tools/scripts/seeds-beside.sh COMMAND...
#
# The caller sets up the environment for verbs first: . tools/scripts/verbs-env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

output=$(mktemp)
trap 'rm -f "$output"' EXIT
export FARSIDE_SIMULATION_SECONDS=${FARSIDE_SIMULATION_SECONDS:-180}
{
    cargo test --locked --workspace --test simulation random::seeds -- --exact --nocapture &&
        CARGO_BUILD_JOBS=1 nice tools/scripts/msrv.sh
} >"$output" 2>&1 &
failed=0
"$@" || failed=$?
wait $! || failed=$?
cat "$output"
exit $failed
