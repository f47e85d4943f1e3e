"""Times calls beside the same calls from Rust, redis-py, and a copy of memory, in one run.

    make build && cargo build --release -p farside-python --examples
    target/python-venv/bin/python client/python/bench/calls.py

Needs redis-server. Each time is the best of several rounds, because other programs disturb a round.
Prints a table in Markdown.
"""

import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import farside
import redis

ROOT = pathlib.Path(__file__).parents[3]
RELEASE = ROOT / "target" / "release"
# The folder with kv-server and kv-bench.
BINARIES = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else RELEASE
ROUNDS = 7
KEYS = [f"key:{number}" for number in range(100)]
# As much memory as `kv-bench verbs` reads.
LONG_KEYS = [f"long:{number}" for number in range(64)]


def measure(calls, call, *arguments):
    """Returns how long a call takes, in nanoseconds."""
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter_ns()
        for _ in range(calls):
            call(*arguments)
        best = min(best, (time.perf_counter_ns() - started) / calls)
    return best


def read_long(client, target):
    """Returns the median of GETs of 64 values of 1 MiB, in nanoseconds."""
    times = []
    for number in range(2000):
        started = time.perf_counter_ns()
        client.get_into(LONG_KEYS[number % len(LONG_KEYS)], target)
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times)


def raw_read(bench, address):
    """Returns the median of READs of 1 MiB at the same server, in nanoseconds."""
    command = [bench, "verbs", "--server", address, "--bytes", "1048576"]
    command += ["--seconds", "1", "--json", "-"]
    report = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return json.loads(report)["read"]["p50_ns"]


def main():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="farside-bench-"))
    address = f"shm://{folder}/kv.sock"
    server, bench = (str(BINARIES / name) for name in ("kv-server", "kv-bench"))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [
        subprocess.Popen([server, "--listen", address, "--memory", "1GiB"], **quiet),
        subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", f"{folder}/redis.sock", "--save", ""],
            **quiet,
        ),
    ]
    try:
        client = farside.Client(address)
        rust = subprocess.run(
            [RELEASE / "examples" / "rust_calls", address],
            capture_output=True, check=True, text=True,
        )
        rust = {name: float(time) for name, time in map(str.split, rust.stdout.splitlines())}
        beside = redis.Redis(unix_socket_path=f"{folder}/redis.sock")
        value = b"x" * 64
        beside.set("short", value)
        beside.mset({key: value for key in KEYS})
        target = bytearray(1 << 20)
        client.put_many({key: bytes([number]) * (1 << 20) for number, key in enumerate(LONG_KEYS)})

        get = measure(200_000, client.get, "short")
        put = measure(100_000, client.put, "short", value)
        get_many = measure(2_000, client.get_many, KEYS)
        # Beside each other in time, because the machine's speed changes.
        get_into, raw = zip(
            *(
                (read_long(client, target), raw_read(bench, address))
                for _ in range(3)
            )
        )
        redis_get = measure(10_000, beside.get, "short")
        redis_put = measure(10_000, beside.set, "short", value)
        redis_many = measure(500, beside.mget, KEYS)

        rows = [
            ("get of 64 B", f"{get:.0f} ns", f"{rust['get']:.0f} ns", f"{redis_get:,.0f} ns"),
            ("put of 64 B", f"{put:.0f} ns", f"{rust['put']:.0f} ns", f"{redis_put:,.0f} ns"),
        ]
        times = (get_many, rust["get_many"], redis_many)
        rows.append(("get_many of 100, 64 B", *(f"{1e5 / time:.2f} M keys/s" for time in times)))
        speeds = [f"{(1 << 20) / min(times):.2f} GB/s" for times in (get_into, raw)]
        rows.append(("get_into of 1 MiB, medians", speeds[0], f"raw READ {speeds[1]}", ""))
        print("| operation | Python | Rust | redis-py |")
        print("|---|---|---|---|")
        for row in rows:
            print(f"| {' | '.join(row)} |")
    finally:
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
