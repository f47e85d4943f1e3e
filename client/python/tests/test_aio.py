"""The client for asyncio."""

import asyncio

import farside
import pytest
from conftest import LIMIT
from farside import aio


def run(server, program):
    async def main():
        async with aio.Client(server, connect_timeout=LIMIT) as client:
            return await program(client)

    return asyncio.run(main())


def test_every_operation(client, server):
    async def program(tasks):
        await tasks.put("key", "value")
        assert await tasks.get("key") == b"value"
        found = await tasks.get_versioned("key")
        assert found.data == b"value" and found.version == await tasks.version("key")
        assert await tasks.exists("key") and not await tasks.exists("absent")
        assert await tasks.get("absent") is None
        await tasks.put_many({"a": "1", "b": bytearray(b"2")}, ttl=3600)
        assert await tasks.get_many(["a", "absent", b"b"]) == [b"1", None, b"2"]
        assert 0 < await tasks.ttl("a") < 3601
        assert await tasks.persist("a") and await tasks.touch("a", 3600)
        assert await tasks.delete_many(["a", "b", "c"]) == 2
        assert await tasks.insert("new", "1", ttl=3600) and not await tasks.insert("new", "2")
        assert await tasks.update("new", "3") and not await tasks.update("absent", "3")
        assert await tasks.store("new", "4", if_value="3")
        failed = await tasks.compare_exchange("new", "3", "5")
        assert not failed and failed.value == b"4"
        assert await tasks.compare_exchange("newer", None, "1")
        assert not await tasks.compare_exchange("newer", None, "1")
        version = await tasks.version("new")
        assert await tasks.compare_exchange_version("new", version, "6")
        assert not await tasks.delete_if_version("new", version)
        assert await tasks.increment("visits") == 1
        assert await tasks.increment("visits", 4) == 5
        assert await tasks.append("log", "one,") == 4
        assert await tasks.take("log") == b"one,"
        assert await tasks.delete("key") and not await tasks.delete("key")
        assert {key async for key, _ in tasks.scan("vis")} == {b"visits"}
        with pytest.raises(farside.KeyLengthError, match="the key is empty"):
            await tasks.get("")
        with pytest.raises(farside.KeyLengthError):
            await tasks.get_many(["a", ""])
        with pytest.raises(ValueError, match="one condition"):
            await tasks.store("key", "1", if_absent=True, if_present=True)

    run(server, program)


def test_many_tasks_at_once(client, server):
    async def program(tasks):
        async def work(number):
            for round in range(20):
                await tasks.put(f"key:{number}", f"{number} {round}")
                assert await tasks.get(f"key:{number}") == f"{number} {round}".encode()
                await tasks.increment(f"visits:{number % 50}")

        await asyncio.gather(*(work(number) for number in range(200)))
        return sum(int(value) for value in await tasks.get_many([f"visits:{n}" for n in range(50)]))

    assert run(server, program) == 200 * 20


def test_long_values(client, server):
    value = bytes(range(256)) * 40_000

    async def program(tasks):
        await asyncio.gather(*(tasks.put(f"long:{number}", value) for number in range(4)))
        values = await tasks.get_many([f"long:{number}" for number in range(4)])
        assert values == [value] * 4

    run(server, program)


def test_cancelled_tasks_leave_the_others_alone(client, server):
    async def program(tasks):
        started = [asyncio.ensure_future(tasks.put(f"key:{n}", "value")) for n in range(100)]
        await asyncio.sleep(0)
        for task in started[::2]:
            task.cancel()
        done = await asyncio.gather(*started, return_exceptions=True)
        assert all(result is None for result in done[1::2])
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.gather(*(tasks.get(f"key:{n}") for n in range(100)))
                await asyncio.sleep(60)
        assert await tasks.get("key:1") == b"value"

    run(server, program)


def test_other_tasks_have_their_turn(client, server):
    """A task that only reads cached values lets others run."""

    async def program(tasks):
        await tasks.put("key", "value")
        turns = 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        for _ in range(2000):
            await tasks.get("key")
        task.cancel()
        return turns

    assert run(server, program) > 5


def test_a_closed_client(server):
    async def main():
        client = aio.Client(server)
        with pytest.raises(farside.ClosedError, match="async with"):
            await client.get("key")
        with pytest.raises(farside.ClosedError, match="async with"):
            await client.ttl("key")
        await asyncio.gather(client.connect(), client.connect())
        started = [asyncio.ensure_future(client.put(f"key:{n}", "value")) for n in range(100)]
        await asyncio.sleep(0)
        await client.close()
        await client.close()
        done = await asyncio.gather(*started, return_exceptions=True)
        closed = [result for result in done if result is not None]
        assert all(isinstance(error, farside.ClosedError) for error in closed)
        assert all(error.is_indeterminate for error in closed)
        with pytest.raises(farside.ClosedError):
            await client.get("key")

    asyncio.run(main())


@pytest.mark.one_fabric
def test_another_loop_is_refused_before_anything_is_sent(client, server):
    tasks = aio.Client(server)

    async def begin():
        await tasks.connect()
        await tasks.put("key", "value")

    async def other_loop():
        for operation in [
            lambda: tasks.put("key", "other"),
            lambda: tasks.put_many({"key": "other"}),
            lambda: tasks.increment("visits"),
            lambda: tasks.delete_many(["key"]),
            lambda: tasks.get("key"),
            lambda: tasks.ttl("key"),
            lambda: tasks.scan().__anext__(),
            lambda: tasks.close(),
            lambda: tasks.connect(),
        ]:
            with pytest.raises(farside.LoopError, match="another event loop") as caught:
                await operation()
            assert isinstance(caught.value, RuntimeError)

    with asyncio.Runner() as first:
        first.run(begin())
        with asyncio.Runner() as second:
            second.run(other_loop())
        assert client.get("key") == b"value" and not client.exists("visits")
        assert first.run(tasks.get("key")) == b"value"


def test_a_client_outlives_its_loop(server):
    """After the end of a loop another one may close the client, or connect it again."""
    tasks = aio.Client(server)

    async def begin():
        await tasks.connect()
        asyncio.ensure_future(tasks.put("key", "value"))
        await asyncio.sleep(0)

    async def again():
        with pytest.raises(farside.LoopError):
            await tasks.get("key")
        await tasks.connect()
        await tasks.put("key", "again")
        return await tasks.get("key")

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    assert asyncio.run(again()) == b"again"
    asyncio.run(tasks.close())
    with pytest.raises(farside.ClosedError):
        asyncio.run(tasks.get("key"))


def test_a_server_that_is_not_there():
    async def main():
        async with aio.Client("tcp://127.0.0.1:1", connect_timeout=0.1):
            pass

    with pytest.raises(farside.UnreachableError):
        asyncio.run(main())
