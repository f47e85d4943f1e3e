#!/usr/bin/env bash
# Builds the wheel that is published, and checks with auditwheel that it runs with glibc 2.28 and
# later. The linker is that of zig, from PyPI: it links to an old glibc on a new system.
#
#   tools/scripts/wheel.sh            without RDMA: shm:// and tcp://
#   tools/scripts/wheel.sh --verbs    with RDMA, for this machine: needs rdma-core, and is not portable
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

client/python/needs.sh
venv=$PWD/target/python-venv
wheels=${CARGO_TARGET_DIR:-target}/wheels
rm -rf "$wheels"
export PATH=$venv/bin:$PATH
build=(maturin build --release --locked --manifest-path client/python/Cargo.toml --out "$wheels")
if [ "${1:-}" = --verbs ]; then
    . tools/scripts/verbs-env.sh
    "${build[@]}" --features verbs --compatibility linux
    exit
fi
"${build[@]}" --zig --compatibility manylinux_2_28
shown=$(auditwheel show "$wheels"/farside-*.whl | tr '\n' ' ')
case $shown in
*'consistent with the following platform tag: "manylinux_2_28'*) echo "$wheels"/farside-*.whl ;;
*) echo "wheel: $shown" >&2; exit 1 ;;
esac
