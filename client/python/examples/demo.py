"""What `make demo-python` runs: the client in a minute."""

import asyncio
import sys
import time

import farside
from farside import aio

server = sys.argv[1]
client = farside.Client(server)
print(client)

print("\n# Values are bytes, keys are texts or bytes")
client.put("greeting", "hello")
print("greeting:", client.get("greeting"), " an absent key:", client.get("absent"))

print("\n# Conditions, counters, and values that expire")
print("insert an absent key, and again:", client.insert("owner", "1"), client.insert("owner", "2"))
print("replace 1 by 3:", bool(client.compare_exchange("owner", "1", "3")))
print("increment twice:", client.increment("visits"), client.increment("visits"))
client.put("session:42", "alice", ttl=15 * 60)
print(f"session:42 expires in {client.ttl('session:42'):.0f} s")

print("\n# Many keys at once")
client.put_many({f"user:{number}": f"name {number}" for number in range(1000)})
print("two of them, and an absent one:", client.get_many(["user:1", "user:2", "user:1000"]))
print("a scan finds", sum(1 for _ in client.scan("user:")), "users")

print("\n# A value goes straight into your memory, here 16 MiB of it")
block = bytearray(16 << 20)
client.put("block", block)
client.get_into("block", block)
started = time.perf_counter()
client.get_into("block", block)
print(f"{len(block) / (time.perf_counter() - started) / 1e9:.1f} GB/s")

print("\n# A short GET, one after the other")
started = time.perf_counter()
for _ in range(100_000):
    client.get("greeting")
print(f"{(time.perf_counter() - started) * 1e9 / 100_000:.0f} ns each")


async def tasks():
    async with aio.Client(server) as client:
        await asyncio.gather(*(client.increment(f"count:{n % 10}") for n in range(1000)))
        return await client.get_many([f"count:{n}" for n in range(10)])


print("\n# asyncio, with 1000 tasks in flight")
print("ten counters, of which each was incremented 100 times:", asyncio.run(tasks()))
client.close()
