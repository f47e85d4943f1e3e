"""A one-sided key-value store on far memory.

>>> import farside
>>> client = farside.Client(server)
>>> client.put("greeting", "hello")
>>> client.get("greeting")
b'hello'
"""

from farside._errors import (
    AddressError,
    BufferTooShortError,
    ClosedError,
    ConnectError,
    ContendedError,
    DamagedError,
    DeniedError,
    DisconnectedError,
    Error,
    ExpiryError,
    ForkError,
    IndeterminateError,
    KeyLengthError,
    LoopError,
    NotANumberError,
    NumberOverflowError,
    OperationError,
    OutOfSpaceError,
    RefusedError,
    SettingsError,
    UnavailableError,
    UnreachableError,
    UnregisteredError,
    ValueTooLongError,
)
from farside._farside import Buffer, Client, Outcome, Scan, Value, __version__

__all__ = [
    "AddressError",
    "Buffer",
    "BufferTooShortError",
    "Client",
    "ClosedError",
    "ConnectError",
    "ContendedError",
    "DamagedError",
    "DeniedError",
    "DisconnectedError",
    "Error",
    "ExpiryError",
    "ForkError",
    "IndeterminateError",
    "KeyLengthError",
    "LoopError",
    "NotANumberError",
    "NumberOverflowError",
    "OperationError",
    "Outcome",
    "OutOfSpaceError",
    "RefusedError",
    "Scan",
    "SettingsError",
    "UnavailableError",
    "UnreachableError",
    "UnregisteredError",
    "Value",
    "ValueTooLongError",
    "__version__",
]


def __getattr__(name):
    """Imports `farside.aio` and `farside.lmcache` when they are first used."""
    if name in ("aio", "lmcache"):
        import importlib

        return importlib.import_module(f"farside.{name}")
    raise AttributeError(f"module 'farside' has no attribute {name!r}")
