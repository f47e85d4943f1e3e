"""Every method of the client, over shared memory and TCP."""

import datetime
import math
import pickle
import threading

import farside
import pytest
from conftest import LIMIT, wait_until


def test_values_are_bytes_and_keys_are_texts_or_bytes(client):
    client.put("key", "text")
    assert client.get("key") == b"text"
    assert client.get(b"key") == b"text"
    client.put(b"\x00\xff", b"")
    assert client.get(b"\x00\xff") == b""
    assert client.get("absent") is None
    client.put("\u00fc", "\u00e4")
    assert client.get("\u00fc".encode()) == "\u00e4".encode()


@pytest.mark.parametrize("bytes", [0, 1, 63, 64, 4095, 4096, 70_000, 1 << 20, 9 << 20])
def test_values_of_all_lengths(client, bytes):
    value = (b"0123456789abcdef" * (bytes // 16 + 1))[:bytes]
    client.put("key", value)
    assert client.get("key") == value
    assert client.get("key") == value
    assert client.get_versioned("key").data == value
    assert client.get_many(["key", "absent"]) == [value, None]
    assert client.get_range("key", bytes // 2, bytes) == value[bytes // 2 :]


@pytest.mark.one_fabric
@pytest.mark.parametrize("key", [1, None, bytearray(b"key"), ["key"]])
def test_other_keys_are_refused(client, key):
    with pytest.raises(TypeError, match="a key is a str or bytes, not"):
        client.get(key)


@pytest.mark.one_fabric
def test_one_key_is_no_list(client):
    for call in (client.get_many, client.delete_many):
        with pytest.raises(TypeError, match="a list of keys"):
            call("key")


def test_many(client):
    entries = {f"key:{number}": f"value {number}" for number in range(1000)}
    client.put_many(entries)
    values = client.get_many(list(entries))
    assert values == [value.encode() for value in entries.values()]
    assert client.get_many(iter(entries)) == values
    assert client.get_many([]) == []
    assert client.get_many(["key:1", "absent", b"key:2"]) == [b"value 1", None, b"value 2"]
    assert client.delete_many([*entries, "absent"]) == 1000
    client.put_many([("a", b"1"), ("b", bytearray(b"2"))], ttl=3600)
    assert 0 < client.ttl("a") <= 3600
    assert client.get_many(["a", "b"]) == [b"1", b"2"]
    with pytest.raises(TypeError, match="tuples of a key and a value"):
        client.put_many(["ab"])


def test_conditions(client):
    assert client.insert("key", "1")
    assert not client.insert("key", "2")
    assert client.update("key", "2")
    assert not client.update("absent", "2")
    assert client.get_or_insert("key", "3") == b"2"
    assert client.get_or_insert("other", "3") == b"3"
    outcome = client.compare_exchange("key", "1", "4")
    assert not outcome and not outcome.applied and outcome.value == b"2"
    assert client.compare_exchange("key", b"2", "4")
    assert client.compare_exchange("new", None, "1")
    assert not client.compare_exchange("new", None, "2")
    found = client.get_versioned("key")
    assert found.version == client.version("key") and bytes(found) == b"4"
    assert client.compare_exchange_version("key", found.version, "5")
    assert not client.compare_exchange_version("key", found.version, "6")
    assert not client.delete_if_version("key", found.version)
    assert client.delete_if_version("key", client.version("key"))
    assert client.version("key") is None


def test_store(client):
    assert client.store("key", "1", if_absent=True).version == client.version("key")
    assert not client.store("key", "2", if_absent=True)
    assert client.store("key", "2", if_value="1")
    assert client.store("key", "3", if_present=True, returning=True).value == b"2"
    assert client.store("key", "4", if_version=client.version("key"), ttl=3600, pinned=True)
    assert client.store("key", "5", keep_ttl=True)
    assert client.ttl("key") < 3601
    with pytest.raises(ValueError, match="one condition"):
        client.store("key", "1", if_absent=True, if_value="1")
    with pytest.raises(ValueError, match="either ttl or keep_ttl"):
        client.put("key", "1", ttl=1, keep_ttl=True)


def test_times(client):
    client.put("key", "value", ttl=0.05)
    wait_until(lambda: not client.exists("key"))
    assert client.get("key") is None and client.ttl("key") is None
    client.put("key", "value")
    assert client.ttl("key") == math.inf
    assert client.touch("key", datetime.timedelta(minutes=60))
    assert 0 < client.ttl("key") < 3601
    client.put("key", "value", ttl=datetime.timedelta(hours=10))
    assert 35_000 < client.ttl("key") < 36_001
    assert client.persist("key") and client.ttl("key") == math.inf
    assert not client.touch("absent", 1) and not client.persist("absent")
    for wrong in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="not negative"):
            client.put("key", "value", ttl=wrong)
    with pytest.raises(TypeError):
        client.put("key", "value", ttl="60")


def test_numbers_and_appends(client):
    assert client.increment("number") == 1
    assert client.increment("number", -11) == -10
    assert client.get("number") == b"-10"
    assert client.append("log", "one,") == 4
    assert client.append("log", bytearray(b"two,")) == 8
    assert client.take("log") == b"one,two," and client.take("log") is None


def test_scan(client):
    entries = {f"user:{number}": str(number) for number in range(500)}
    client.put_many(entries)
    client.put("order:1", "tea")
    found = dict(client.scan("user:"))
    assert found == {key.encode(): value.encode() for key, value in entries.items()}
    assert len(list(client.scan())) == 501
    half_read = client.scan()
    next(half_read)
    del half_read
    assert client.delete_prefix(b"user:") == 500
    assert list(client.scan()) == [(b"order:1", b"tea")]


def test_threads_share_a_client(client):
    def work(number):
        for round in range(200):
            client.increment("visits")
            client.put(f"key:{number}", str(round))
            assert client.get(f"key:{number}") == str(round).encode()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.increment("visits", 0) == 8 * 200


def test_a_client_closes(server):
    client = farside.Client(server)
    client.put("key", "value")
    assert "farside" in repr(client) and not client.closed
    client.close()
    client.close()
    assert client.closed and repr(client) == "<farside.Client, closed>"
    with pytest.raises(farside.ClosedError, match="the client is closed"):
        client.get("key")


@pytest.mark.one_fabric
def test_a_client_has_limits_and_no_pickle(client):
    assert client.limits()["key_bytes_max"] >= 255
    with pytest.raises(TypeError, match="in each process"):
        pickle.dumps(client)


def test_settings(server):
    settings = {"role": "reader", "cache_bytes": 1 << 20, "pipeline_depth": 8}
    limit = datetime.timedelta(seconds=LIMIT)
    with farside.Client(server, **settings, connect_timeout=limit) as reader:
        assert reader.get("absent") is None
        with pytest.raises(farside.DeniedError, match="reader"):
            reader.put("key", "value")
    with pytest.raises(TypeError, match="no setting colour"):
        farside.Client(server, colour="red")
    with pytest.raises(ValueError, match='write "reader" or "writer"'):
        farside.Client(server, role="king")


def test_the_environment_names_the_server(server, monkeypatch):
    monkeypatch.setenv("FARSIDE_SERVER", server)
    with farside.Client() as client:
        client.put("key", "value")
