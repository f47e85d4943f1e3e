#!/usr/bin/env bash
# Measures Farside over tcp:// on one machine, with servers on processor 0 and clients on processor 1.
# Beside it in turns, with 8 connections and pipelines of the same depth:
#
# - bench/examples/tcp-echo.rs with frames of the same length: the floor of the sockets;
# - redis and memcached, if installed, with the same records and the same distribution of keys; and
#   redis with one key, as redis-benchmark asks for by default. The loop of tcp-echo asks them: it
#   sends requests that were prepared, and only counts the bytes of replies.
#
# Prints medians of all rounds. `ROUNDS=5` and `SECONDS_EACH=2` set how long it takes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

rounds=${ROUNDS:-5}
seconds=${SECONDS_EACH:-2}
port=${PORT:-7471}
sessions=8
records=100000
[ "$(nproc)" -ge 2 ] || { echo "bench-tcp: this needs two processors" >&2; exit 1; }

release=${CARGO_TARGET_DIR:-target}/release
cargo build --release --locked --workspace --bin kv-server --bin kv-bench \
    --example tcp-echo --example silent-connections
PATH=$PWD/$release:$PWD/$release/examples:$PATH

work=$(mktemp -d "${TMPDIR:-/tmp}/farside-bench-tcp.XXXXXX")
pids=()
stop() {
    trap - EXIT
    kill "${pids[@]}" 2>/dev/null || true
    wait "${pids[@]}" 2>/dev/null || true
    rm -rf "$work"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Starts a server on processor 0, and waits until its port answers. Its number goes to $pid.
serve() {
    local port=$1
    shift
    taskset -c 0 "$@" >"$work/$port.log" 2>&1 &
    pid=$!
    pids+=("$pid")
    for _ in $(seq 100); do
        # In a process of its own, which closes the connection.
        (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null && return
        sleep 0.1
    done
    cat "$work/$port.log" >&2
    exit 1
}
client() { taskset -c 1 timeout 120 "$@"; }

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=farside \
    -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE \
    -keyout "$work/key.pem" -out "$work/certificate.pem" 2>/dev/null
printf '[tls]\ncertificate = "%s"\nkey = "%s"\n' "$work/certificate.pem" "$work/key.pem" \
    >"$work/server-tls.toml"
printf '[tls]\nca = "%s"\n' "$work/certificate.pem" >"$work/client-tls.toml"
printf '[tcp]\nspin_us = 0\n' >"$work/server-sleeps.toml"
: >"$work/server-plain.toml" >"$work/client-plain.toml" >"$work/client-sleeps.toml"
chmod 600 "$work"/*

farside_kinds=(plain sleeps tls)
declare -A port_of pid_of
for kind in "${farside_kinds[@]}"; do
    port_of[$kind]=$port
    serve "$port" kv-server --config "$work/server-$kind.toml" \
        --listen "tcp://127.0.0.1:$port" --memory 2GiB
    pid_of[$kind]=$pid
    port=$((port + 1))
done
for reply in 136 1048648; do
    port_of[echo$reply]=$port
    serve "$port" tcp-echo serve "127.0.0.1:$port" 24 "$reply"
    port=$((port + 1))
done

value=$(printf 'v%.0s' $(seq 64))
if command -v redis-server >/dev/null; then
    port_of[redis]=$port
    serve "$port" redis-server --port "$port" --save '' --appendonly no
    client tcp-echo fill "127.0.0.1:$port" 5 \
        "*3\\r\\n\$3\\r\\nSET\\r\\n\$24\\r\\n%\\r\\n\$64\\r\\n$value\\r\\n"
    port=$((port + 1))
fi
if command -v memcached >/dev/null; then
    port_of[memcached]=$port
    serve "$port" memcached -l 127.0.0.1 -p "$port" -t 1 -u "$(id -un)"
    client tcp-echo fill "127.0.0.1:$port" 8 \
        "set % 0 0 64\\r\\n$value\\r\\n"
fi

# Appends a figure to a line of the table.
note() { echo "$2" >>"$work/figures $1"; }
median() { sort -g "$work/figures $1" | awk '{ a[NR] = $1 } END { print a[int((NR + 1) / 2)] }'; }
# The figure of this name in the JSON of a run.
figure() { sed "s/.*\"$1\":\([0-9.]*\).*/\1/" "$work/run"; }

# Runs kv-bench against the server of this kind, within the command $around, and prints the result as
# JSON.
around=()
farside() {
    local kind=$1 depth=$2 records=$3 bytes=$4
    shift 4
    client "${around[@]}" kv-bench ycsb --config "$work/client-$kind.toml" \
        --server "tcp://127.0.0.1:${port_of[$kind]}" --workload c --threads $sessions \
        --records "$records" --value-size "$bytes" --depth "$depth" \
        --json - "$@" 2>"$work/errors" ||
        { cat "$work/errors" >&2; exit 1; }
}

# Prints what a run with this number of operations takes: the server's processor time in ticks, its
# system calls, and those of the clients.
run_cost() {
    local kind=$1 depth=$2 operations=$3 pid=${pid_of[$1]} before after
    local counted=(perf stat -x, -e raw_syscalls:sys_enter -o)
    # The count of the server ends with the clients.
    perf stat -e raw_syscalls:sys_enter true 2>/dev/null && around=(
        "${counted[@]}" "$work/server-calls" -p "$pid" "${counted[@]}" "$work/client-calls"
    )
    before=$(awk '{ print $14 + $15 }' "/proc/$pid/stat")
    farside "$kind" "$depth" $records 64 --operations "$operations" --warmup-seconds 0 \
        --limit-seconds 0 >/dev/null
    after=$(awk '{ print $14 + $15 }' "/proc/$pid/stat")
    echo $((after - before)) "$(calls "$work/server-calls")" "$(calls "$work/client-calls")"
}
# Prints what an operation takes: the difference between two runs, so loading does not count.
costs() {
    local kind=$1 depth=$2 operations=$3
    echo "$(run_cost $kind $depth $operations) $(run_cost $kind $depth $((2 * operations)))" |
        awk -v hz="$(getconf CLK_TCK)" -v operations="$operations" '
            NF == 2 { printf "%.2f - -\n", ($2 - $1) * 1e6 / hz / operations }
            NF == 6 { printf "%.2f %.3f %.3f\n", ($4 - $1) * 1e6 / hz / operations,
                ($5 - $2) / operations, ($6 - $3) / operations }'
}
calls() { sed -n 's/^\([0-9]*\),.*sys_enter.*/\1/p' "$1" 2>/dev/null; }

key_request='*2\r\n$3\r\nGET\r\n$24\r\n%\r\n'
one_request=${key_request/\%/user06284781860667377211}
ask() { client tcp-echo ask "127.0.0.1:${port_of[$1]}" $sessions "$2" "$seconds" "$3" "$4"; }

for round in $(seq "$rounds"); do
    echo "bench-tcp: round $round of $rounds" >&2
    for depth in 1 16 64; do
        note "echo $depth" "$(ask echo136 $depth 136 24)"
        for kind in "${farside_kinds[@]}"; do
            farside $kind $depth $records 64 --seconds "$seconds" --warmup-seconds 0.5 >"$work/run"
            note "farside $kind $depth" "$(figure throughput_ops_s)"
            note "verbs $kind $depth" "$(figure read_ops_s)"
        done
        [ -z "${port_of[redis]:-}" ] || {
            note "redis $depth" "$(ask redis $depth 71 "$key_request")"
            note "redis one $depth" "$(ask redis $depth 71 "$one_request")"
        }
        [ -z "${port_of[memcached]:-}" ] ||
            note "memcached $depth" "$(ask memcached $depth 108 'get %\r\n')"
    done
    note "echo MiB" "$(ask echo1048648 1 1048648 24)"
    for kind in plain tls; do
        farside $kind 1 200 1048576 --seconds "$seconds" --limit-seconds 0 >"$work/run"
        note "farside $kind MiB" "$(figure throughput_ops_s)"
    done
done

# Beside 1000 connections to the same server that say nothing, or a byte at a time.
for round in $(seq "$rounds"); do
    for others in none silent trickle; do
        if [ $others != none ]; then
            coproc OTHERS { silent-connections "tcp://127.0.0.1:${port_of[plain]}" 1000 $others; }
            others_pid=$OTHERS_PID
            # It says when all are open.
            read -r _ <&"${OTHERS[0]}"
        fi
        farside plain 16 $records 64 --seconds "$seconds" --warmup-seconds 0.5 \
            --limit-seconds 0 >"$work/run"
        note "beside $others" "$(figure throughput_ops_s)"
        if [ $others != none ]; then
            exec {OTHERS[1]}>&-
            wait "$others_pid"
        fi
    done
done

row() {
    local name=$1 figure=$2
    printf '| %s | %.0f | %.0f | %.0f |\n' "$name" "$(median "$figure 1")" \
        "$(median "$figure 16")" "$(median "$figure 64")"
}
echo
echo "GETs of 64 bytes a second, 8 sessions, $records records; medians of $rounds rounds"
echo
echo "| what | depth 1 | depth 16 | depth 64 |"
echo "|---|---|---|---|"
row "Farside" "farside plain"
row "Farside, spin_us = 0" "farside sleeps"
row "Farside, TLS" "farside tls"
row "raw READs of Farside" "verbs plain"
row "raw READs of Farside, TLS" "verbs tls"
row "echo" "echo"
[ -z "${port_of[redis]:-}" ] || { row "redis" "redis"; row "redis, one key" "redis one"; }
[ -z "${port_of[memcached]:-}" ] || row "memcached" "memcached"
echo
echo "| values of 1 MiB, 8 sessions | a second |"
echo "|---|---|"
printf '| %s | %.0f |\n' "echo" "$(median "echo MiB")" "Farside" "$(median "farside plain MiB")" \
    "Farside, TLS" "$(median "farside tls MiB")"
echo
echo "| depth 16, beside 1000 connections | GETs a second |"
echo "|---|---|"
for others in none silent trickle; do
    printf '| %s | %.0f |\n' "$others" "$(median "beside $others")"
done
echo
echo "| an operation | depth | server's CPU, us | its system calls | those of the clients |"
echo "|---|---|---|---|---|"
for kind in "${farside_kinds[@]}"; do
    for depth in 1 16 64; do
        read -r cpu server clients < <(costs $kind $depth $((200000 + 50000 * (depth - 1))))
        echo "| Farside, $kind | $depth | $cpu | $server | $clients |"
    done
done
