"""The KV cache of a language model: blocks of 1 MiB, found by the hash of their tokens.

    python kv_cache.py shm:///run/farside/kv.sock

A block's key is the hash of all tokens up to its end. So prompts that begin alike share blocks, in
all processes and hosts that use the server.
"""

import hashlib
import sys

import farside
import numpy

TOKENS_PER_BLOCK = 256
BLOCK_BYTES = 1 << 20


def block_keys(tokens):
    """Returns the keys of the whole blocks of a prompt."""
    digest, keys = hashlib.blake2b(digest_size=16), []
    for start in range(0, len(tokens) - TOKENS_PER_BLOCK + 1, TOKENS_PER_BLOCK):
        digest.update(tokens[start : start + TOKENS_PER_BLOCK].tobytes())
        keys.append(b"block:" + digest.digest())
    return keys


def compute_block(number):
    """Stands for the model, which takes much longer."""
    return numpy.full(BLOCK_BYTES // 2, number, numpy.float16)


def load_or_compute(client, tokens, memory):
    """Fills `memory`, one row for each block, and returns how many blocks were in the cache."""
    keys = block_keys(tokens)
    found = client.get_many_into(keys, memory[: len(keys)])
    hits = next((n for n, bytes in enumerate(found) if bytes != BLOCK_BYTES), len(keys))
    for number in range(hits, len(keys)):
        memory[number] = compute_block(number)
    client.put_many(zip(keys[hits:], memory[hits : len(keys)]), ttl=3600)
    return hits


def main():
    with farside.Client(sys.argv[1]) as client:
        memory = numpy.empty((16, BLOCK_BYTES // 2), numpy.float16)
        prompt = numpy.arange(8 * TOKENS_PER_BLOCK, dtype=numpy.int32)
        print("first prompt:", load_or_compute(client, prompt, memory), "of 8 blocks found")
        other = prompt.copy()
        other[5 * TOKENS_PER_BLOCK] = -1
        print("a prompt that differs after 5 blocks:", load_or_compute(client, other, memory), "found")
        assert (memory[4] == 4).all()


if __name__ == "__main__":
    main()
