"""What one client writes, each other one reads: Rust, C, Python, redis' protocol and kv-cli.

docs/clients.md shows the operations of each; FARSIDE_UPDATE=1 writes its table.
"""

import contextlib
import ctypes
import itertools
import math
import os
import pathlib
import socket
import subprocess

import conftest
import farside
import pytest

TARGET = pathlib.Path(conftest.KV_SERVER or "").parent
PAGE = conftest.ROOT / "docs/clients.md"

FOREVER = math.inf


class Rust:
    """tests/src/bin/rust-client.rs, which calls the library."""

    NAME = "Rust"
    CALLS = {
        "get": "get",
        "exists": "exists",
        "version": "version",
        "ttl": "ttl",
        "get_many": "get_many",
        "scan": "scan_prefix",
        "put": "put",
        "put_ttl": "put_with_ttl",
        "insert": "insert",
        "update": "update",
        "put_if_version": "Store::if_version",
        "put_if_value": "Store::if_value",
        "increment": "increment",
        "append": "append",
        "touch": "touch",
        "persist": "persist",
        "delete": "delete",
        "delete_if_version": "delete_if_version",
        "put_many": "put_many",
        "delete_many": "delete_many",
    }

    def __init__(self, server, _folder):
        command = [TARGET / "rust-client", server]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def close(self):
        self.process.stdin.close()
        self.process.wait(conftest.LIMIT)
        self.process.stdout.close()

    def ask(self, operation, *words):
        texts = (word.hex() if isinstance(word, bytes) else str(word) for word in words)
        self.process.stdin.write("\t".join([operation, *texts]) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().rstrip("\n")

    @staticmethod
    def value(text):
        return None if text == "absent" else bytes.fromhex(text)

    def get(self, key):
        return self.value(self.ask("get", key))

    def exists(self, key):
        return self.ask("exists", key) == "1"

    def version(self, key):
        text = self.ask("version", key)
        return None if text == "absent" else int(text)

    def ttl(self, key):
        text = self.ask("ttl", key)
        if text == "absent":
            return None
        return FOREVER if text == "forever" else int(text) / 1000

    def get_many(self, keys):
        return [self.value(text) for text in self.ask("get_many", *keys).split("\t")]

    def scan(self, prefix):
        return {bytes.fromhex(key) for key in self.ask("scan", prefix).split("\t") if key}

    def put(self, key, value):
        self.ask("put", key, value)

    def put_ttl(self, key, value, seconds):
        self.ask("put_ttl", key, value, seconds * 1000)

    def insert(self, key, value):
        return self.ask("insert", key, value) == "1"

    def update(self, key, value):
        return self.ask("update", key, value) == "1"

    def put_if_version(self, key, value, version):
        return self.ask("put_if_version", key, value, version) == "1"

    def put_if_value(self, key, value, expected):
        return self.ask("put_if_value", key, value, expected) == "1"

    def increment(self, key, delta):
        return int(self.ask("increment", key, delta))

    def append(self, key, more):
        return int(self.ask("append", key, more))

    def touch(self, key, seconds):
        return self.ask("touch", key, seconds * 1000) == "1"

    def persist(self, key):
        return self.ask("persist", key) == "1"

    def delete(self, key):
        return self.ask("delete", key) == "1"

    def delete_if_version(self, key, version):
        return self.ask("delete_if_version", key, version) == "1"

    def put_many(self, entries):
        self.ask("put_many", *itertools.chain(*entries.items()))

    def delete_many(self, keys):
        return int(self.ask("delete_many", *keys))


class Entry(ctypes.Structure):
    """farside_get_entry."""

    _fields_ = [
        ("key", ctypes.c_char_p),
        ("key_bytes", ctypes.c_size_t),
        ("buffer", ctypes.c_void_p),
        ("buffer_bytes", ctypes.c_size_t),
        ("value_bytes", ctypes.c_size_t),
        ("version", ctypes.c_uint64),
        ("status", ctypes.c_int32),
    ]


class Pair(ctypes.Structure):
    """farside_put_entry."""

    _fields_ = [
        ("key", ctypes.c_char_p),
        ("key_bytes", ctypes.c_size_t),
        ("value", ctypes.c_char_p),
        ("value_bytes", ctypes.c_size_t),
    ]


class Key(ctypes.Structure):
    """farside_key."""

    _fields_ = [("key", ctypes.c_char_p), ("key_bytes", ctypes.c_size_t)]


class Options(ctypes.Structure):
    """farside_store_options."""

    _fields_ = [
        ("condition", ctypes.c_uint32),
        ("pinned", ctypes.c_uint32),
        ("ttl_ms", ctypes.c_uint64),
        ("version", ctypes.c_uint64),
        ("expected", ctypes.c_char_p),
        ("expected_bytes", ctypes.c_size_t),
        ("reserved", ctypes.c_uint64 * 2),
    ]


class C:
    """libfarside.so."""

    NAME = "C"
    CALLS = {
        "get": "farside_get",
        "exists": "farside_exists",
        "version": "farside_key_version",
        "ttl": "farside_ttl_ms",
        "get_many": "farside_get_many",
        "put": "farside_put",
        "put_ttl": "farside_store",
        "insert": "farside_store",
        "update": "farside_store",
        "put_if_version": "farside_store",
        "put_if_value": "farside_store",
        "increment": "farside_increment",
        "append": "farside_append",
        "touch": "farside_touch",
        "persist": "farside_persist",
        "delete": "farside_delete",
        "delete_if_version": "farside_delete_if_version",
        "put_many": "farside_put_many",
        "delete_many": "farside_delete_many",
    }
    OK, ABSENT, NOT_APPLIED = 0, 1, 2

    def __init__(self, server, _folder):
        self.library = ctypes.CDLL(str(TARGET / "libfarside.so"))
        self.library.farside_options_new.restype = ctypes.c_void_p
        options = ctypes.c_void_p(self.library.farside_options_new())
        self.client, self.session = ctypes.c_void_p(), ctypes.c_void_p()
        assert self.library.farside_options_server(options, server.encode()) == self.OK
        assert self.library.farside_connect(options, ctypes.byref(self.client)) == self.OK
        self.library.farside_options_free(options)
        session = ctypes.byref(self.session)
        assert self.library.farside_session_open(self.client, session) == self.OK

    def close(self):
        self.library.farside_session_close(self.session)
        self.library.farside_client_free(self.client)

    def call(self, function, *arguments):
        """Calls a function. Bytes become a pointer and a length."""
        words = []
        for argument in arguments:
            if isinstance(argument, bytes):
                words += [argument, ctypes.c_size_t(len(argument))]
            else:
                words.append(argument)
        status = getattr(self.library, function)(self.session, *words)
        assert status in (self.OK, self.ABSENT, self.NOT_APPLIED), (function, status)
        return status

    def number(self, function, kind, *arguments):
        """Calls a function with a result at the end; None with FARSIDE_ABSENT."""
        result = kind()
        status = self.call(function, *arguments, ctypes.byref(result))
        return result.value if status == self.OK else None

    def get(self, key):
        buffer, length = ctypes.create_string_buffer(1000), ctypes.c_size_t()
        size = ctypes.c_size_t(len(buffer))
        status = self.call("farside_get", key, buffer, size, ctypes.byref(length), None)
        return buffer.raw[: length.value] if status == self.OK else None

    def exists(self, key):
        return self.call("farside_exists", key) == self.OK

    def version(self, key):
        return self.number("farside_key_version", ctypes.c_uint64, key)

    def ttl(self, key):
        left = self.number("farside_ttl_ms", ctypes.c_uint64, key)
        return left if left is None else left / 1000 if left else FOREVER

    def get_many(self, keys):
        buffers = [ctypes.create_string_buffer(1000) for _ in keys]
        entries = (Entry * len(keys))()
        for entry, key, buffer in zip(entries, keys, buffers):
            entry.key, entry.key_bytes = key, len(key)
            entry.buffer, entry.buffer_bytes = ctypes.addressof(buffer), len(buffer)
        assert self.call("farside_get_many", entries, ctypes.c_size_t(len(keys))) == self.OK
        pairs = zip(entries, buffers)
        return [b.raw[: e.value_bytes] if e.status == self.OK else None for e, b in pairs]

    def put(self, key, value):
        assert self.call("farside_put", key, value) == self.OK

    def store(self, key, value, condition=0, ttl_ms=0, version=0, expected=b""):
        options = Options(condition, 0, ttl_ms, version, expected, len(expected))
        return self.call("farside_store", key, value, ctypes.byref(options), None) == self.OK

    def put_ttl(self, key, value, seconds):
        assert self.store(key, value, ttl_ms=seconds * 1000)

    def insert(self, key, value):
        return self.store(key, value, condition=1)

    def update(self, key, value):
        return self.store(key, value, condition=2)

    def put_if_value(self, key, value, expected):
        return self.store(key, value, condition=3, expected=expected)

    def put_if_version(self, key, value, version):
        return self.store(key, value, condition=4, version=version)

    def increment(self, key, delta):
        return self.number("farside_increment", ctypes.c_int64, key, ctypes.c_int64(delta))

    def append(self, key, more):
        return self.number("farside_append", ctypes.c_size_t, key, more)

    def touch(self, key, seconds):
        return self.call("farside_touch", key, ctypes.c_uint64(seconds * 1000)) == self.OK

    def persist(self, key):
        return self.call("farside_persist", key) == self.OK

    def delete(self, key):
        return self.call("farside_delete", key) == self.OK

    def delete_if_version(self, key, version):
        return self.call("farside_delete_if_version", key, ctypes.c_uint64(version)) == self.OK

    def put_many(self, entries):
        pairs = (Pair * len(entries))(*((k, len(k), v, len(v)) for k, v in entries.items()))
        assert self.call("farside_put_many", pairs, ctypes.c_size_t(len(entries))) == self.OK

    def delete_many(self, keys):
        names = (Key * len(keys))(*((key, len(key)) for key in keys))
        count = ctypes.c_size_t(len(keys))
        return self.number("farside_delete_many", ctypes.c_uint64, names, count)


class Python:
    """This package."""

    NAME = "Python"
    CALLS = {
        "get": "get",
        "exists": "exists",
        "version": "version",
        "ttl": "ttl",
        "get_many": "get_many",
        "scan": "scan",
        "put": "put",
        "put_ttl": "put(ttl=)",
        "insert": "insert",
        "update": "update",
        "put_if_version": "compare_exchange_version",
        "put_if_value": "compare_exchange",
        "increment": "increment",
        "append": "append",
        "touch": "touch",
        "persist": "persist",
        "delete": "delete",
        "delete_if_version": "delete_if_version",
        "put_many": "put_many",
        "delete_many": "delete_many",
    }

    def __init__(self, server, _folder):
        self.client = farside.Client(server)
        names = "get exists version ttl get_many put insert update increment append touch persist"
        for name in (names + " delete delete_if_version put_many delete_many close").split():
            setattr(self, name, getattr(self.client, name))

    def scan(self, prefix):
        return {key for key, _ in self.client.scan(prefix)}

    def put_ttl(self, key, value, seconds):
        self.client.put(key, value, ttl=seconds)

    def put_if_version(self, key, value, version):
        return self.client.compare_exchange_version(key, version, value).applied

    def put_if_value(self, key, value, expected):
        return self.client.compare_exchange(key, expected, value).applied


class Resp:
    """kv-resp, by its socket."""

    NAME = "redis"
    CALLS = {
        "get": "GET",
        "exists": "EXISTS",
        "ttl": "PTTL",
        "get_many": "MGET",
        "scan": "SCAN",
        "put": "SET",
        "put_ttl": "SET EX",
        "insert": "SET NX",
        "update": "SET XX",
        "put_if_value": "SET IFEQ",
        "increment": "INCRBY",
        "append": "APPEND",
        "touch": "EXPIRE",
        "persist": "PERSIST",
        "delete": "DEL",
        "put_many": "MSET",
        "delete_many": "DEL",
    }

    def __init__(self, server, folder):
        path = folder / "resp.sock"
        command = [TARGET / "kv-resp", "--server", server, "--listen", f"unix://{path}"]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        conftest.wait_until(path.exists)
        self.socket = socket.socket(socket.AF_UNIX)
        conftest.wait_until(lambda: self.socket.connect_ex(str(path)) == 0)
        self.file = self.socket.makefile("rb")

    def close(self):
        self.file.close()
        self.socket.close()
        self.process.terminate()
        self.process.wait(conftest.LIMIT)

    def call(self, *words):
        words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        lines = b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
        self.socket.sendall(b"*%d\r\n" % len(words) + lines)
        return self.reply()

    def reply(self):
        line = self.file.readline().rstrip(b"\r\n")
        kind, rest = line[:1], line[1:]
        assert kind in (b"+", b":", b"$", b"*"), line
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        return None if rest == b"-1" else self.file.read(int(rest) + 2)[:-2]

    def get(self, key):
        return self.call("GET", key)

    def exists(self, key):
        return self.call("EXISTS", key) == 1

    def ttl(self, key):
        left = self.call("PTTL", key)
        return {-2: None, -1: FOREVER}.get(left, left / 1000)

    def get_many(self, keys):
        return self.call("MGET", *keys)

    def scan(self, prefix):
        special = "".join("\\" + c if c in "*?[]\\^-" else c for c in prefix.decode("latin-1"))
        found, cursor = set(), b"0"
        while True:
            cursor, keys = self.call("SCAN", cursor, "MATCH", special.encode("latin-1") + b"*")
            found.update(keys)
            if cursor == b"0":
                return found

    def put(self, key, value):
        assert self.call("SET", key, value) == b"OK"

    def put_ttl(self, key, value, seconds):
        assert self.call("SET", key, value, "EX", seconds) == b"OK"

    def insert(self, key, value):
        return self.call("SET", key, value, "NX") == b"OK"

    def update(self, key, value):
        return self.call("SET", key, value, "XX") == b"OK"

    def put_if_value(self, key, value, expected):
        return self.call("SET", key, value, "IFEQ", expected) == b"OK"

    def increment(self, key, delta):
        return self.call("INCRBY", key, delta)

    def append(self, key, more):
        return self.call("APPEND", key, more)

    def touch(self, key, seconds):
        return self.call("EXPIRE", key, seconds) == 1

    def persist(self, key):
        return self.call("PERSIST", key) == 1

    def delete(self, key):
        return self.call("DEL", key) == 1

    def put_many(self, entries):
        assert self.call("MSET", *itertools.chain(*entries.items())) == b"OK"

    def delete_many(self, keys):
        return self.call("DEL", *keys)


class Cli:
    """kv-cli: a process for each operation."""

    NAME = "kv-cli"
    CALLS = {
        "get": "get",
        "exists": "exists",
        "ttl": "ttl",
        "get_many": "mget",
        "scan": "scan --prefix",
        "put": "put",
        "put_ttl": "put --ttl",
        "insert": "insert",
        "update": "update",
        "put_if_value": "cas --expect",
        "increment": "incr",
        "delete": "delete",
    }

    def __init__(self, server, _folder):
        self.server = server

    def close(self):
        pass

    def run(self, command, *words):
        """The output; None if the command says that the key is absent, or the condition false."""
        hexes = [word.hex() if isinstance(word, bytes) else str(word) for word in words]
        how = ["--server", self.server, "--key-encoding", "hex", "--value-encoding", "hex"]
        full = [TARGET / "kv-cli", command, *how, *hexes]
        done = subprocess.run(full, capture_output=True, check=False, timeout=conftest.LIMIT)
        assert done.returncode in (0, 1), done
        return done.stdout.strip().decode() if done.returncode == 0 else None

    def get(self, key):
        text = self.run("get", key)
        return None if text is None else bytes.fromhex(text)

    def exists(self, key):
        return self.run("exists", key) is not None

    def ttl(self, key):
        text = self.run("ttl", key)
        return text if text is None else FOREVER if text == "never" else float(text)

    def entries(self, text):
        lines = (line.split("\t") for line in text.splitlines())
        return {bytes.fromhex(key): bytes.fromhex(value) for key, value in lines}

    def get_many(self, keys):
        # Of absent keys mget prints nothing, and says so by its exit code.
        hexes = [key.hex() for key in keys]
        how = ["--server", self.server, "--key-encoding", "hex", "--value-encoding", "hex"]
        full = [TARGET / "kv-cli", "mget", *how, *hexes]
        done = subprocess.run(full, capture_output=True, check=False, timeout=conftest.LIMIT)
        assert done.returncode in (0, 1), done
        found = self.entries(done.stdout.decode())
        return [found.get(key) for key in keys]

    def scan(self, prefix):
        return set(self.entries(self.run("scan", "--prefix", prefix)))

    def put(self, key, value):
        assert self.run("put", key, value) is not None

    def put_ttl(self, key, value, seconds):
        assert self.run("put", key, value, "--ttl", f"{seconds}s") is not None

    def insert(self, key, value):
        return self.run("insert", key, value) is not None

    def update(self, key, value):
        return self.run("update", key, value) is not None

    def put_if_value(self, key, value, expected):
        return self.run("cas", key, value, "--expect", expected) is not None

    def increment(self, key, delta):
        return int(self.run("incr", key, delta))

    def delete(self, key):
        return self.run("delete", key) is not None


CLIENTS = [Rust, C, Python, Resp, Cli]
READS = ["get", "exists", "version", "ttl", "get_many", "scan"]
OPERATIONS = list(Rust.CALLS)
VALUE = bytes(range(256)) + b"\r\n\t"
SECONDS = 100_000


def has_expected(reader, writer, key, value, ttl=FOREVER):
    """Checks what each read of the reader finds."""
    assert reader.get(key) == value
    assert reader.exists(key) == (value is not None)
    assert reader.get_many([key, b"\x00absent"]) == [value, None]
    left = reader.ttl(key)
    if value is None or ttl == FOREVER:
        assert left == (None if value is None else FOREVER)
    else:
        assert SECONDS / 2 < left <= SECONDS + 1
    if "scan" in reader.CALLS:
        assert reader.scan(key) == (set() if value is None else {key})
    if "version" in reader.CALLS and "version" in writer.CALLS:
        assert reader.version(key) == writer.version(key)


def put(w, _r, key):
    w.put(key, VALUE)
    return VALUE, FOREVER


def put_ttl(w, _r, key):
    w.put_ttl(key, VALUE, SECONDS)
    return VALUE, SECONDS


def insert(w, _r, key):
    assert w.insert(key, VALUE)
    assert not w.insert(key, b"other")
    return VALUE, FOREVER


def update(w, r, key):
    assert not w.update(key, VALUE)
    r.put(key, b"old")
    assert w.update(key, VALUE)
    return VALUE, FOREVER


def put_if_version(w, r, key):
    r.put(key, b"old")
    version = (r if "version" in r.CALLS else w).version(key)
    assert w.put_if_version(key, VALUE, version)
    assert not w.put_if_version(key, b"other", version)
    return VALUE, FOREVER


def put_if_value(w, r, key):
    r.put(key, VALUE[:50])
    assert not w.put_if_value(key, b"other", b"another")
    assert w.put_if_value(key, VALUE, VALUE[:50])
    return VALUE, FOREVER


def increment(w, r, key):
    r.put_ttl(key, b"-40", SECONDS)
    assert w.increment(key, 82) == 42
    return b"42", SECONDS


def append(w, r, key):
    r.put_ttl(key, b"begin", SECONDS)
    assert w.append(key, VALUE) == 5 + len(VALUE)
    return b"begin" + VALUE, SECONDS


def touch(w, r, key):
    assert not w.touch(key, SECONDS)
    r.put(key, VALUE)
    assert w.touch(key, SECONDS)
    return VALUE, SECONDS


def persist(w, r, key):
    r.put_ttl(key, VALUE, SECONDS)
    assert w.persist(key)
    return VALUE, FOREVER


def delete(w, r, key):
    r.put(key, VALUE)
    assert w.delete(key)
    assert not w.delete(key)
    return None, FOREVER


def delete_if_version(w, r, key):
    r.put(key, VALUE)
    version = (r if "version" in r.CALLS else w).version(key)
    assert not w.delete_if_version(key, version + 1)
    assert w.delete_if_version(key, version)
    return None, FOREVER


def put_many(w, r, key):
    w.put_many({key: VALUE, key[::-1]: b"second"})
    assert r.get(key[::-1]) == b"second"
    assert r.delete(key[::-1])
    return VALUE, FOREVER


def delete_many(w, r, key):
    r.put(key, VALUE)
    assert w.delete_many([key, b"\x00absent"]) == 1
    return None, FOREVER


WRITES = [
    *(put, put_ttl, insert, update, put_if_version, put_if_value, increment, append, touch),
    *(persist, delete, delete_if_version, put_many, delete_many),
]


@pytest.fixture(scope="module")
def clients(server, folder):
    """One client of each kind."""
    with contextlib.ExitStack() as stack:
        made = {}
        for kind in CLIENTS:
            made[kind] = kind(server, folder)
            stack.callback(made[kind].close)
        yield made


@pytest.mark.one_fabric
@pytest.mark.parametrize("reader", CLIENTS, ids=lambda kind: kind.NAME)
@pytest.mark.parametrize("writer", CLIENTS, ids=lambda kind: kind.NAME)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_one_client_writes_each_other_reads(clients, write, writer, reader):
    if writer is reader or write.__name__ not in writer.CALLS:
        return
    w, r = clients[writer], clients[reader]
    key = b"\x00\xff " + f"{write.__name__} {w.NAME} {r.NAME}".encode()
    assert not r.exists(key)
    value, ttl = write(w, r, key)
    has_expected(r, w, key, value, ttl)


def test_each_client_has_the_operations_that_its_table_lists():
    for kind in CLIENTS:
        has = {name for name in OPERATIONS if hasattr(kind, name)}
        if kind is not Python:  # it takes most methods from farside.Client
            assert has == set(kind.CALLS), kind.NAME
    assert set(OPERATIONS) == {*READS, *(write.__name__ for write in WRITES)}


def test_the_page_shows_the_operations():
    rows = [
        "| | " + " | ".join(kind.NAME for kind in CLIENTS) + " |",
        "|---" * (len(CLIENTS) + 1) + "|",
    ]
    for operation in OPERATIONS:
        calls = (kind.CALLS.get(operation) for kind in CLIENTS)
        cells = " | ".join(f"`{call}`" if call else "" for call in calls)
        rows.append(f"| {operation.replace('_', ' ')} | {cells} |")
    table = "\n".join(rows) + "\n"
    begin, end = "<!-- operations -->\n", "<!-- end -->\n"
    page = PAGE.read_text()
    before, rest = page.split(begin)
    present, after = rest.split(end)
    if os.environ.get("FARSIDE_UPDATE"):
        PAGE.write_text(before + begin + table + end + after)
        present = table
    assert present == table, "FARSIDE_UPDATE=1 writes the table anew"
