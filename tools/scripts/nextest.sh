#!/usr/bin/env bash
# Runs tests with cargo-nextest: `cargo nextest run ARGUMENT...`. Where it is not installed, takes the
# one of PyPI that tools/scripts/nextest.txt names, which takes seconds. Without either runs `cargo test
# ARGUMENT...`, and says so: then there are no limits of time and no table of times.
#
#   tools/scripts/nextest.sh [ARGUMENT...]      what both understand
#   tools/scripts/nextest.sh --needs            only installs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=target/nextest-venv wanted=tools/scripts/nextest.txt
if ! command -v cargo-nextest >/dev/null; then
    if ! cmp -s "$wanted" "$venv/installed.txt"; then
        echo "cargo-nextest is missing: installing what $wanted names in $venv" >&2
        if python3 -m venv --clear "$venv" &&
            "$venv/bin/python" -m pip install -q --disable-pip-version-check --require-hashes \
                --only-binary :all: -r "$wanted"; then
            cp "$wanted" "$venv/installed.txt"
        else
            echo "it cannot be installed: the tests run with cargo test" >&2
        fi
    fi
    PATH=$PATH:$PWD/$venv/bin
fi
[ "${1:-}" != --needs ] || exit 0
if command -v cargo-nextest >/dev/null; then
    code=0 results=${CARGO_TARGET_DIR:-target}/nextest/default/junit.xml
    # Else those of the run before would be there if nothing can be built.
    rm -f "$results"
    cargo nextest run "$@" || code=$?
    # The output of a test that passes is not shown, and one that is left out passes.
    grep -hos 'left out.*' "$results" || true
    exit $code
fi
echo "without cargo-nextest: no test has a limit of time, and make test-times has no times" >&2
exec cargo test "$@"
