#!/usr/bin/env bash
# Makes target/python-venv, with what builds and tests the Python package. Installs Python on Debian
# and Ubuntu. Needs PyPI when something in requirements-dev.txt has changed. Exits with 3 if this
# machine has no Python 3.11, or PyPI cannot be reached.
#
#   client/python/needs.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=target/python-venv
wanted=client/python/requirements-dev.txt
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
    command -v apt-get >/dev/null || {
        echo "python3 or its module venv is missing: install it with your package manager" >&2
        exit 3
    }
    echo "python3 or its module venv is missing: installing python3-venv" >&2
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" apt-get install -y --no-install-recommends python3 python3-venv
fi
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "$(python3 -V) is too old: the Python package needs Python 3.11 or later as python3" >&2
    exit 3
}
installed=$(python3 -V; cat "$wanted")
if [ "$installed" != "$(cat "$venv/installed.txt" 2>/dev/null)" ]; then
    echo "installing $wanted in $venv" >&2
    mkdir -p target
    python3 -m venv --clear "$venv"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -r "$wanted" || {
        echo "what $wanted lists cannot be installed: PyPI, or PIP_INDEX_URL, is not reachable" >&2
        exit 3
    }
    echo "$installed" >"$venv/installed.txt"
fi
