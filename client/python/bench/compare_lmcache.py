"""Measures LMCache's own benchmark of L2 storage with Farside and with redis, in one run.

    python -m venv venv && venv/bin/pip install lmcache==0.5.6 farside-*.whl
    venv/bin/python compare_lmcache.py FOLDER-OF-KV-SERVER [ROUNDS]

Needs redis-server. Redis is reached by LMCache's connector `resp`. Each backend has two workers,
and stores, looks up and loads 32 blocks of 1 MiB a round, which the benchmark verifies. The backends
are measured in turns, three times. A cell is the median of the turns' averages. Prints a table in
Markdown.
"""

import contextlib
import json
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

TURNS = 3
OPTIONS = ["--no-skip-verify", "--num-keys", "32", "--data-size-kb", "1024"]
OPTIONS += ["--lookup-max-hit-rate", "0.5", "--format", "json"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_for_port(port):
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert time.monotonic() < deadline, f"nothing listens at port {port}"
        time.sleep(0.05)


def farside(server):
    parameters = {"server": server, "num_workers": 2}
    plugin = {"type": "native_plugin", "module_path": "farside.lmcache", "class_name": "Connector"}
    return {**plugin, "adapter_params": parameters}


def measure(adapter, rounds):
    """Returns the average throughput of stores and loads, in MB/s."""
    command = [sys.executable, "-m", "lmcache.cli.main", "bench", "l2", *OPTIONS]
    command += ["--rounds", str(rounds), "--l2-adapter", json.dumps(adapter)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # The report follows the lines of the rounds.
    report, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("\n{") + 1 :])
    measured = {op["operation"]: op for op in report["metrics"].values() if "operation" in op}
    assert all(measured[name]["total_success"] > 0 for name in ("Store", "Load")), report
    return {name: measured[name]["throughput_avg_mbps"] for name in ("Store", "Load")}


def main():
    binaries = pathlib.Path(sys.argv[1])
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    folder = tempfile.mkdtemp(prefix="farside-bench-")
    tcp, redis = free_port(), free_port()
    socket_path = f"{folder}/kv.sock"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = [binaries / "kv-server", "--listen", f"shm://{socket_path}", "--memory", "2GiB"]
    server += ["--listen", f"tcp://127.0.0.1:{tcp}"]
    beside = ["redis-server", "--port", str(redis), "--save", "", "--dir", folder]
    backends = {
        "Farside, `shm://`": farside(f"shm://{socket_path}"),
        "Farside, `tcp://`": farside(f"tcp://127.0.0.1:{tcp}"),
        "Redis, TCP": {"type": "resp", "host": "127.0.0.1", "port": redis, "num_workers": 2},
    }
    processes = [subprocess.Popen(command, **quiet) for command in (server, beside)]
    try:
        wait_for_port(tcp)
        wait_for_port(redis)
        runs = {name: [] for name in backends}
        for _ in range(TURNS):
            for name, adapter in backends.items():
                runs[name].append(measure(adapter, rounds))
        print("| backend | store | load |")
        print("|---|---|---|")
        for name, measured in runs.items():
            cells = [statistics.median(run[of] for run in measured) for of in ("Store", "Load")]
            print(f"| {name} | " + " | ".join(f"{cell:,.0f} MB/s" for cell in cells) + " |")
    finally:
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
