#!/usr/bin/env bash
# Draws docs/pictures/*.svg: what a terminal shows while commands of Farside run in it.
#
#   tools/scripts/pictures.sh
#
# tmux is the terminal, and rich, from PyPI, draws what it shows. The programs are those of
# target/release.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

command -v tmux >/dev/null || { echo "pictures: tmux is missing: apt-get install tmux" >&2; exit 1; }
venv=target/pictures-venv
[ -d "$venv" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check rich==15.0.0
exec "$venv/bin/python" tools/scripts/pictures.py
