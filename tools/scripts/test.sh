#!/usr/bin/env bash
# Runs all tests of `make test`, which has built them: those in guests, which keep one core busy, and
# beside them the others. Prints what the guests printed last. Fails if any test fails.
#
# The caller sets up the environment for verbs first: . tools/scripts/verbs-env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export FARSIDE_BUILT=1
# Most tests wait for processes, so more of them run than there are cores.
export NEXTEST_TEST_THREADS=$((3 * $(nproc))) RUST_TEST_THREADS=$((3 * $(nproc)))

output=$(mktemp)
trap 'rm -f "$output"' EXIT
{ tests/vm/suite && tests/vm/two-hosts "two hosts" "kill -9"; } >"$output" 2>&1 &
guests=$! failed=0

mapfile -t manifests < <(grep -l '^verbs = ' {bench,bench/compare,client,common/*,server,tools}/Cargo.toml)
mapfile -t names < <(sed -n 's/^name = "\(farside.*\)"/\1/p' "${manifests[@]}")
# A guest whose clock stands still while it waits for a core loses connections.
{
    nice tools/scripts/nextest.sh --workspace --locked &&
        nice cargo test --workspace --doc --locked &&
        nice tools/scripts/test-python.sh &&
        nice cargo check "${names[@]/#/--package=}" --no-default-features --lib --bins --locked
} || failed=$?
wait $guests || failed=$?
cat "$output"
exit $failed
