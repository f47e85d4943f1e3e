#!/usr/bin/env bash
# Packages the crates that users need: those whose manifest has no `publish`. Checks what is in each
# package, and that the packages build without the repository, from target/package/unpacked. With
# CARGO_NET_OFFLINE=true it needs no network once everything was built.
#
#   tools/scripts/package.sh               packages, checks and builds
#   tools/scripts/package.sh --no-build    packages and checks, in seconds
#
# Also packages changes that are not committed. `cargo publish` refuses those.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. tools/scripts/verbs-env.sh

fail() { echo "package: $*" >&2; exit 1; }

mapfile -t manifests < <(grep -L '^publish' {bench,client,common/*,server,tests/*,tools/*}/Cargo.toml)
mapfile -t names < <(sed -n 's/^name = "\(farside.*\)"/\1/p' "${manifests[@]}")
[ ${#names[@]} -ge 10 ] || fail "only ${#names[@]} crates may be published"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
packages=${CARGO_TARGET_DIR:-target}/package
unpacked=$packages/unpacked
rm -rf "$packages"
cargo package --no-verify --locked --allow-dirty "${names[@]/#/--package=}" 2>&1 |
    grep -v -e 'manifest has no documentation' -e '^ *|$' -e '= note: see https' >&2

mkdir "$unpacked"
for name in "${names[@]}"; do
    folder=$unpacked/$name-$version
    tar -xf "$packages/$name-$version.crate" -C "$unpacked"
    for file in README.md LICENSE-MIT LICENSE-APACHE; do
        [ -f "$folder/$file" ] && ! [ -L "$folder/$file" ] || fail "$name has no $file"
    done
    for field in description license readme keywords categories rust-version; do
        grep -q "^$field = " "$folder/Cargo.toml" || fail "$name has no $field"
    done
    for path in "$folder"/*; do
        case ${path##*/} in
        Cargo.* | README.md | LICENSE-* | src | tests | examples | build.rs | public-api.txt) ;;
        *) fail "$name should not contain ${path##*/}" ;;
        esac
    done
    bytes=$(stat -c %s "$packages/$name-$version.crate")
    [ "$bytes" -lt 1000000 ] || fail "$name has $bytes bytes"
done

if [ "${1:-}" = --no-build ]; then
    echo "${#names[@]} packages are complete: $packages/*.crate"
    exit
fi

# The packages as a workspace, with the lock file and profiles of this one. So what was built for
# this workspace is used again.
{
    printf '[workspace]\nresolver = "3"\nmembers = ["farside*"]\n\n[patch.crates-io]\n'
    for name in "${names[@]}"; do echo "$name = { path = \"$name-$version\" }"; done
    sed -n '/^\[profile/,$p' Cargo.toml
} >"$unpacked/Cargo.toml"
cp Cargo.lock "$unpacked"
export CARGO_TARGET_DIR=$PWD/target
cargo check --quiet --manifest-path "$unpacked/Cargo.toml" --workspace --examples --bins --lib
echo "${#names[@]} packages are complete and build: $packages/*.crate"
