#!/usr/bin/env bash
# Shows Farside on real files. Starts a server with 256 MiB, or more for a large tree. One process
# loads a tree of files, another dumps it, and the two trees are compared byte for byte. Statistics,
# deletes and a short benchmark follow. Prints every command that it runs, quoted so that it can be
# repeated. DIR=... chooses another tree. The exit code is 0 only if the trees are equal.
set -euo pipefail

# The largest value: a block of 4 MiB minus room for a key and a header.
value_bytes_max=4190000
memory_mib_min=256
tree_mib_max=180
# Twice what the largest tree needs: two copies, and a server that holds them.
free_mib_min=2048

fail() { printf 'demo: %s\n' "$*" >&2; exit 1; }
say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
# Shows a command line and runs it.
run() { printf '\033[36m$ %s\033[0m\n' "$1"; eval "$1"; }
# Without a terminal, no colours.
[ -t 1 ] || { say() { printf '\n== %s\n' "$*"; }; run() { printf '$ %s\n' "$1"; eval "$1"; }; }

tree=${DIR:-/usr/share/doc}
if [ -n "${DIR:-}" ]; then
    [ -d "$tree" ] || fail "DIR=$tree is no folder"
    tree=$(cd -- "$tree" && pwd -P)
fi
cd "$(dirname "$0")/../.."
# A minimal image has no documentation: use a part of this repository.
if [ -z "${DIR:-}" ] && [ "$(find "$tree" -type f 2>/dev/null | head -n 20 | wc -l)" -lt 20 ]; then
    tree=$PWD/common
fi
up_to_limit=(-size "-$((value_bytes_max + 1))c")

# In memory if there is plenty: a busy disk takes many seconds to create and delete many files.
folder=${TMPDIR:-/tmp}
if [ -z "${TMPDIR:-}" ] && [ -w /dev/shm ] &&
    [ "$(df --output=avail -m /dev/shm | tail -n 1)" -ge "$free_mib_min" ]; then
    folder=/dev/shm
fi
work=$(mktemp -d "$folder/farside-demo.XXXXXX")
server=
stop() {
    trap - EXIT
    if [ -n "$server" ]; then
        kill "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    fi
    rm -rf "$work"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
case $work/ in "$tree"/*) fail "$tree holds the demo's own files: take another DIR=..." ;; esac

# Prints the MiB of the regular files below a folder, without those over the limit of a value.
mib_of() {
    find "$1" -type f "${up_to_limit[@]}" -printf '%s\n' | awk '{ n += $1 } END { print int(n / 2^20) }'
}
# Counts characters, because a name may hold a line feed.
count_files() { find "$1" -type f "${@:2}" -printf . | wc -c; }
mib=$(mib_of "$tree")
[ "$mib" -le "$tree_mib_max" ] ||
    fail "$tree holds $mib MiB, and the demo takes $tree_mib_max: take a smaller DIR=..."
# Other programs may change the tree meanwhile, so a copy is loaded, counted and compared. Files
# that cannot be copied are left out.
copied_from=$tree
left_out=$(count_files "$tree" ! "${up_to_limit[@]}")
mkdir "$work/tree"
(cd -- "$tree" && find . -type f "${up_to_limit[@]}" -print0 |
    tar -c --null --no-recursion --hard-dereference --ignore-failed-read --warning=none --files-from=- ||
    true) | tar -x --no-same-owner -C "$work/tree"
tree=$work/tree
files=$(count_files "$tree")
[ "$files" -gt 0 ] || fail "there is nothing to load in $copied_from: take another DIR=..."
mib=$(mib_of "$tree")
# A block is larger than its content, and each size has its own chunks, of 2 MiB.
memory_mib=$(((mib * 3 / 2 + 32) * 2))
[ "$memory_mib" -ge "$memory_mib_min" ] || memory_mib=$memory_mib_min
printf -v q_tree %q "$tree"
printf -v q_work %q "$work"

say "Build"
# Without RDMA, so that only cargo is needed. The profile takes half of the time of release.
run 'cargo build --profile demo --locked --no-default-features \
    --bin kv-server --bin kv-cli --bin kv-bench'
target=$(cargo metadata --no-deps --format-version 1 --offline |
    sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
printf -v q_bin %q "$target/demo"
run "export PATH=$q_bin:\$PATH"

say "A memory server with $memory_mib MiB: its CPU serves no get and no put"
run "mkdir -p $q_work"
run "export FARSIDE_SERVER=shm://$q_work/kv.sock"
run "kv-server --listen \$FARSIDE_SERVER --memory ${memory_mib}MiB --index 8MiB \\
    --value-bytes-max $value_bytes_max 2>$q_work/log &"
server=$!
for _ in $(seq 200); do
    [ -S "$work/kv.sock" ] || ! kill -0 "$server" 2>/dev/null || { sleep 0.05; continue; }
    break
done
[ -S "$work/kv.sock" ] || { cat "$work/log" >&2; fail "the server does not listen"; }

say "Hello"
run "kv-cli put greeting 'hello, far memory'"
run "kv-cli get greeting; echo"
run "kv-cli delete greeting"

say "One process loads a copy of $copied_from, another writes it out again"
run "kv-cli load --skip-too-large $q_tree" ||
    fail "not everything was loaded; if $memory_mib MiB were too little, take a smaller DIR=..."
run "kv-cli dump $q_work/copy"

say "Are the two trees the same, byte for byte?"
# The streams have only names and contents: no times, owners or modes.
run 'stream() (cd "$1" && find . -type f -print0 | LC_ALL=C sort -z |
    tar -c --hard-dereference --mtime=@0 --owner=0 --group=0 --mode=0 --null --files-from=-)'
if ! run "stream $q_tree | cmp - <(stream $q_work/copy)"; then
    diff -rq "$tree" "$work/copy" | grep -v '^Only in .*: ' | head -n 20 >&2 || true
    fail "THE TREES DIFFER"
fi
copied=$(count_files "$work/copy")
[ "$copied" -eq "$files" ] || fail "$files files went in, $copied came out"
echo "Yes: $files files, $mib MiB. Left out for their size: $left_out."

say "What the server holds, and whether it is undamaged"
run "kv-cli stat | head -n 9"
run "kv-cli verify"

say "Delete three keys"
run "kv-cli scan --keys-only --limit 3 --key-encoding hex >$q_work/keys"
run "while read -r key; do kv-cli --key-encoding hex delete \"\$key\"; done <$q_work/keys"
run "kv-cli stat | grep ^keys"

say "A short benchmark: reads, then half reads and half updates (on a server of its own)"
flags="--records 100000 --value-size 64 --warmup-seconds 1 --seconds 2"
run "kv-bench ycsb --workload c --depth 1 $flags"
run "kv-bench ycsb --workload a --depth 16 $flags"

say "Stop"
run "kill %1"
wait "$server" || fail "the server ended with exit code $?"
server=
echo "All is well. Next: README.md, kv-cli --help, kv-bench --help."
