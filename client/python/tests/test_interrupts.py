"""Ctrl-C ends a call that waits for a server.

The timeouts here are a day, so without that the tests would not end. The cause of the exception is
the error of the call: it tells whether a write may have taken effect, and it proves that the signal
came during the call.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest
from conftest import LIMIT, free_port, start_cluster, start_server, stop

# The program sends a signal to itself, once its main thread has waited in a system call for a
# while, or has slept a thousand times, because some calls look again and again.
PROLOGUE = """
    import asyncio, os, signal, threading, time
    import farside
    from farside import aio

    # A shell that starts the tests in the background has them ignore the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    DAY = 86400
    main = threading.get_native_id()

    def state(process):
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]

    def stop_servers(*servers):
        for server in servers:
            os.kill(server, signal.SIGSTOP)
        while not all(state(server) == "T" for server in servers):
            time.sleep(0.001)

    def is_waiting():
        return state(f"self/task/{main}") == "S"

    def sleeps():
        with open(f"/proc/self/task/{main}/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        return int(lines["voluntary_ctxt_switches"])

    def interrupt_main(number):
        waited, slept = 0, sleeps()
        while waited < 20 and sleeps() < slept + 1000:
            time.sleep(0.005)
            waited = waited + 1 if is_waiting() else 0
        os.kill(os.getpid(), number)

    def interrupt_later(number=signal.SIGINT):
        threading.Thread(target=interrupt_main, args=(number,), daemon=True).start()

    def interrupted(call, number=signal.SIGINT):
        interrupt_later(number)
        try:
            call()
        except KeyboardInterrupt as error:
            return error
        raise AssertionError("the call was not interrupted")
"""


def run(program):
    program = textwrap.dedent(PROLOGUE) + textwrap.dedent(program)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@contextlib.contextmanager
def silent_server(kind, folder):
    """The address of a program that accepts connections and never answers."""
    if kind == "tcp":
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    else:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"{folder}/silent.sock")
        listener.listen()
        address = f"shm://{folder}/silent.sock"
    with listener:
        yield address


@pytest.fixture(scope="module", params=["shm", "tcp", "cluster"])
def started(request, tmp_path_factory):
    """An address, and the processes of its servers."""
    tmp_path = tmp_path_factory.mktemp("servers")
    if request.param == "cluster":
        addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        processes = start_cluster(tmp_path, addresses)
        address = ",".join(addresses)
    else:
        shm, tcp = f"shm://{tmp_path}/kv.sock", f"tcp://127.0.0.1:{free_port()}"
        address = shm if request.param == "shm" else tcp
        processes = [start_server(address)]
    yield address, processes
    for process in processes:
        stop(process)


@pytest.fixture
def servers(started):
    """The same. A test may stop the processes: they go on after it."""
    yield started
    for process in started[1]:
        process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_connecting(kind, tmp_path):
    with silent_server(kind, tmp_path) as address:
        program = f"""
            connect = lambda: farside.Client({address!r}, connect_timeout=DAY)
            print(type(interrupted(connect).__cause__).__name__)
        """
        assert run(program) == ["UnreachableError"]


def test_connecting_to_nothing():
    program = f"""
        connect = lambda: farside.Client("tcp://127.0.0.1:{free_port()}", connect_timeout=DAY)
        print(type(interrupted(connect).__cause__).__name__)
    """
    assert run(program) == ["UnreachableError"]


def test_operations_of_a_stopped_server(servers):
    address, processes = servers
    pids = [process.pid for process in processes]
    program = f"""
        client = farside.Client({address!r}, connect_timeout=DAY)
        client.put_many({{f"key:{{n}}": "before" for n in range(20)}})
        servers = {pids!r}
        stop_servers(*servers)
        # On shared memory only what needs memory of the server waits for it.
        is_shared = {address!r}.startswith("shm:")
        long = bytes(10_000_000)
        calls = [
            lambda: client.put("key:1", long if is_shared else "after"),
            lambda: client.put_many({{f"key:{{n}}": long for n in range(2)}}),
        ]
        if not is_shared:
            calls += [
                lambda: client.get("key:1"),
                lambda: client.get_many(["key:1", "key:2"]),
                lambda: list(client.scan()),
                lambda: client.increment("number"),
            ]
        for call in calls:
            cause = interrupted(call).__cause__
            assert isinstance(cause, farside.Error), cause
            print(cause.is_indeterminate)
        for server in servers:
            os.kill(server, signal.SIGCONT)
        assert client.get("key:3") is not None
        client.put("key:1", "later")
        assert client.get("key:1") == b"later"
    """
    printed = run(program)
    if address.startswith("shm:"):
        assert printed == ["False", "False"]
    else:
        # The first PUT was on its way. Afterwards there is no connection.
        assert printed[0] == "True" and len(printed) == 6


def test_a_handler_that_does_not_raise_runs_during_the_call(servers):
    """The handler lets the server go on: otherwise the call would not end."""
    address, processes = servers
    program = f"""
        client = farside.Client({address!r}, connect_timeout=DAY)
        client.put("key", "value")
        servers = {[process.pid for process in processes]!r}

        def handler(number, frame):
            for server in servers:
                os.kill(server, signal.SIGCONT)

        signal.signal(signal.SIGUSR1, handler)
        stop_servers(*servers)
        interrupt_later(signal.SIGUSR1)
        client.put("key", bytes(10_000_000))
        print(len(client.get("key")))
    """
    assert run(program) == ["10000000"]


def test_a_call_that_the_handler_makes_does_not_wait(servers):
    """It could wait for the call that it interrupts, for ever."""
    address, processes = servers
    if address.startswith("shm:"):
        pytest.skip("reads do not wait for the server on shared memory")
    program = f"""
        client = farside.Client({address!r}, connect_timeout=DAY)
        client.put("key", "value")
        servers = {[process.pid for process in processes]!r}

        def handler(number, frame):
            try:
                client.get("key")
            except farside.Error as error:
                print(error.is_indeterminate)
            raise KeyboardInterrupt

        signal.signal(signal.SIGUSR1, handler)
        stop_servers(*servers)
        interrupted(lambda: client.get("key"), signal.SIGUSR1)
    """
    assert run(program) == ["False"]


@pytest.mark.parametrize("started", ["tcp"], indirect=True)
@pytest.mark.parametrize("what", ["connect", "get", "put", "ttl"])
def test_tasks(started, servers, what):
    """asyncio ends its main task at Ctrl-C, and waits for the threads of its executor."""
    address, [process] = servers
    program = f"""
        async def work():
            client = aio.Client({address!r}, connect_timeout=DAY)
            if {what!r} != "connect":
                await client.connect()
                await client.put("key", "value")
            stop_servers({process.pid})
            # Only now, so that what is interrupted is the call.
            interrupt_later()
            calls = {{
                "connect": client.connect,
                "get": lambda: client.get("key"),
                "put": lambda: client.put("key", "other"),
                "ttl": lambda: client.ttl("key"),
            }}
            await calls[{what!r}]()

        try:
            asyncio.run(work())
        except KeyboardInterrupt:
            print("ended")
    """
    assert run(program) == ["ended"]
