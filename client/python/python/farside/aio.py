"""The client for asyncio: many operations in flight in one thread.

>>> import asyncio
>>> from farside import aio
>>> async def main():
...     async with aio.Client(server) as client:
...         await client.put("greeting", "hello")
...         return await client.get("greeting")
>>> asyncio.run(main())
b'hello'
"""

import asyncio
import itertools
from asyncio import isfuture

import farside
from farside._farside import AsyncEngine, Cancellable

__all__ = ["Client"]


class Client:
    """A client for the tasks of one asyncio loop. It takes the arguments of `farside.Client`.

    `async with` connects, and closes. Most methods of `farside.Client` are here as coroutines, with
    the same names and arguments. Operations of different tasks are in flight together. On shared
    memory a GET of a cached location completes at once. A value to store is copied in the loop's
    thread.

    An operation whose task is cancelled goes on, and its result is discarded. So a cancelled PUT
    may take effect or not.

    In the examples `await` stands outside of a function, as in `python -m asyncio`.

    >>> async with aio.Client(server) as client:
    ...     await client.put("greeting", "hello")
    ...     print(await client.get("greeting"))
    b'hello'
    """

    def __init__(self, server=None, **settings):
        self._arguments = (server, settings)
        self._client = None
        self._engine = None
        self._loop = None
        self._changing = asyncio.Lock()

    async def connect(self):
        """Connects, without blocking the loop. Returns the client."""
        loop = asyncio.get_running_loop()
        if self._engine is not None and self._loop is not loop:
            await self.close()
        async with self._changing:
            if self._engine is None:
                server, settings = self._arguments

                def open_engine():
                    client = farside.Client(server, **settings)
                    return client, AsyncEngine(client, loop.create_future)

                self._client, engine = await _run(open_engine)
                loop.add_reader(engine.fileno(), engine.drain)
                self._loop, self._engine = loop, engine
        return self

    async def close(self):
        """Closes the connection. Call it in the loop that connected, unless that is closed.

        Operations that are under way fail with `ClosedError`, and may take effect.
        """
        if self._engine is not None and not self._loop.is_closed():
            self._check_loop()
        async with self._changing:
            engine, self._engine = self._engine, None
            if engine is not None:
                self._loop.remove_reader(engine.fileno())
                try:
                    engine.close()
                except RuntimeError:
                    # No task awaits an operation if the loop is closed.
                    if not self._loop.is_closed():
                        raise
                await _run(self._client.close)

    async def __aenter__(self):
        return await self.connect()

    async def __aexit__(self, *exception):
        await self.close()

    def _open(self):
        if self._engine is None:
            raise farside.ClosedError("the client is not connected: use `async with`")
        self._check_loop()
        return self._engine

    def _check_loop(self):
        """Refuses another loop before an operation is sent. It could not await the result."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            # As in the child of a fork, for which this raises the better error.
            self._engine.fileno()
            raise
        if loop is not self._loop:
            raise farside.LoopError(
                "the client belongs to another event loop: make one in each loop, or close it there"
                " and connect it in this one"
            )

    async def get(self, key, /):
        """Returns the value of a key; `None` if the key is absent.

        >>> await client.put("greeting", "hello")
        >>> await client.get("greeting")
        b'hello'
        """
        result = self._open().get(key)
        return await result if isfuture(result) else result

    async def get_versioned(self, key, /):
        """Returns the value of a key and its version; `None` if the key is absent.

        >>> await client.put("greeting", "hello")
        >>> found = await client.get_versioned("greeting")
        >>> found.data, found.version == await client.version("greeting")
        (b'hello', True)
        """
        result = self._open().get_versioned(key)
        return await result if isfuture(result) else result

    async def get_many(self, keys, /):
        """Returns the values of several keys as a list, with `None` for absent ones.

        >>> await client.put_many({"user:1": "alice", "user:2": "bob"})
        >>> await client.get_many(["user:2", "user:3"])
        [b'bob', None]
        """
        result = self._open().get_many(keys)
        return await result if isfuture(result) else result

    async def exists(self, key, /):
        """Whether the key is present.

        >>> await client.exists("absent")
        False
        """
        result = self._open().exists(key)
        return await result if isfuture(result) else result

    async def version(self, key, /):
        """Returns the version of the key's value; `None` if the key is absent.

        >>> await client.version("absent") is None
        True
        """
        result = self._open().version(key)
        return await result if isfuture(result) else result

    async def put(self, key, value, /, *, ttl=None, keep_ttl=False, pinned=False):
        """Stores a value, whether or not the key is present.

        >>> await client.put("greeting", "hello", ttl=60)
        """
        result = self._open().put(key, value, ttl, keep_ttl, pinned)
        return await result if isfuture(result) else result

    async def put_many(self, entries, /, *, ttl=None):
        """Stores several values, from a mapping or pairs of keys and values.

        >>> await client.put_many({"user:1": "alice", "user:2": "bob"})
        """
        result = self._open().put_many(entries, ttl)
        if isfuture(result):
            await result

    async def store(
        self,
        key,
        value,
        /,
        *,
        if_absent=False,
        if_present=False,
        if_value=None,
        if_version=None,
        ttl=None,
        keep_ttl=False,
        pinned=False,
        returning=False,
    ):
        """Stores a value if the condition holds, and returns an `Outcome`.

        >>> bool(await client.store("owner", "first", if_absent=True, ttl=60))
        True
        """
        conditions = (if_absent, if_present, if_version)
        engine = self._open()
        result = engine.store(key, value, conditions, if_value, ttl, keep_ttl, pinned, returning)
        return await result if isfuture(result) else result

    async def insert(self, key, value, /, *, ttl=None, pinned=False):
        """Stores a value only if the key is absent. Returns whether it did.

        >>> await client.insert("owner", "first"), await client.insert("owner", "second")
        (True, False)
        """
        return bool(await self.store(key, value, if_absent=True, ttl=ttl, pinned=pinned))

    async def update(self, key, value, /, *, ttl=None, keep_ttl=False, pinned=False):
        """Stores a value only if the key is present. Returns whether it did.

        >>> await client.update("absent", "hello")
        False
        """
        lifetime = {"ttl": ttl, "keep_ttl": keep_ttl, "pinned": pinned}
        return bool(await self.store(key, value, if_present=True, **lifetime))

    async def compare_exchange(self, key, expected, new, /):
        """Replaces the value `expected` by `new`, and returns an `Outcome`.

        >>> await client.put("state", "open")
        >>> outcome = await client.compare_exchange("state", "shut", "open")
        >>> outcome.applied, outcome.value
        (False, b'open')
        """
        if expected is None:
            return await self.store(key, new, if_absent=True, returning=True)
        return await self.store(key, new, if_value=expected, returning=True)

    async def compare_exchange_version(self, key, version, new, /):
        """Replaces the value of this version by `new`, and returns an `Outcome`.

        >>> await client.put("state", "open")
        >>> version = await client.version("state")
        >>> bool(await client.compare_exchange_version("state", version, "shut"))
        True
        """
        return await self.store(key, new, if_version=version, returning=True)

    async def increment(self, key, delta=1, /):
        """Adds `delta` to the decimal number in the value, and returns the sum.

        >>> await client.increment("visits"), await client.increment("visits", 10)
        (1, 11)
        """
        result = self._open().increment(key, delta)
        return await result if isfuture(result) else result

    async def append(self, key, value, /):
        """Appends bytes to the value, and returns its new length.

        >>> await client.append("log", "one,")
        4
        """
        result = self._open().append(key, value)
        return await result if isfuture(result) else result

    async def touch(self, key, ttl, /):
        """Has the value expire after `ttl` seconds. Returns false if the key is absent.

        >>> await client.touch("absent", 60)
        False
        """
        result = self._open().touch(key, ttl)
        return await result if isfuture(result) else result

    async def persist(self, key, /):
        """Has the value never expire. Runs in a thread of the loop's executor.

        >>> await client.put("session:42", "alice", ttl=60)
        >>> await client.persist("session:42"), await client.ttl("session:42")
        (True, inf)
        """
        return await self._in_thread("persist", key)

    async def ttl(self, key, /):
        """Returns the seconds until the value expires. Runs in a thread of the loop's executor.

        >>> await client.put("session:42", "alice", ttl=60)
        >>> 0 < await client.ttl("session:42") < 61
        True
        """
        return await self._in_thread("ttl", key)

    async def delete(self, key, /):
        """Removes a key. Returns false if it was absent.

        >>> await client.delete("absent")
        False
        """
        result = self._open().delete(key)
        return await result if isfuture(result) else result

    async def delete_if_version(self, key, version, /):
        """Removes a key only if its value has this version. Returns whether it did.

        >>> await client.put("job", "build")
        >>> await client.delete_if_version("job", await client.version("job"))
        True
        """
        result = self._open().delete_if_version(key, version)
        return await result if isfuture(result) else result

    async def delete_many(self, keys, /):
        """Removes several keys, and returns how many of them were present.

        >>> await client.put("job", "build")
        >>> await client.delete_many(["job", "absent"])
        1
        """
        result = self._open().delete_many(keys)
        return sum(await result if isfuture(result) else result)

    async def take(self, key, /):
        """Removes a key and returns its value; `None` if the key was absent.

        >>> await client.put("job", "build")
        >>> await client.take("job"), await client.get("job")
        (b'build', None)
        """
        result = self._open().take(key)
        return await result if isfuture(result) else result

    async def scan(self, prefix=None, /):
        """Iterates over keys and values, as pairs of `bytes`. Reads in the loop's executor.

        >>> await client.put_many({"user:1": "alice", "user:2": "bob"})
        >>> sorted([entry async for entry in client.scan("user:")])
        [(b'user:1', b'alice'), (b'user:2', b'bob')]
        """
        scan = await self._in_thread("scan", prefix)
        while page := await _run(_page, scan):
            for entry in page:
                yield entry

    async def _in_thread(self, method, *arguments):
        self._open()
        return await _run(getattr(self._client, method), *arguments)


async def _run(function, *arguments):
    """Calls a function in the loop's executor. If the task is cancelled, the call ends early."""
    call = Cancellable()
    try:
        return await asyncio.get_running_loop().run_in_executor(
            None, call.call, function, *arguments
        )
    except asyncio.CancelledError:
        call.cancel()
        raise


def _page(scan):
    """The next entries of a scan; none at its end."""
    return list(itertools.islice(scan, 64))
