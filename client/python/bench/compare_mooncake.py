"""Compares with Mooncake's store over TCP: single values and batches of 100, in one run.

    python -m venv venv && venv/bin/pip install mooncake-transfer-engine-non-cuda numpy farside-*.whl
    venv/bin/python compare_mooncake.py FOLDER-OF-KV-SERVER [SECONDS]

Both stores have one process that keeps the values and one client, which passes buffers: Mooncake
registered ones with `put_from` and `get_into`, Farside with `put` and `get_into`. A PUT stores a
new key, because Mooncake's objects do not change; its removal is not timed. The three are measured
in turns. A time is the median of the calls of all turns. Prints a table in Markdown.
"""

import contextlib
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import farside
import numpy

LENGTHS = {"64 B": 64, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
BATCH = 100
TURNS = 3
NAMES = ["mooncake tcp", "farside tcp", "farside shm"]
MEMORY = 6 << 30


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


def join_mooncake(master, bytes):
    """Makes a client of Mooncake that keeps so many bytes of values."""
    from mooncake.store import MooncakeDistributedStore

    store, host = MooncakeDistributedStore(), f"127.0.0.1:{free_port()}"
    code = store.setup(host, "P2PHANDSHAKE", bytes, 64 << 20, "tcp", "", f"127.0.0.1:{master}")
    assert code == 0, code
    return store


def keep_values(master):
    """The process that keeps Mooncake's values, until its standard input ends."""
    store = join_mooncake(master, MEMORY)
    print("ready", flush=True)
    sys.stdin.read()
    del store


class Mooncake:
    def __init__(self, memory, master):
        self.store = join_mooncake(master, 0)
        self.start = memory.ctypes.data
        assert self.store.register_buffer(self.start, memory.nbytes) == 0

    def put(self, key, part):
        assert self.store.put_from(key, self.start, part.nbytes) == 0

    def get(self, key, part):
        assert self.store.get_into(key, self.start, part.nbytes) == part.nbytes

    def put_batch(self, keys, parts):
        codes = self.store.batch_put_from(keys, self.addresses(parts), [p.nbytes for p in parts])
        assert all(code == 0 for code in codes), codes

    def get_batch(self, keys, parts):
        found = self.store.batch_get_into(keys, self.addresses(parts), [p.nbytes for p in parts])
        assert all(bytes == parts[0].nbytes for bytes in found), found

    def addresses(self, parts):
        return [self.start + number * part.nbytes for number, part in enumerate(parts)]

    def remove(self, keys):
        for key in keys:
            # A lease keeps an object for some seconds after a GET, unless it is forced out.
            self.store.remove(key, True)


class Farside:
    def __init__(self, address):
        self.client = farside.Client(address)
        self.put = self.client.put
        self.get = self.client.get_into
        self.get_batch = self.client.get_many_into
        self.remove = self.client.delete_many

    def put_batch(self, keys, parts):
        self.client.put_many(zip(keys, parts))


def timed(times, call, *arguments):
    started = time.perf_counter()
    call(*arguments)
    times.append(time.perf_counter() - started)


def measure(store, name, memory, bytes, seconds, times):
    """Adds the times of PUTs and GETs, and of batches, for so many seconds each."""
    parts = [memory[n * bytes : (n + 1) * bytes] for n in range(BATCH)]
    for operation, size in (("put", 1), ("put of 100", BATCH)):
        single, number, end = size == 1, 0, time.perf_counter() + 2 * seconds
        while time.perf_counter() < end or number < 3:
            keys = [f"{name}:{bytes}:{number}:{n}" for n in range(size)]
            put = times.setdefault((operation, name, bytes), [])
            get = times.setdefault((operation.replace("put", "get"), name, bytes), [])
            if single:
                timed(put, store.put, keys[0], parts[0])
                timed(get, store.get, keys[0], parts[0])
            else:
                timed(put, store.put_batch, keys, parts)
                timed(get, store.get_batch, keys, parts)
            store.remove(keys)
            number += 1


def main():
    binaries = pathlib.Path(sys.argv[1])
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
    folder = tempfile.mkdtemp(prefix="farside-bench-")
    port, master_port, metrics_port = free_port(), free_port(), free_port()
    addresses = {"farside shm": f"shm://{folder}/kv.sock", "farside tcp": f"tcp://127.0.0.1:{port}"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    listen = [part for address in addresses.values() for part in ("--listen", address)]
    master = [str(pathlib.Path(sys.executable).parent / "mooncake_master")]
    master += ["--rpc_port", str(master_port), "--metrics_port", str(metrics_port)]
    processes = [
        subprocess.Popen(command, **quiet)
        for command in ([binaries / "kv-server", *listen, "--memory", f"{MEMORY >> 30}GiB"], master)
    ]
    try:
        wait_for_port(port)
        wait_for_port(master_port)
        command, pipe = [sys.executable, __file__, "keep", str(master_port)], subprocess.PIPE
        storage = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        processes.append(storage)
        while b"ready" not in (line := storage.stdout.readline()):
            assert line, "Mooncake's storage has ended"
        memory = numpy.random.default_rng(1).integers(
            0, 256, BATCH * max(LENGTHS.values()), numpy.uint8
        )
        stores = {"mooncake tcp": Mooncake(memory, master_port)}
        stores |= {name: Farside(address) for name, address in addresses.items()}
        times = {}
        for _ in range(TURNS):
            for bytes in LENGTHS.values():
                for name, store in stores.items():
                    measure(store, name, memory, bytes, seconds / TURNS, times)
        print(f"| operation | length | {' | '.join(NAMES)} | tcp: mooncake / farside |")
        print("|---|---|---|---|---|---|")
        for operation in ("put", "get", "put of 100", "get of 100"):
            for label, bytes in LENGTHS.items():
                medians = {n: statistics.median(times[operation, n, bytes]) * 1e6 for n in stores}
                cells = [f"{medians[name]:,.0f} us" for name in NAMES]
                ratio = medians["mooncake tcp"] / medians["farside tcp"]
                print(f"| {operation} | {label} | {' | '.join(cells)} | {ratio:.1f} |")
    finally:
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        keep_values(int(sys.argv[2]))
    else:
        main()
