"""Servers and clients for the tests. `KV_SERVER` names the program of the server."""

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zlib

import farside
import pytest

ROOT = pathlib.Path(__file__).parents[3]
BUILT = [ROOT / "target" / profile / "kv-server" for profile in ("release", "debug")]
FOUND = [str(path) for path in BUILT if path.exists()]
# The address of an RDMA device. The tests use it in the place of shared memory and TCP.
DEVICE = os.environ.get("FARSIDE_TEST_DEVICE")
FABRICS = ["rdma", "cluster"] if DEVICE else ["shm", "tcp", "cluster"]
KV_SERVER = os.environ.get("KV_SERVER") or shutil.which("kv-server") or next(iter(FOUND), None)
# How many seconds a test waits for what has to happen. It is so long because other programs may
# keep the machine busy.
LIMIT = 300
# The tests that are left out because they run on another fabric.
LEFT_OUT = set()


def pytest_addoption(parser):
    text = "run the tests marked one_fabric over each fabric"
    parser.addoption("--all-fabrics", action="store_true", help=text)


def pytest_configure(config):
    text = "one_fabric: repeats the same over each fabric, so without --all-fabrics runs over one"
    config.addinivalue_line("markers", text)


def fabric_of(item):
    """What the fixture `server` is for a test, if it runs over one of several fabrics."""
    is_marked = item.get_closest_marker("one_fabric") and hasattr(item, "callspec")
    return item.callspec.params.get("server") if is_marked else None


# Last, so that it chooses among the tests that the caller's options select.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leaves out each test marked `one_fabric` over all fabrics but one."""
    if config.getoption("all_fabrics"):
        return
    fabrics = {}
    for item in items:
        if fabric := fabric_of(item):
            words = item.callspec.id.split("-")
            words.remove(fabric)
            name = f"{item.path.name} {item.originalname} {'-'.join(words)}"
            fabrics.setdefault(name, {})[fabric] = item
    for name, repeated in fabrics.items():
        # A checksum of the name, because Python's own hash differs between processes.
        ordered = [repeated[fabric] for fabric in sorted(repeated)]
        chosen = ordered[zlib.crc32(name.encode()) % len(ordered)]
        LEFT_OUT.update(item for item in ordered if item is not chosen)
    if LEFT_OUT:
        config.hook.pytest_deselected(items=list(LEFT_OUT))
        items[:] = [item for item in items if item not in LEFT_OUT]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    if LEFT_OUT:
        terminalreporter.write_line(
            f"left out: {len(LEFT_OUT)} repetitions of tests on another fabric: tests that do the "
            f"same on {', '.join(FABRICS)} run on one of them; --all-fabrics runs them on each"
        )


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_until(holds):
    """Waits until a condition holds."""
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline, f"it did not happen in {LIMIT} s"
        time.sleep(0.005)


def spawn(command):
    # stderr goes to a file. A pipe without a reader fills up, and then the server waits.
    log = tempfile.TemporaryFile()
    process = subprocess.Popen(command, stderr=log)
    process.log = log
    return process


def free_address():
    """An address of a network for a server."""
    return f"rdma://{DEVICE}:{free_port()}" if DEVICE else f"tcp://127.0.0.1:{free_port()}"


def start_server(address, *options, memory="256MiB", settings={}):
    """Starts a server, and returns its process once it accepts clients with these settings."""
    assert KV_SERVER, "set KV_SERVER to the path of kv-server"
    process = spawn([KV_SERVER, "--listen", address, "--memory", memory, *options])

    def accepts():
        assert process.poll() is None, "the server has ended"
        try:
            farside.Client(address, connect_timeout=20, **settings).close()
        except farside.UnreachableError:
            return False
        except farside.RefusedError:
            pass
        return True

    try:
        wait_until(accepts)
    except BaseException:
        stop(process)
        raise
    return process


def stop(process):
    process.terminate()
    process.wait(LIMIT)
    process.log.seek(0)
    sys.stderr.write(process.log.read().decode()[-10_000:])
    process.log.close()


@pytest.fixture(scope="session")
def folder():
    with tempfile.TemporaryDirectory(prefix="farside-") as path:
        yield pathlib.Path(path)


def start_cluster(folder, addresses):
    """Starts the servers of a cluster whose records are in this folder."""
    cli, records = pathlib.Path(KV_SERVER).with_name("kv-cli"), f"file://{folder}/cluster"
    create = [cli, "cluster", "create", records, "--shards", str(len(addresses))]
    subprocess.run(create, check=True, stdout=subprocess.DEVNULL)
    processes = []
    for address in addresses:
        command = [KV_SERVER, "--cluster", records, "--listen", address, "--memory", "256MiB"]
        processes.append(spawn(command))
    check = [cli, "cluster", "check", records]
    wait_until(lambda: subprocess.run(check, capture_output=True).returncode == 0)
    return processes


@pytest.fixture(scope="session", params=FABRICS)
def server(request, folder):
    """The address of a server, over each fabric, or those of a cluster."""
    if request.param == "cluster":
        addresses = [free_address() for _ in range(3)]
        processes = start_cluster(folder, addresses)
        yield ",".join(addresses)
        for process in processes:
            stop(process)
        return
    address = f"shm://{folder}/kv.sock" if request.param == "shm" else free_address()
    process = start_server(address)
    yield address
    stop(process)


@pytest.fixture
def client(server):
    """A client of a server without keys."""
    with farside.Client(server, connect_timeout=LIMIT) as client:
        client.delete_many([key for key, _ in client.scan()])
        yield client
