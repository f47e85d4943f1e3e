"""The exceptions of the package. Their texts are the library's, and say what to do."""


class Error(Exception):
    """The base of all exceptions of this package.

    Unless the class or the method says otherwise, a failed operation changed nothing.
    """

    #: The same call may succeed later without any change.
    is_retryable = False
    #: The operation may have taken effect. It has, or it never will.
    is_indeterminate = False


class SettingsError(Error, ValueError):
    """A setting is out of its range, or does not fit this server."""


class AddressError(SettingsError):
    """The server's address is missing or malformed."""


class ForkError(Error, RuntimeError):
    """The process is a fork of the one that made the client."""


class LoopError(Error, RuntimeError):
    """The client belongs to another asyncio loop. The operation was not sent."""


class ClosedError(Error, ValueError):
    """The client is closed."""


class ConnectError(Error, ConnectionError):
    """There is no connection to the server."""


class UnreachableError(ConnectError):
    """No server answers, or it stopped answering."""

    is_retryable = True


class RefusedError(ConnectError):
    """The server refused this client, or the client does not trust it."""


class UnavailableError(ConnectError):
    """A shard of the cluster cannot be reached. All other keys go on."""

    is_retryable = True


class DisconnectedError(ConnectError):
    """The connection was lost before the operation took effect."""

    is_retryable = True


class OperationError(Error):
    """An operation failed."""


class KeyLengthError(OperationError, ValueError):
    """The key is empty or too long."""


class ValueTooLongError(OperationError, ValueError):
    """The value is longer than the server allows."""


class BufferTooShortError(OperationError, ValueError):
    """The value does not fit into the buffer."""


class ExpiryError(OperationError, ValueError):
    """The value would expire too late."""


class NotANumberError(OperationError, ValueError):
    """The value to increment is not a decimal integer."""


class NumberOverflowError(OperationError, OverflowError):
    """The sum does not fit in 64 bits."""


class OutOfSpaceError(OperationError):
    """The server has no memory for the value."""


class ContendedError(OperationError):
    """Other clients kept changing the key."""

    is_retryable = True


class IndeterminateError(OperationError):
    """The connection broke during a write, which took effect or never will."""

    is_indeterminate = True


class DeniedError(OperationError):
    """The client is a reader, which cannot change anything."""


class DamagedError(Error):
    """The server's memory is damaged."""


class UnregisteredError(OperationError):
    """The system refuses to register memory for RDMA."""


# They are the package's, also in tracebacks.
for _class in [Error, *Error.__subclasses__()]:
    _class.__module__ = "farside"
    for _subclass in _class.__subclasses__():
        _subclass.__module__ = "farside"
