#!/usr/bin/env bash
# Starts a cluster of SERVERS on this machine, over one fabric, and prints what a client with
# SESSIONS sessions takes.
#
#   tools/scripts/cluster-footprint.sh tcp|shm|rdma SERVERS SESSIONS [FOLDER OF THE PROGRAMS]
#
# rdma needs a device: tests/vm/run -- tools/scripts/cluster-footprint.sh rdma 8 4
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fabric=$1 servers=$2 sessions=$3 programs=${4:-${CARGO_TARGET_DIR:-target}/release}
folder=$(mktemp -d -p /dev/shm)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
ulimit -n "$(ulimit -H -n)"
"$programs/kv-cli" cluster create "file://$folder/records" --shards "$servers" >/dev/null
seeds=
for ((n = 0; n < servers; n++)); do
    case $fabric in
    tcp) address=tcp://127.0.0.1:$((7600 + n)) ;;
    rdma) address=rdma://10.9.0.1:$((7600 + n)) ;;
    shm) address=shm://$folder/$n.sock ;;
    esac
    "$programs/kv-server" --cluster "file://$folder/records" --listen "$address" --memory 64MiB \
        2>"$folder/$n.log" &
    seeds+=${seeds:+,}$address
done
until "$programs/kv-cli" cluster check "file://$folder/records" >"$folder/check" 2>&1; do
    sleep 0.5
    kill -0 $! || { cat "$folder/$((servers - 1)).log" "$folder/check" >&2; exit 1; }
done
"$programs/examples/cluster-footprint" "$seeds" "$sessions"
