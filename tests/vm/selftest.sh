#!/usr/bin/env bash
# Proves that tests/vm/run, tests/vm/hosts and tests/vm/hosts-control do what their comments say, and
# prints how long a guest takes. A few minutes; the exit code is the number of steps that failed.
#
#   tests/vm/selftest.sh
# shellcheck disable=SC2016 # what is quoted is meant for guests
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
"$here/build.sh"
# All temporary files go in here, so that the test sees files that are left behind.
work=$(mktemp -d "${TMPDIR:-/tmp}/farside-vm-selftest.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/tmp" "$work/share" "$work/a folder"
export TMPDIR=$work/tmp
failed=0 code=0

step() { printf '\n== %s\n' "$*"; }
# says TEXT: whether the last command printed a line like this, on either stream.
says() { grep -qxe "$1" "$work/out" "$work/err" || wrong "no line $1"; }
exits() { [ "$code" -eq "$1" ] || wrong "exit code $code, not $1"; }
wrong() {
    echo "FAILED: $*"
    failed=$((failed + 1))
    tail -n 40 "$work/out" "$work/err"
}
# try COMMAND...: its output in out and err, its exit code in $code.
try() {
    local start=$EPOCHREALTIME
    code=0
    "$@" >"$work/out" 2>"$work/err" || code=$?
    awk -v from="$start" -v to="$EPOCHREALTIME" 'BEGIN { printf "%.1f s\n", to - from }'
}
run() { try "$here/run" "$@"; }
hosts() { try "$here/hosts" "$@"; }
nothing_left() {
    local left
    left=$(ls -A "$TMPDIR")
    [ -z "$left" ] || wrong "left behind: $left"
    ! pgrep -af "qemu-system.*$TMPDIR" || wrong "a guest still runs"
}

step "A guest that does nothing: boot, run, power-off"
run --timeout 120 --rxe none --cpus 1 -- true
exits 0

step "Exit code, standard error, folder, variables and arguments of a command"
printf -v long '%8192s' ''
long=${long// /x}
cd "$work/a folder"
export FARSIDE_SELFTEST='two  words, "quotes" and a
line feed'
run --timeout 120 --rxe none -- bash -c 'echo "$PWD"; printf "<%s>\n" "$1" "$2" "${#3}"
    test "$FARSIDE_SELFTEST" = "$4" && echo passed on; echo lost >"$PWD/lost"
    echo to stderr >/dev/stderr; exit 42' zero "it's" '$HOME "and" `more`' "$long" \
    "$FARSIDE_SELFTEST"
cd "$here"
exits 42
says "$work/a folder"
says "<it's>"
says '<$HOME "and" `more`>'
says '<8192>'
says 'passed on'
grep -qx 'to stderr' "$work/err" || wrong "nothing on standard error"
[ ! -e "$work/a folder/lost" ] || wrong "the guest wrote into this machine"

step "No such command; all of a long output; a shared folder"
run --timeout 120 --rxe none --cpus 1 -- no-such-command
exits 127
run --timeout 120 --rxe none --share "$work/share" -- \
    bash -c 'seq 300000; echo kept >"$FARSIDE_VM_SHARE/kept"'
exits 0
seq 300000 | cmp - "$work/out" || wrong "the output is not whole"
grep -qx kept "$work/share/kept" || wrong "nothing in the shared folder"

step "soft-RoCE in one guest: the device, and perftest from it to itself"
latency='ib_read_lat -d rxe0 -x 1 -s 64 -n 2000'
run --timeout 120 -- bash -c "ibv_devinfo -d rxe0
    $latency >/dev/null 2>&1 & sleep 1; $latency 10.9.0.1 | grep -v '^[- ]*#' | tail -n 4"
exits 0
says 'hca_id:.*rxe0'
says '.*state:.*PORT_ACTIVE (4)'
grep -E '^ *64 ' "$work/out" | awk '{ print "READ of 64 bytes: " $5 " us (p50), " $8 " us (p99)" }'
says ' 64 .*'

step "A command that hangs, a guest that panics, and a harness that is killed"
run --timeout 15 --rxe none --cpus 1 -- bash -c 'echo before; sleep 1000'
exits 124
says before
run --timeout 120 --rxe none --cpus 1 -- bash -c 'echo c >/proc/sysrq-trigger'
exits 125
says '.*Kernel panic.*'
nothing_left
for signal in TERM KILL; do
    "$here/run" --rxe none -- sleep 1000 >/dev/null 2>&1 &
    sleep 1
    kill "-$signal" "$!"
    wait "$!" 2>/dev/null || true
    sleep 0.5
    # After kill -9 files stay, and no process may still run.
    [ "$signal" != KILL ] || rm -rf "${TMPDIR:?}"/*
    nothing_left
done

step "Two hosts: names, perftest between them, exit codes"
hosts --timeout 180 --server "one=while :; do $latency >/dev/null 2>&1; done" \
    --host "two=until busybox ping -c 1 -W 1 one >/dev/null; do :; done; hostname
        for i in 1 2 3 4 5 6 7 8 9; do $latency one >lat 2>/dev/null && break; sleep 1; done
        grep '^ 64' lat; echo \$FARSIDE_VM_ADDRESS >&2; exit 5"
exits 5
says 'two| two'
says 'two| 10.9.0.2'
says 'two|  64 .*'
grep -E '\| *64 ' "$work/out" | awk '{ print "READ of 64 bytes: " $6 " us (p50), " $9 " us (p99)" }'
nothing_left

step "Freeze, thaw and kill, asked for by a guest and from outside"
control=$here/hosts-control
(
    # Not before both are up.
    until [ -e "$work/share/ready" ] || [ "$SECONDS" -gt 900 ]; do sleep 0.2; done
    "$control" "$work/share" freeze one && touch "$work/share/frozen-outside"
    "$control" "$work/share" thaw one && touch "$work/share/thawed-outside"
) &
hosts --timeout 240 --share "$work/share" --server 'one=while :; do sleep 100; done' --host "two=
    reach() { busybox ping -c 1 -W 2 one >/dev/null; }
    until reach; do :; done; touch \$FARSIDE_VM_SHARE/ready
    until [ -e \$FARSIDE_VM_SHARE/thawed-outside ]; do sleep 0.2; done
    reach && echo thawed from outside
    $control \$FARSIDE_VM_SHARE freeze one; reach || echo frozen
    $control \$FARSIDE_VM_SHARE thaw one; reach && echo thawed
    $control \$FARSIDE_VM_SHARE kill one; reach || echo killed
    $control \$FARSIDE_VM_SHARE kill one || echo no longer there
    cat /sys/class/net/eth0/carrier"
exits 0
[ -e "$work/share/frozen-outside" ] || wrong "not frozen from outside"
for line in 'thawed from outside' frozen thawed killed 'no longer there' 1; do
    says "two| $line"
done
wait

step "Hosts that hang"
hosts --timeout 15 --host 'one=sleep 1000' --host 'two=sleep 1000'
exits 124
nothing_left

printf '\n%s\n' "$([ "$failed" -eq 0 ] && echo "all is well" || echo "$failed FAILED")"
exit "$failed"
