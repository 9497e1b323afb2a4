"""Defines the errors that this package raises.

Does not print, exit or decide what is an error::

    PrismTraceError
    +-- TraceReadError            the operating system refuses: no such file, no permission, not a regular file
    +-- TraceWriteError           the disk is full, the file exists, the folder is missing ...
    +-- TraceResultError          a tool's result would not be what was asked for; nothing was written
    +-- TraceUsageError           the caller passed something that cannot be written or read (also a ValueError)
    +-- TraceFormatError          the bytes are not what the specification asks for
        +-- TraceTruncatedError   the file ends too early
        |   +-- TraceUnfinishedError   whole records, but no footer: the writer did not finish
        +-- TraceChecksumError    bytes were changed after they were written
        +-- TraceVersionError     a later format version, or a required feature that this library does not know
        +-- TraceLimitError       a size above the limits of the specification or of the caller
        +-- TraceDataError        well-formed bytes with contents that contradict each other
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import zstandard


class PrismTraceError(Exception):
    """Base of every error of this package."""


class TraceReadError(PrismTraceError):
    """The operating system refuses to open or read the file."""

    def __init__(self, message: str, *, path: str, errno: int | None = None) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.errno = errno


class TraceWriteError(PrismTraceError):
    """The file cannot be written; what was written before stays readable."""

    def __init__(self, message: str, *, path: str, errno: int | None = None) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.errno = errno

    def of(self, path: str) -> TraceWriteError:
        """The same error of another file: of that which was asked for, in place of a temporary one."""
        return TraceWriteError(str(self).removeprefix(f"{self.path}: "), path=path, errno=self.errno)


class TraceUsageError(PrismTraceError, ValueError):
    """The caller asked for something that has no meaning in this format."""


class TraceResultError(PrismTraceError):
    """What a tool would write is not what was asked for: a secret is left, clocks cannot be aligned."""


class TraceFormatError(PrismTraceError):
    """The bytes at `offset` of `path` are not what the specification asks for."""

    def __init__(self, message: str, *, path: str, offset: int | None = None) -> None:
        where = path if offset is None else f"{path}: byte {offset}"
        super().__init__(f"{where}: {message}")
        self.message = message
        self.path = path
        self.offset = offset


class TraceTruncatedError(TraceFormatError):
    """The file ends before the structure that starts at `offset` does."""


class TraceUnfinishedError(TraceTruncatedError):
    """The file has no footer: its writer did not finish, or its end was cut off."""


class TraceChecksumError(TraceFormatError):
    """A checksum does not match: bytes were changed after they were written."""


class TraceVersionError(TraceFormatError):
    """The file needs a later library."""


class TraceLimitError(TraceFormatError):
    """A size is above a limit; nothing was allocated for it."""


class TraceDataError(TraceFormatError):
    """The bytes are well-formed and what they say is contradictory."""


_FOREIGN = (
    struct.error,
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    OverflowError,
    AttributeError,
    RecursionError,
    AssertionError,
    zstandard.ZstdError,
)


@contextmanager
def reading(what: str, *, path: str, offset: int | None) -> Iterator[None]:
    """The one place that turns what broken bytes do to Python into a TraceFormatError."""
    try:
        yield
    except PrismTraceError:
        raise
    except MemoryError as error:
        raise TraceLimitError(f"{what}: not enough memory", path=path, offset=offset) from error
    except _FOREIGN as error:
        message = f"{what} is malformed ({type(error).__name__}: {error})"
        raise TraceFormatError(message, path=path, offset=offset) from error


def already_exists(path: str) -> TraceWriteError:
    """What is raised where a file may not be replaced; a caller can tell it by its errno."""
    return TraceWriteError("exists already; pass overwrite to replace it", path=path, errno=errno.EEXIST)


@contextmanager
def writing(path: str, *, what: str = "cannot write") -> Iterator[None]:
    """The one place that turns an OSError of a write into a TraceWriteError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TraceWriteError(f"{what}: {reason}", path=path, errno=error.errno) from error
