"""What type checkers accept and refuse: `mypy --strict` runs on it."""

import asyncio
import datetime

import farside
from farside import aio, lmcache


def calls(client: farside.Client) -> bytes | None:
    client.put("key", bytearray(4), ttl=datetime.timedelta(seconds=1))
    client.put_many({"key": "value"}, ttl=1.5)
    client.put_many([("key", b"value")])
    length: int | None = client.get_into("key", client.buffer(100))
    values: list[bytes | None] = client.get_many(["key", b"key"])
    outcome: farside.Outcome = client.store("key", "value", if_absent=True)
    client.put(1, "value")  # type: ignore[arg-type]
    client.get("key").decode()  # type: ignore[union-attr]
    return values[length or 0] or outcome.value


async def tasks(server: str) -> int:
    async with aio.Client(server, role="writer") as client:
        async for key, _ in client.scan():
            await client.delete(key)
        return await client.increment("visits")


def connect(server: str) -> None:
    with farside.Client(server, secret="sesame", cache_bytes=1 << 20) as client:
        calls(client)
    asyncio.run(tasks(server))
    lmcache.Connector(server, num_workers=4).close()
    error: farside.Error = farside.ForkError("text")
    assert not error.is_retryable
