#!/usr/bin/env bash
# Checks that cargo is installed, and installs a missing C linker on Debian and Ubuntu. For `make
# test` also installs a browser on Debian. Ubuntu's package only refers to a snap; without a browser
# one test is skipped, and says so. For `make test` and with --etcd also installs etcd, if the system's
# packages have it; without it the tests of etcd are left out, and say so. The same holds for redis, for
# promtool, which comes with Prometheus, and `make test`.
#
#   tools/scripts/needs.sh [--test | --etcd]
set -euo pipefail

as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
install() {
    for command in "update -qq" "install -y --no-install-recommends $*"; do
        echo "\$ ${as_root[*]:+sudo }apt-get $command" >&2
        # shellcheck disable=SC2086 # words are meant to split
        "${as_root[@]}" apt-get $command
    done
}

if ! command -v cargo >/dev/null; then
    echo "cargo is missing: install Rust with rustup (https://rustup.rs), then run this again" >&2
    exit 1
fi
# What tests of the client library for C need beside a linker.
if [ "${1:-}" = --test ] && command -v apt-get >/dev/null; then
    missing=()
    command -v c++ >/dev/null || missing+=(g++)
    command -v pkg-config >/dev/null || missing+=(pkg-config)
    command -v valgrind >/dev/null || missing+=(valgrind)
    if [ ${#missing[@]} -gt 0 ]; then
        echo "for the tests of the client library for C: installing ${missing[*]}" >&2
        install "${missing[@]}"
    fi
fi
if ! command -v cc >/dev/null; then
    if ! command -v apt-get >/dev/null; then
        echo "a C linker (cc) is missing: install gcc with your package manager" >&2
        exit 1
    fi
    echo "a C linker (cc) is missing: installing gcc and libc6-dev" >&2
    install gcc libc6-dev
fi

# Whether a browser that bench/compare/tests/commands/workloads.rs can use is installed.
browser() {
    for name in chromium chromium-headless-shell chromium-browser google-chrome; do
        ! "$name" --version >/dev/null 2>&1 || return 0
    done
    return 1
}
if [ "${1:-}" = --test ] && ! browser; then
    if command -v apt-get >/dev/null && grep -qx 'ID=debian' /etc/os-release; then
        echo "a browser is missing: installing chromium" >&2
        install chromium fonts-dejavu-core
    else
        echo "no Chromium here: kv-bench's report will not be tested in a browser" >&2
    fi
fi

# optional COMMAND PACKAGE WHAT: installs the package if the command is missing and the system has it.
optional() {
    ! command -v "$1" >/dev/null || return 0
    if command -v apt-get >/dev/null && apt-cache show "$2" >/dev/null 2>&1; then
        echo "$1 is missing: installing $2" >&2
        install "$2" || echo "$2 cannot be installed: $3 is left out" >&2
    else
        echo "no $1 here, and no package of it: $3 is left out" >&2
    fi
}
if [ "${1:-}" = --test ]; then
    optional redis-server redis-server "what compares kv-resp with redis"
    had_promtool=$(command -v promtool || true)
    optional promtool prometheus "what checks metrics and alerts"
    # Only promtool is needed. The package starts a server at port 9090 where systemd runs.
    if [ -z "$had_promtool" ] && command -v promtool >/dev/null && [ -d /run/systemd/system ]; then
        "${as_root[@]}" systemctl disable --now --quiet prometheus || true
    fi
fi
[ -z "${1:-}" ] || optional etcd etcd-server "what needs it"
