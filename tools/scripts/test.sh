#!/usr/bin/env bash
# Runs all tests of `make test`, which has built them: those of Rust, and beside them those in guests,
# of Python and of the documentation, whose output comes last. Fails if any test fails.
#
# The caller sets up the environment for verbs first: . tools/scripts/verbs-env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export FARSIDE_BUILT=1
# Most tests wait for processes, so more of them run than there are cores.
export NEXTEST_TEST_THREADS=$((3 * $(nproc))) RUST_TEST_THREADS=$((3 * $(nproc)))

mapfile -t manifests < <(grep -l '^verbs = ' {bench,bench/compare,client,common/*,server,tools}/Cargo.toml)
mapfile -t names < <(sed -n 's/^name = "\(farside.*\)"/\1/p' "${manifests[@]}")

# The guests first, because they take longest.
beside() {
    local failed=0
    { tests/vm/suite && tests/vm/two-hosts "two hosts" "kill -9"; } || failed=$?
    nice -n 5 tools/scripts/test-python.sh || failed=$?
    nice -n 5 cargo test --workspace --doc --locked || failed=$?
    nice -n 5 cargo check "${names[@]/#/--package=}" --no-default-features --lib --bins --locked ||
        failed=$?
    return $failed
}

output=$(mktemp)
trap 'rm -f "$output"' EXIT
beside >"$output" 2>&1 &
failed=0
# A guest whose clock stands still while it waits for a core loses connections.
nice -n 5 tools/scripts/nextest.sh --workspace --locked || failed=$?
wait $! || failed=$?
cat "$output"
exit $failed
