#!/usr/bin/env bash
# Runs a command, and beside it random schedules of the simulator for three minutes: a guest keeps
# one core busy. Fails if either does.
#
#   tools/scripts/seeds-beside.sh COMMAND...
#
# The environment of a build with verbs is the caller's: . tools/scripts/verbs-env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

said=$(mktemp)
trap 'rm -f "$said"' EXIT
export FARSIDE_SIMULATION_SECONDS=${FARSIDE_SIMULATION_SECONDS:-180}
cargo test --locked --workspace --test simulation random::seeds -- --exact --nocapture \
    >"$said" 2>&1 &
failed=0
"$@" || failed=$?
wait $! || failed=$?
cat "$said"
exit $failed
