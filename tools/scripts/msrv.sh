#!/usr/bin/env bash
# Checks the crates that users need with the oldest supported Rust: `rust-version` in Cargo.toml. If
# the installed one is newer, installs that one with rustup. If this fails, says that the check is
# left out, and succeeds. Then clippy alone (`incompatible_msrv`) finds functions that are too new.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
left_out() {
    echo "left out: the check with Rust $version: $*" >&2
    exit 0
}

toolchain=()
if ! [[ $(rustc --version) == "rustc $version."* ]]; then
    command -v rustup >/dev/null || left_out "rustup is missing, and $(rustc --version) is installed"
    if ! rustup run "$version" rustc --version >/dev/null 2>&1; then
        echo "Rust $version is missing: installing it" >&2
        why=$(timeout 600 rustup toolchain install "$version" --profile minimal --no-self-update 2>&1) ||
            left_out "it cannot be installed: $(grep -m1 -i error <<<"$why" || echo "no answer")"
    fi
    toolchain=("+$version")
fi
mapfile -t manifests < <(grep -L '^publish' {bench,client,common/*,server,tests/*,tools/*}/Cargo.toml)
mapfile -t names < <(sed -n 's/^name = "\(farside.*\)"/\1/p' "${manifests[@]}")
. tools/scripts/verbs-env.sh
# Its own folder: otherwise each toolchain would build everything again after the other.
cargo "${toolchain[@]}" check --locked --lib --bins --examples "${names[@]/#/--package=}" \
    --target-dir "${CARGO_TARGET_DIR:-target}/msrv"
echo "${#names[@]} crates build with Rust $version"
