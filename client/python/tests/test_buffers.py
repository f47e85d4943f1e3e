"""Memory of the caller: it is read and written where it is."""

import array
import ctypes
import sys
import types

import farside
import numpy
import pytest

LENGTHS = [1, 64, 4096, 1 << 20]


@pytest.mark.parametrize("bytes", LENGTHS)
@pytest.mark.parametrize("kind", [bytearray, numpy.zeros, "registered", "memoryview"])
def test_buffers_are_read_and_written(client, kind, bytes):
    def make():
        if kind == "registered":
            return client.buffer(bytes)
        if kind == "memoryview":
            return memoryview(bytearray(bytes + 7))[7:]
        return numpy.zeros(bytes, numpy.uint8) if kind is numpy.zeros else bytearray(bytes)

    source, target = make(), make()
    memoryview(source)[:] = bytearray(number % 251 for number in range(bytes))
    client.put("key", source)
    assert client.get("key") == memoryview(source)
    for _ in range(2):
        assert client.get_into("key", target) == bytes
        assert memoryview(target) == memoryview(source)
    assert client.get_into("absent", target) is None


@pytest.mark.one_fabric
def test_arrays_of_all_types(client):
    rows = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    client.put("rows", rows)
    read = numpy.empty_like(rows)
    assert client.get_into("rows", read) == rows.nbytes
    assert (read == rows).all()
    client.put("doubles", array.array("d", [1.5, 2.5]))
    assert client.get("doubles") == array.array("d", [1.5, 2.5]).tobytes()


class Pair(ctypes.Structure):
    _fields_ = [("first", ctypes.c_int), ("second", ctypes.c_double)]


@pytest.mark.one_fabric
@pytest.mark.parametrize(
    "make",
    [
        lambda: (ctypes.c_char * 5)(*b"hello"),
        lambda: ((ctypes.c_int * 3) * 2)((1, 2, 3), (4, 5, 6)),
        lambda: ctypes.c_int(7),
        lambda: Pair(1, 2.5),
        lambda: numpy.array(5.0),
        lambda: memoryview(numpy.array(5.0)),
        lambda: numpy.array([1 + 2j]),
        # Fields with the names of pointers' formats.
        lambda: numpy.ones(2, [("O", "i4"), ("P", "f8")]),
    ],
)
def test_arrays_without_strides_or_shape(client, make):
    """Their strides or shapes are null: they are in one piece."""
    source, target = make(), make()
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(target)), 0, len(bytes(target)))
    client.put("key", source)
    assert client.get("key") == bytes(source)
    assert client.get_into("key", target) == len(bytes(source))
    assert bytes(target) == bytes(source)


class Owner(ctypes.Structure):
    _fields_ = [("number", ctypes.c_int), ("owned", ctypes.py_object)]


@pytest.mark.one_fabric
@pytest.mark.parametrize(
    "buffer",
    [
        numpy.array([object(), {}], dtype=object),
        numpy.zeros(2, [("number", "i4"), ("owned", "O")]),
        (ctypes.py_object * 2)(1, 2),
        Owner(1, []),
        (ctypes.c_char_p * 1)(b"text"),
        (ctypes.c_wchar_p * 1)("text"),
        (ctypes.c_void_p * 1)(),
        ctypes.pointer(ctypes.c_int(3)),
        (ctypes.CFUNCTYPE(None) * 1)(),
    ],
)
def test_pointers_are_refused(client, buffer):
    """A value that is read into them would let the program follow any address."""
    client.put("key", bytes(8))
    before = bytes(buffer)
    for call in (
        lambda: client.put("key", buffer),
        lambda: client.get_into("key", buffer),
        lambda: client.get_many_into(["key"], [buffer]),
    ):
        with pytest.raises(BufferError, match=r"has pointers \(format '.*'\).*array of numbers"):
            call()
    assert bytes(buffer) == before and client.get("key") == bytes(8)


@pytest.mark.one_fabric
def test_items_without_a_format(client):
    days = numpy.array(["2026-01-01"], dtype="datetime64[D]")
    for call in (lambda: client.put("key", days), lambda: client.get_into("key", days)):
        with pytest.raises(BufferError, match=r"dtype 'M' in a buffer: .*array\.view\(\"uint8\"\)"):
            call()
    client.put("key", days.view("uint8"))
    found = numpy.zeros_like(days)
    assert client.get_into("key", found.view("uint8")) == 8 and found == days


def test_several_buffers(client):
    values = {f"key:{number}": numpy.full(5000, number, numpy.uint8) for number in range(64)}
    client.put_many(values)
    targets = [numpy.empty(5000, numpy.uint8) for _ in values]
    assert client.get_many_into(values, targets) == [5000] * 64
    assert all((read == value).all() for read, value in zip(targets, values.values()))
    assert client.get_many_into(["absent"], [bytearray(1)]) == [None]
    with pytest.raises(ValueError, match="as many buffers as keys"):
        client.get_many_into(["key:1"], [])


@pytest.mark.one_fabric
def test_buffers_that_do_not_fit(client):
    client.put("key", b"12345")
    with pytest.raises(farside.BufferTooShortError, match="5 bytes long, and the memory for it 4"):
        client.get_into("key", bytearray(4))
    with pytest.raises(BufferError, match="read-only"):
        client.get_into("key", b"12345")
    with pytest.raises(BufferError, match="not contiguous"):
        client.put("key", memoryview(bytearray(10))[::2])
    with pytest.raises(TypeError):
        client.put("key", 5)
    assert client.get_into("key", bytearray(9)) == 5


@pytest.mark.one_fabric
def test_a_buffer_is_exported_during_the_call_only(client):
    buffer = bytearray(100)
    client.put("key", buffer)
    client.get_into("key", buffer)
    buffer.extend(b"more")


def test_a_registered_buffer_outlives_its_client(server):
    with farside.Client(server) as client:
        buffer = client.buffer(1000)
    view = memoryview(buffer)
    del buffer
    view[999] = 1
    assert len(view) == 1000 and not view.readonly


class Tensor:
    """What the client uses of a torch tensor."""

    def __init__(self, memory, shape=None, kind=None):
        self.memory, self.shape, self.kind = memory, shape, kind

    def detach(self):
        return self

    def view(self, what):
        shape, kind = (what, self.kind) if isinstance(what, int) else (self.shape, what)
        return Tensor(self.memory, shape, kind)

    def numpy(self):
        assert (self.shape, self.kind) == (-1, "torch.uint8")
        return self.memory


@pytest.mark.one_fabric
def test_tensors(client, monkeypatch):
    torch = types.SimpleNamespace(uint8="torch.uint8", Tensor=Tensor)
    monkeypatch.setitem(sys.modules, "torch", torch)
    memory = numpy.arange(100, dtype=numpy.uint8)
    client.put("key", Tensor(memory))
    target = numpy.zeros(100, numpy.uint8)
    assert client.get_into("key", Tensor(target)) == 100
    assert (target == memory).all()


@pytest.mark.one_fabric
def test_tensors_of_torch(client):
    torch = pytest.importorskip("torch", reason="torch is not installed: a stand-in is tested")
    stored = torch.arange(100, dtype=torch.float32).to(torch.bfloat16).view(10, 10)
    client.put("key", stored)
    found = torch.zeros(10, 10, dtype=torch.bfloat16)
    assert client.get_into("key", found) == 200
    assert torch.equal(found, stored)


@pytest.mark.one_fabric
def test_buffers_that_overlap_are_refused(client):
    client.put_many({"one": "1", "two": "2"})
    memory = bytearray(100)
    with pytest.raises(ValueError, match="share memory"):
        client.get_many_into(["one", "two"], [memory, memory])
    parts = memoryview(memory)
    assert client.get_many_into(["one", "two"], [parts[:50], parts[50:]]) == [1, 1]


@pytest.mark.one_fabric
@pytest.mark.parametrize("owner", [type("Other", (), {"numpy": None})(), 5])
def test_other_objects_are_refused(client, owner):
    with pytest.raises(TypeError, match="bytes-like"):
        client.put("key", owner)
