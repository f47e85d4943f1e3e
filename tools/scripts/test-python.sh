#!/usr/bin/env bash
# Builds the wheel, installs it in a venv that has nothing else, and runs the tests of the Python
# client against kv-server over shared memory and TCP, and against a cluster of three servers. A
# test that does the same on each of them runs on one of them, and with --all-fabrics on all.
#
#   tools/scripts/test-python.sh [--all-fabrics] [PYTEST-OPTION...]
#   tools/scripts/test-python.sh --rdma [--all-fabrics] [PYTEST-OPTION...]
#
# With --rdma the wheel has RDMA, and the tests run over it, in a guest with soft-RoCE. These tests
# compare all clients: Python, Rust, C, redis' and kv-cli. The environment of a build with verbs is
# then the caller's: . tools/scripts/verbs-env.sh
#
# The wheel is that of the profile dev. KV_SERVER names another kv-server than the
# one in target/debug; the other programs are taken from its folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root=$PWD
rdma='' fabrics=()
while :; do
    case ${1:-} in
    --rdma) rdma=yes ;;
    --all-fabrics) fabrics=(--all-fabrics) ;;
    *) break ;;
    esac
    shift
done
fail() { echo "test-python: $*" >&2; exit 1; }

client/python/needs.sh || {
    code=$?
    [ "$code" -eq 3 ] || exit "$code"
    echo "left out: the tests of the Python package, for the reason above"
    exit 0
}
target=${CARGO_TARGET_DIR:-target}
export KV_SERVER=${KV_SERVER:-$(realpath -m "$target")/debug/kv-server}
for file in kv-server kv-cli kv-resp rust-client libfarside.so; do
    [ -e "$(dirname "$KV_SERVER")/$file" ] ||
        fail "$(dirname "$KV_SERVER")/$file is missing: make test-python builds it"
done

venv=$root/target/python-venv
wheels=$target/python-wheels
rm -rf "$wheels"
# With the PATH of other builds, because pyo3 is compiled again when it changes.
CARGO=$root/tools/scripts/cargo-of-maturin.sh "$venv/bin/maturin" build --quiet --locked \
    --profile dev --compatibility linux --interpreter "$venv/bin/python" \
    --manifest-path client/python/Cargo.toml --out "$wheels" ${rdma:+--features verbs}
wheel=$(echo "$wheels"/farside-*.whl)
case $wheel in
*-cp311-abi3-*) ;;
*) fail "$wheel is not for all versions of Python from 3.11 on" ;;
esac

install() {
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-index --no-deps \
        --force-reinstall "$wheel"
}
if [ -n "$rdma" ]; then
    install
    tests/vm/build.sh
    [ $# -gt 0 ] || set -- test_client.py test_clients.py test_aio.py
    cd client/python/tests
    FARSIDE_TEST_DEVICE=10.9.0.1 exec "$root/tests/vm/in-guest" env "KV_SERVER=$KV_SERVER" \
        "$venv/bin/python" -m pytest -q -p no:cacheprovider "${fabrics[@]}" "$@"
fi

# A venv without anything, not even pip: the wheel needs no other package, and no library of RDMA.
clean=$root/target/python-clean
python3 -m venv --clear --without-pip "$clean"
"$venv/bin/python" -m pip --python "$clean/bin/python" install -q --disable-pip-version-check \
    --no-index "$wheel"
module=$(echo "$clean"/lib/python*/site-packages/farside/_farside.abi3.so)
libraries=$(ldd "$module")
if echo "$libraries" | grep -e ibverbs -e rdmacm -e 'not found'; then
    fail "$module needs these libraries"
fi
(cd "$clean" && bin/python -c 'import farside, farside.aio, farside.lmcache')

install
# From another folder, so that the package is the installed one.
cd client/python/tests
"$venv/bin/python" -m mypy --strict --no-error-summary --cache-dir "$root/target/mypy" typed.py
"$venv/bin/python" -m pytest -q -p no:cacheprovider "${fabrics[@]}" "$@"
