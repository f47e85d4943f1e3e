#!/usr/bin/env bash
# Makes sure that what a build needs is there: cargo, which it only asks for, and a C linker, which
# it installs on Debian and Ubuntu.
set -euo pipefail

if ! command -v cargo >/dev/null; then
    echo "cargo is missing: install Rust with rustup (https://rustup.rs), then run this again" >&2
    exit 1
fi
if ! command -v cc >/dev/null; then
    as_root=()
    [ "$(id -u)" -eq 0 ] || as_root=(sudo)
    if ! command -v apt-get >/dev/null; then
        echo "a C linker (cc) is missing: install gcc with your package manager" >&2
        exit 1
    fi
    echo "a C linker (cc) is missing: installing gcc and libc6-dev" >&2
    for command in "update -qq" "install -y --no-install-recommends gcc libc6-dev"; do
        echo "\$ ${as_root[*]:+sudo }apt-get $command" >&2
        # shellcheck disable=SC2086 # words are meant to split
        "${as_root[@]}" apt-get $command
    done
fi
