#!/usr/bin/env bash
# Installs the packages that the guests of tests/vm and a build with verbs need, on Debian 12 and 13
# and Ubuntu 22.04 and 24.04: only missing ones, with sudo unless run as root. Prints its commands.
# Installs no kernel for the guests: tests/vm/kernel.sh unpacks one beside the build.
#
#   tests/vm/needs.sh             all
#   tests/vm/needs.sh --build     only those of a build with verbs
set -euo pipefail

build=(libibverbs-dev librdmacm-dev pkg-config)
guest=(qemu-system-x86 busybox-static cpio kmod zstd xz-utils
    ibverbs-providers ibverbs-utils perftest iproute2)
wanted=("${build[@]}")
[ "${1:-}" = --build ] || wanted+=("${guest[@]}")

if ! command -v apt-get >/dev/null; then
    echo "no apt-get here: install what Debian calls ${wanted[*]}, then run this again" >&2
    exit 1
fi

installed() { dpkg-query -W -f '${db:Status-Status}\n' "$1" 2>/dev/null | grep -qx installed; }

missing=()
for package in "${wanted[@]}"; do
    # Derivatives of Debian know some packages under other names.
    case $package in
    pkg-config) command -v pkg-config >/dev/null && continue ;;
    qemu-system-x86) command -v qemu-system-x86_64 >/dev/null && continue ;;
    esac
    installed "$package" || missing+=("$package")
done

as_root=(env DEBIAN_FRONTEND=noninteractive)
[ "$(id -u)" -eq 0 ] || as_root=(sudo "${as_root[@]}")
run() { echo "\$ ${as_root[*]} $*" >&2; "${as_root[@]}" "$@" >&2; }

# bindgen 0.59, with which rdma-sys reads the C headers, understands LLVM up to 15. A distribution
# without such a libclang is served by tools/scripts/verbs-env.sh.
clang_of_distribution() {
    apt-cache --names-only search '^libclang1-1[0-5](t64)?$' | cut -d ' ' -f 1 | sort -V | tail -n 1
}
clang_present() {
    compgen -G '/usr/lib/llvm-1[0-5]/lib/libclang.so*' >/dev/null ||
        compgen -G '/usr/lib/llvm-1[0-5]/lib/libclang-1*.so*' >/dev/null
}
# A fresh container image knows no packages.
updated=
update() { [ -n "$updated" ] || run apt-get update -qq; updated=yes; }
known() { apt-cache show "$1" >/dev/null 2>&1; }

if ! clang_present; then
    known libibverbs-dev || update
    clang=$(clang_of_distribution)
    [ -z "$clang" ] || missing+=("$clang")
fi
[ "${#missing[@]}" -gt 0 ] || exit 0
for package in "${missing[@]}"; do
    known "$package" || update
done
install=(apt-get install -y -qq --no-install-recommends "${missing[@]}")
# Old lists name packages that no longer exist.
run "${install[@]}" || { [ -z "$updated" ] && update && run "${install[@]}"; }
