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

# The guests first, because they take longest.
beside() {
    local failed=0
    { tests/vm/suite && tests/vm/two-hosts "two hosts" "kill -9"; } || failed=$?
    nice -n 5 tools/scripts/test-python.sh || failed=$?
    nice -n 5 cargo test --workspace --doc --locked || failed=$?
    # Without RDMA. The whole workspace, because the choice of packages would change features of
    # crates of others, which would have to be checked as well.
    nice -n 5 cargo check --workspace --no-default-features --lib --bins --locked || failed=$?
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
