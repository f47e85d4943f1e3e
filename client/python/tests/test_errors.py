"""Exceptions: their classes, and the library's texts."""

import os
import subprocess
import sys
import textwrap

import farside
import pytest
from conftest import LIMIT, free_port, start_server, stop


def test_every_exception_is_an_error():
    names = [name for name in farside.__all__ if name.endswith("Error")]
    assert len(names) >= 20
    for name in names:
        assert issubclass(getattr(farside, name), farside.Error)
    assert issubclass(farside.ConnectError, ConnectionError)
    assert issubclass(farside.KeyLengthError, ValueError)


@pytest.mark.one_fabric
def test_errors_of_operations(client):
    longest = client.limits()
    with pytest.raises(farside.KeyLengthError, match="the key is empty"):
        client.get("")
    with pytest.raises(farside.KeyLengthError, match="this region allows at most"):
        client.put("k" * (longest["key_bytes_max"] + 1), "value")
    with pytest.raises(farside.ValueTooLongError, match="this region allows at most"):
        client.put("key", bytes(longest["value_bytes_max"] + 1))
    with pytest.raises(farside.KeyLengthError):
        client.get_many(["key", ""])
    client.put("text", "hello")
    with pytest.raises(farside.NotANumberError, match="not a decimal integer"):
        client.increment("text")
    client.increment("number", 2**63 - 1)
    with pytest.raises(farside.NumberOverflowError) as caught:
        client.increment("number")
    assert isinstance(caught.value, OverflowError)
    assert not caught.value.is_retryable and not caught.value.is_indeterminate
    with pytest.raises(farside.ExpiryError, match="10889"):
        client.put("key", "value", ttl=1e12)
    with pytest.raises(OverflowError):
        client.increment("number", 2**63)


def test_a_full_server(folder):
    address = f"shm://{folder}/small.sock"
    process = start_server(address, memory="16MiB")
    try:
        with farside.Client(address) as client:
            with pytest.raises(farside.OutOfSpaceError, match="delete keys"):
                for number in range(100):
                    client.put(f"key:{number}", bytes(500_000))
    finally:
        stop(process)


def test_errors_of_connections(folder):
    with pytest.raises(farside.AddressError):
        farside.Client("nowhere")
    with pytest.raises(farside.AddressError, match="write tcp://localhost:7400$"):
        farside.Client("localhost:7400")
    with pytest.raises(farside.SettingsError, match="pipeline_depth = 0"):
        farside.Client(f"shm://{folder}/absent.sock", pipeline_depth=0)
    with pytest.raises(farside.UnreachableError) as caught:
        farside.Client(f"tcp://127.0.0.1:{free_port()}", connect_timeout=0.1)
    assert caught.value.is_retryable and isinstance(caught.value, ConnectionError)


@pytest.mark.parametrize("variable", [None, ""])
def test_a_client_without_an_address(variable, monkeypatch):
    monkeypatch.delenv("FARSIDE_SERVER", raising=False)
    if variable is not None:
        monkeypatch.setenv("FARSIDE_SERVER", variable)
    for make in (farside.Client, farside.lmcache.Connector):
        with pytest.raises(farside.AddressError, match="^which server\\? Pass .* FARSIDE_SERVER$"):
            make()


def test_secrets(folder):
    address, secret = f"shm://{folder}/secret.sock", folder / "secret.toml"
    secret.write_text('secret = "sesame, open the door"\n')
    secret.chmod(0o600)
    process = start_server(address, "--config", str(secret))
    try:
        with pytest.raises(farside.RefusedError, match="wrong secret"):
            farside.Client(address)
        with farside.Client(address, secret="sesame, open the door") as client:
            client.put("key", "value")
    finally:
        stop(process)


def test_rdma_needs_a_build_with_it():
    with pytest.raises(farside.Error, match="built without|RDMA|rdma"):
        farside.Client("rdma://127.0.0.1:7400", connect_timeout=0.2)


def test_a_child_of_a_fork_is_refused(client, server):
    client.put("key", "value")
    scan, buffer = client.scan(), client.buffer(100)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            refused = 0
            for call in (
                lambda: client.get("key"),
                lambda: client.put("key", "other"),
                lambda: client.close(),
                lambda: next(scan),
                lambda: client.closed,
                lambda: memoryview(buffer),
            ):
                try:
                    call()
                except farside.ForkError as error:
                    refused += "after the fork" in str(error)
            with farside.Client(server) as own:
                code = 0 if refused == 6 and own.get("key") == b"value" else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert client.get("key") == b"value"


def test_a_child_ends_in_peace(server):
    """A child that forked with clients of all kinds runs to its end, with all destructors."""
    program = f"""
        import asyncio, os, farside
        from farside import aio, lmcache
        client = farside.Client({server!r})
        client.put("key", "value")
        scan, buffer = client.scan(), client.buffer(100)
        connector = lmcache.Connector({server!r})
        tasks = aio.Client({server!r})

        async def main():
            await tasks.connect()
            await tasks.put("other", "value")
            child = os.fork()
            if child == 0:
                # The loop is the parent's, too: the child must not end it.
                try:
                    await tasks.get("key")
                except farside.ForkError:
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            assert await tasks.get("other") == b"value"

        asyncio.run(main())
        child = os.fork()
        if child == 0:
            try:
                connector.drain_completions()
            except farside.ForkError:
                print("child", flush=True)
            del client, scan, buffer, connector
        else:
            assert os.waitpid(child, 0)[1] == 0
            assert client.get("key") == b"value"
            print("parent")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout.split()) == (0, ["child", "parent"]), done.stderr


def test_a_subinterpreter_ends_with_the_process(server):
    """Objects of it are dropped while the main interpreter is ending."""
    pytest.importorskip("_xxsubinterpreters", reason="this Python has no such module")
    if sys.version_info >= (3, 12):
        pytest.skip("subinterpreters have an own GIL, which pyo3 refuses")
    inner = f"""
        import farside
        from farside import lmcache
        client = farside.Client({server!r})
        client.put("key", "value")
        scan, buffer = client.scan(), client.buffer(100)
        next(scan)
        connector = lmcache.Connector({server!r})
        connector.submit_batch_set(["block"], [b"hello"])
    """
    program = f"""
        import _xxsubinterpreters as interpreters
        interpreter = interpreters.create()
        interpreters.run_string(interpreter, {textwrap.dedent(inner)!r})
        print("ends", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout.split()) == (0, ["ends"]), done.stderr


def test_multiprocessing_works_with_a_client_in_each_process(server, tmp_path):
    program = f"""
        import multiprocessing, farside

        def work(number):
            with farside.Client({server!r}) as client:
                return client.increment("processes")

        if __name__ == "__main__":
            client = farside.Client({server!r})
            client.delete("processes")
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(3) as pool:
                    pool.map(work, range(10))
            print(client.increment("processes", 0))
    """
    # A file, because a process that is spawned imports it.
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout.strip()) == (0, "20"), done.stderr
