#!/usr/bin/env bash
# What Farside does, on real files: a server with 256 MiB, a tree loaded into it by one process,
# dumped by another, compared byte for byte; then deletes, statistics and a short benchmark.
# Prints every command it runs. DIR=... chooses another tree.
set -euo pipefail
cd "$(dirname "$0")/../.."

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    "$@"
}

tree=${DIR:-/usr/share/doc}
# A minimal image has no documentation: this repository will do.
[ -n "${DIR:-}" ] || [ "$(find "$tree" -type f 2>/dev/null | head -n 20 | wc -l)" -ge 20 ] || tree=$PWD/common
[ -d "$tree" ] || { echo "DIR=$tree is no folder" >&2; exit 2; }
tree=$(cd "$tree" && pwd)

work=$(mktemp -d)
server=
stop() {
    if [ -n "$server" ]; then kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; fi
    rm -rf "$work"
}
trap stop EXIT
trap 'exit 130' INT TERM

say "Build"
run cargo build --release --locked --bin kv-server --bin kv-cli --bin kv-bench
target=${CARGO_TARGET_DIR:-target}
PATH=$(cd "$target/release" && pwd):$PATH

say "A memory server with 256 MiB; no server CPU runs for what follows"
export FARSIDE_SERVER=shm://$work/kv.sock
echo "+ export FARSIDE_SERVER=$FARSIDE_SERVER"
printf '+ kv-server --listen %s --memory 256MiB --index 8MiB --value-bytes-max 4190000 &\n' "$FARSIDE_SERVER"
kv-server --listen "$FARSIDE_SERVER" --memory 256MiB --index 8MiB --value-bytes-max 4190000 &
server=$!

say "Hello"
run kv-cli put greeting 'hello, far memory'
run kv-cli get greeting
echo
run kv-cli delete greeting

say "Load $tree, dump it again, compare the two trees"
run kv-cli load "$tree"
run kv-cli dump "$work/copy"
checksums() { (cd "$1" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum); }
echo "+ diff <(cd $tree; find . -type f | sort | sha256sum each) <(the same in $work/copy)"
checksums "$tree" >"$work/loaded"
checksums "$work/copy" >"$work/dumped"
diff "$work/loaded" "$work/dumped"
echo "identical: $(wc -l <"$work/loaded") files, $(du -sh "$work/copy" | cut -f1)"

say "What the server holds"
run kv-cli stat
run kv-cli verify

say "Delete some"
echo "+ kv-cli scan --keys-only --limit 3 | while read -r key; do kv-cli delete \"\$key\"; done"
kv-cli scan --keys-only --limit 3 | while IFS= read -r key; do
    run kv-cli delete "$key"
done

say "A short benchmark, on a server of its own"
run kv-bench ycsb --workload c --records 100000 --value-size 64 --threads 1 --depth 1 --seconds 2
run kv-bench ycsb --workload a --records 100000 --value-size 64 --threads 1 --depth 16 --seconds 2

say "Stop"
run kill "$server"
wait "$server"
server=
echo "done"
