"""What programs do with redis-py, blocking and with asyncio, at a port of this host."""

import asyncio
import sys

import redis
import redis.asyncio

port = int(sys.argv[1])


def blocking(protocol):
    client = redis.Redis(port=port, protocol=protocol, decode_responses=True)
    client.flushdb()
    assert client.ping()
    assert client.set("greeting", "hello", ex=100) and client.get("greeting") == "hello"
    assert 0 < client.ttl("greeting") <= 100
    assert client.set("greeting", "again", nx=True) is None
    assert client.set("greeting", "again", get=True, keepttl=True) == "hello"
    assert client.incrby("count", 5) == 5 and client.decr("count") == 4
    assert client.append("greeting", "!") == 6 and client.getrange("greeting", 0, 4) == "again"
    assert client.mset({"a": "1", "b": "2"})
    assert client.mget("a", "none", "b") == ["1", None, "2"]
    assert sorted(client.scan_iter("[ab]")) == ["a", "b"] and client.dbsize() == 4
    assert client.delete("a", "b", "none") == 2 and client.exists("a") == 0
    with client.pipeline(transaction=False) as pipeline:
        for number in range(100):
            pipeline.set(f"key-{number}", number)
            pipeline.get(f"key-{number}")
        replies = pipeline.execute()
    assert replies[::2] == [True] * 100
    assert replies[1::2] == [str(number) for number in range(100)]
    with client.pipeline() as transaction:
        transaction.set("in-transaction", 1).incr("in-transaction")
        try:
            transaction.execute()
            raise AssertionError("a transaction was executed")
        except redis.ResponseError as error:
            assert "no transactions" in str(error), error
    assert client.get("in-transaction") is None
    try:
        client.incr("greeting")
        raise AssertionError("a word was incremented")
    except redis.ResponseError as error:
        assert "not an integer" in str(error)
    assert client.info()["redis_mode"] == "standalone"
    assert client.client_setname("me") and client.client_getname() == "me"
    binary = redis.Redis(port=port, protocol=protocol)
    every_byte = bytes(range(256))
    assert binary.set(every_byte, every_byte) and binary.getdel(every_byte) == every_byte
    client.close()
    binary.close()


async def concurrent(protocol):
    client = redis.asyncio.Redis(port=port, protocol=protocol, decode_responses=True)
    numbers = range(50)
    await asyncio.gather(*(client.set(f"task-{number}", number) for number in numbers))
    values = await asyncio.gather(*(client.get(f"task-{number}") for number in numbers))
    assert values == [str(number) for number in numbers]
    async with client.pipeline(transaction=False) as pipeline:
        replies = await pipeline.set("n", 1).incr("n").getex("n", ex=50).execute()
    assert replies == [True, 2, "2"]
    found = [key async for key in client.scan_iter("task-*")]
    assert len(found) == len(set(found)) == 50
    await client.aclose()


for protocol in (2, 3):
    blocking(protocol)
    asyncio.run(concurrent(protocol))
print("redis-py", redis.__version__)
