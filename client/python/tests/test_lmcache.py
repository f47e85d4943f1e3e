"""The connector of LMCache, called as LMCache's `NativeConnectorL2Adapter` does."""

import ctypes
import select

import pytest
from conftest import LIMIT
from farside import lmcache

MIB = 1 << 20


#: The owners of memory: a view of `memory` does not keep it.
OWNERS = []


@pytest.fixture(autouse=True)
def owners():
    yield
    OWNERS.clear()


def memory(bytes, fill=0):
    """A view as LMCache passes it: of ctypes, which keeps no reference to its memory's owner."""
    owner = (ctypes.c_ubyte * bytes).from_buffer_copy(bytearray([fill]) * bytes)
    OWNERS.append(owner)
    return memoryview((ctypes.c_ubyte * bytes).from_address(ctypes.addressof(owner)))


@pytest.fixture
def connector(client, server):
    connector = lmcache.Connector(server=server, num_workers=3)
    yield connector
    connector.close()


def wait(connector, *ids):
    """Returns the completions of these batches, by their numbers."""
    poller = select.poll()
    poller.register(connector.event_fd(), select.POLLIN)
    done = {}
    while not done.keys() >= set(ids):
        assert poller.poll(LIMIT * 1000), f"{set(ids) - done.keys()} are not complete"
        for id, *completion in connector.drain_completions():
            assert id not in done
            done[id] = completion
    return [done[id] for id in ids]


@pytest.mark.parametrize("length", [1, 4096, MIB])
def test_batches(connector, length):
    keys = [f"model@{number:08x}@0@{number:x}" for number in range(10)]
    stored = [memory(length, number) for number in range(10)]
    assert wait(connector, connector.submit_batch_set(keys, stored)) == [[True, "", None]]
    asked = [*keys, "absent"]
    [found] = wait(connector, connector.submit_batch_exists(asked))
    assert found == [True, "", [True] * 10 + [False]]
    targets = [memory(length, 255) for _ in asked]
    [read] = wait(connector, connector.submit_batch_get(asked, targets))
    assert read == [True, "", [True] * 10 + [False]]
    assert all(bytes(t) == bytes(s) for t, s in zip(targets, stored))
    [deleted] = wait(connector, connector.submit_batch_delete([keys[0], "absent"]))
    assert deleted == [True, "", [True, True]]
    assert wait(connector, connector.submit_batch_exists(keys[:2])) == [[True, "", [False, True]]]


def test_many_batches_at_once(connector):
    sources = [memory(MIB // 4, number) for number in range(40)]
    keys = [f"key:{number}" for number in range(40)]
    ids = [connector.submit_batch_set(keys[n : n + 4], sources[n : n + 4]) for n in range(0, 40, 4)]
    assert len(set(ids)) == 10 and all(ok for ok, _, _ in wait(connector, *ids))
    targets = [memory(MIB // 4) for _ in keys]
    ids = [connector.submit_batch_get(keys[n : n + 4], targets[n : n + 4]) for n in range(0, 40, 4)]
    assert all(completion == [True, "", [True] * 4] for completion in wait(connector, *ids))
    # As bytes, because views of ctypes are compared slowly.
    assert [bytes(target) for target in targets] == [bytes(source) for source in sources]


def test_values_of_other_lengths_are_not_found(connector):
    keys, stored = ["short", "right", "long"], [memory(bytes) for bytes in (5000, 6000, 7000)]
    wait(connector, connector.submit_batch_set(keys, stored))
    targets = [memory(6000) for _ in keys]
    [(ok, error, found)] = wait(connector, connector.submit_batch_get(keys, targets))
    assert (ok, found) == (False, [False, True, False]) and "7000 bytes long" in error


@pytest.mark.one_fabric
def test_errors_and_empty_batches(connector):
    [(ok, error, found)] = wait(connector, connector.submit_batch_exists(["key", ""]))
    assert (ok, found) == (False, [False, False]) and "the key is empty" in error
    [(ok, error, none)] = wait(connector, connector.submit_batch_set([""], [memory(5)]))
    assert (ok, none) == (False, None) and "the key is empty" in error
    ids = [connector.submit_batch_get([], []), connector.submit_batch_exists([])]
    assert wait(connector, *ids) == [[True, "", []]] * 2
    with pytest.raises(ValueError, match="as many buffers as keys"):
        connector.submit_batch_get(["key"], [])
    with pytest.raises(BufferError, match="read-only"):
        connector.submit_batch_get(["key"], [b"12"])


@pytest.mark.one_fabric
def test_values_expire(server, client):
    connector = lmcache.Connector(server=server, ttl=3600)
    wait(connector, connector.submit_batch_set(["key"], [memory(5000)]))
    assert 0 < client.ttl("key") < 3601
    connector.close()
    connector.close()
    with pytest.raises(ValueError, match="closed"):
        connector.submit_batch_exists(["key"])


def test_a_connector_can_close_with_work_left(server):
    connector = lmcache.Connector(server=server, num_workers=1)
    for number in range(50):
        connector.submit_batch_set([f"key:{number}"], [memory(MIB)])
    connector.close()
    assert connector.drain_completions() == []


@pytest.mark.one_fabric
def test_buffers_that_overlap_are_refused(connector):
    whole = memory(100)
    with pytest.raises(ValueError, match="share memory"):
        connector.submit_batch_get(["one", "two"], [whole[:60], whole[50:]])


@pytest.mark.one_fabric
def test_settings(server):
    with pytest.raises(ValueError, match="num_workers = 0"):
        lmcache.Connector(server=server, num_workers=0)
    with pytest.raises(ValueError, match="ttl = 0"):
        lmcache.Connector(server=server, ttl=0)
    with pytest.raises(TypeError, match="no setting colour"):
        lmcache.Connector(server=server, colour="red")
