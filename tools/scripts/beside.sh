#!/usr/bin/env bash
# Runs a command, and at the same time with one core: the tests of the Python package, and a check of
# the crates without RDMA. A test with a virtual machine keeps only one core busy. Fails if any of them
# fails; then the end of what COMMAND printed comes last.
#
#   tools/scripts/beside.sh COMMAND...
#
# The caller sets up the environment for verbs first: . tools/scripts/verbs-env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

output=$(mktemp) first=$(mktemp)
trap 'rm -f "$output" "$first"' EXIT
mapfile -t manifests < <(grep -l '^verbs = ' {bench,bench/compare,client,common/*,server,tools}/Cargo.toml)
mapfile -t names < <(sed -n 's/^name = "\(farside.*\)"/\1/p' "${manifests[@]}")
{
    CARGO_BUILD_JOBS=1 nice tools/scripts/test-python.sh &&
        CARGO_BUILD_JOBS=1 nice cargo check "${names[@]/#/--package=}" --no-default-features \
            --lib --bins --locked
} >"$output" 2>&1 &
beside=$! failed=0 ended=
"$@" 2>&1 | tee "$first" || failed=$?
[ $failed -eq 0 ] || ended=$(printf '\nfailed: %s\n' "$*"; tail -n 60 "$first")
wait $beside || failed=$?
cat "$output"
[ -z "$ended" ] || echo "$ended"
exit $failed
