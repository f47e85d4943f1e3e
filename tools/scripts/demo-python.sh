#!/usr/bin/env bash
# Builds the Python package, installs it in a venv, and runs client/python/examples/demo.py and the
# other examples against a kv-server of their own.
#
#   tools/scripts/demo-python.sh [--install]
#
# With --install it only builds and installs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

client/python/needs.sh
server=${KV_SERVER:-${CARGO_TARGET_DIR:-target}/release/kv-server}
[ -x "$server" ] || { echo "demo-python: $server is missing: make build" >&2; exit 1; }
venv=target/python-venv
wheels=${CARGO_TARGET_DIR:-target}/wheels
rm -rf "$wheels"
echo '$ maturin build --release && pip install farside-*.whl' >&2
PATH=$PWD/$venv/bin:$PATH maturin build --quiet --release --locked --compatibility linux \
    --manifest-path client/python/Cargo.toml --out "$wheels"
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-index --no-deps \
    --force-reinstall "$wheels"/farside-*.whl
[ "${1:-}" != --install ] || exit 0

folder=$(mktemp -d)
trap 'kill "$kv" 2>/dev/null; wait "$kv" 2>/dev/null; rm -rf "$folder"' EXIT
"$server" --listen "shm://$folder/kv.sock" --memory 512MiB 2>"$folder/kv.log" &
kv=$!
for example in demo kv_cache feature_store shared_cache; do
    printf '\n$ python client/python/examples/%s.py shm://.../kv.sock\n' "$example"
    "$venv/bin/python" "client/python/examples/$example.py" "shm://$folder/kv.sock"
done
