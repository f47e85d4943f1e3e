"""A cache that the worker processes of a service share.

    python shared_cache.py shm:///run/farside/kv.sock

Each process makes a client of its own, after the fork. The cache outlives all of them.
"""

import multiprocessing
import sys
import time

import farside

client = None


def start_worker(server):
    """Runs once in each process."""
    global client
    client = farside.Client(server)


def slow_square(number):
    time.sleep(0.01)
    return number * number


def cached_square(number):
    key = f"square:{number}"
    found = client.get(key)
    if found is not None:
        client.increment("hits")
        return int(found)
    result = slow_square(number)
    client.put(key, str(result), ttl=60)
    return result


def main():
    server = sys.argv[1]
    with multiprocessing.Pool(4, start_worker, [server]) as pool:
        results = pool.map(cached_square, [number % 50 for number in range(1000)])
    assert results[51] == 1
    with farside.Client(server) as own:
        print(f"1000 calls, {own.increment('hits', 0)} answered by the cache")


if __name__ == "__main__":
    main()
