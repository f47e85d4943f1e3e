#!/usr/bin/env bash
# The demonstration of `make demo-cluster`: three servers of a cluster on this machine, with their
# records in an etcd of its own. Loads a tree of files, kills one server, shows what fails and what goes
# on, starts it again elsewhere, and verifies.
#
#   [DIR=...] tools/scripts/demo-cluster.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tree=${DIR:-.}
[ "$tree" != . ] || tree=docs

folder=$(mktemp -d)
memory=$(mktemp -d /dev/shm/farside-demo.XXXXXX)
pids=()
finish() {
    [ ${#pids[@]} -eq 0 ] || kill "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    rm -rf "$folder" "$memory"
}
trap finish EXIT
say() { printf '\n# %s\n' "$*"; }
run() {
    printf '$ %s\n' "$*"
    "$@"
}

# A port that no program of this machine listens at.
port() {
    local port
    while :; do
        port=$((20000 + RANDOM % 10000))
        ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || continue
        echo $port
        return
    done
}

if command -v etcd >/dev/null; then
    client=$(port) peer=$(port)
    say "records in an etcd of this demonstration"
    etcd --data-dir "$folder/etcd" --listen-client-urls "http://127.0.0.1:$client" \
        --advertise-client-urls "http://127.0.0.1:$client" \
        --listen-peer-urls "http://127.0.0.1:$peer" \
        --initial-advertise-peer-urls "http://127.0.0.1:$peer" \
        --initial-cluster "default=http://127.0.0.1:$peer" >"$folder/etcd.log" 2>&1 &
    pids+=($!)
    uri=etcd://127.0.0.1:$client/demo
else
    say "etcd is not installed and cannot be: the records are in a folder instead"
    uri=file://$folder/records
fi
for attempt in $(seq 100); do
    ! kv-cli cluster create "$uri" --shards 3 2>"$folder/create.log" || break
    [ "$attempt" -lt 100 ] || { cat "$folder/create.log" >&2; exit 1; }
    sleep 0.1
done

ports=("$(port)" "$(port)" "$(port)")
start() {
    kv-server --cluster "$uri" --listen "tcp://127.0.0.1:$2" --memory 64MiB \
        --region-file "$memory/region$1" 2>>"$folder/server$1.log" &
    pids[$((10 + $1))]=$!
}
for n in 0 1 2; do start $n "${ports[$n]}"; done
serving() { kv-cli cluster show "$uri" | grep -c ' serving ' || true; }
for attempt in $(seq 200); do
    [ "$(serving)" -lt 3 ] || break
    [ "$attempt" -lt 200 ] || { cat "$folder"/server*.log >&2; exit 1; }
    sleep 0.1
done
export FARSIDE_SERVER=tcp://127.0.0.1:${ports[0]},tcp://127.0.0.1:${ports[1]}

say "three servers; the client knows two of them, and finds the third"
run kv-cli load "$tree"
run kv-cli cluster show "$uri"
keys=$(kv-cli scan --keys-only | wc -l)

say "kill -9 the third server: its keys fail, the others go on"
kill -9 "${pids[12]}"
wait "${pids[12]}" 2>/dev/null || true
unset 'pids[12]'
found=0 failed=0
while IFS= read -r key; do
    if kv-cli get "$key" >/dev/null 2>"$folder/error"; then
        found=$((found + 1))
    else
        failed=$((failed + 1))
        mv "$folder/error" "$folder/last-error"
    fi
    [ $((found + failed)) -lt 12 ] || break
done < <(cd "$tree" && find . -type f | sed 's#^\./##' | sort)
if [ "$failed" -eq 0 ]; then
    echo "of 12 keys, all were read: none of them is on the third server"
else
    echo "of 12 keys, $found were read, and $failed failed; the last error:"
    cat "$folder/last-error"
fi
run kv-cli cluster check "$uri" || true

say "start it again at another port, with its region file: the client finds it"
start 2 "$(port)"
for attempt in $(seq 200); do
    [ "$(serving)" -lt 3 ] || break
    [ "$attempt" -lt 200 ] || { cat "$folder/server2.log" >&2; exit 1; }
    sleep 0.1
done
run kv-cli verify
now=$(kv-cli scan --keys-only | wc -l)
[ "$now" -eq "$keys" ] || { echo "there were $keys keys, and now there are $now" >&2; exit 1; }
run kv-cli dump "$folder/dump"
diff -r --no-dereference "$tree" "$folder/dump"
run kv-cli cluster check "$uri"
say "all $keys keys are there, as they were loaded"
