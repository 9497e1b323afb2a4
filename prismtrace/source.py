"""Reads byte ranges of a path, a binary file object or a memory map, safely from several threads.

Does not know the format.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
from typing import Any, BinaryIO

from prismtrace.errors import TraceReadError, TraceTruncatedError, TraceUsageError

TraceInput = str | os.PathLike[str] | BinaryIO | mmap.mmap
MAX_READ = 1 << 30


class Source:
    """Random access to bytes of known size. `name` is what error messages call the file."""

    name: str
    size: int

    def read_at(self, offset: int, length: int) -> memoryview:
        """Exactly `length` bytes from `offset`; TraceTruncatedError when they are not there."""
        if offset < 0 or length < 0 or offset + length > self.size:
            message = f"{length} bytes wanted, the file has {self.size}"
            raise TraceTruncatedError(message, path=self.name, offset=offset)
        return self._read(offset, length)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset`."""
        buffer[:] = self.read_at(offset, len(buffer))

    def _read(self, offset: int, length: int) -> memoryview:
        raise NotImplementedError

    def close(self) -> None:
        """Releases what was opened here."""


class PathSource(Source):
    """A regular file, read with pread."""

    def __init__(self, path: str) -> None:
        self.name = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise _refused(error, path) from error
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise TraceReadError("not a regular file", path=path)
        self.size = status.st_size

    def _read(self, offset: int, length: int) -> memoryview:
        if length <= MAX_READ:
            raw = self._pread(length, offset)
            if len(raw) == length:
                return memoryview(raw)
        buffer = memoryview(bytearray(length))
        self.read_into(offset, buffer)
        return buffer.toreadonly()

    def _pread(self, length: int, offset: int) -> bytes:
        try:
            return os.pread(self._fd, length, offset)
        except OSError as error:
            raise _refused(error, self.name) from error

    def read_into(self, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done : done + MAX_READ]], offset + done)
            except OSError as error:
                raise _refused(error, self.name) from error
            if count == 0:
                raise TraceTruncatedError("the file became shorter while it was read", path=self.name, offset=offset)
            done += count

    def fileno(self) -> int:
        """The file descriptor, for copying inside the kernel."""
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


class FileSource(Source):
    """A seekable binary file object, which stays the caller's; reads take turns."""

    def __init__(self, file: Any) -> None:
        name = getattr(file, "name", None)
        self.name = name if isinstance(name, str) else f"<{type(file).__name__}>"
        self._file = file
        self._lock = threading.Lock()
        try:
            self.size = file.seek(0, os.SEEK_END)
        except (OSError, ValueError) as error:
            raise _refused(error, self.name) from error

    def _read(self, offset: int, length: int) -> memoryview:
        parts = []
        try:
            with self._lock:
                self._file.seek(offset)
                missing = length
                while missing and (part := self._file.read(missing)):
                    parts.append(part)
                    missing -= len(part)
        except (OSError, ValueError, EOFError) as error:
            raise _refused(error, self.name) from error
        if missing:
            raise TraceTruncatedError("the file became shorter while it was read", path=self.name, offset=offset)
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))


class MapSource(Source):
    """A memory map, which stays the caller's."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self.name = "<mmap>"
        self._mapped = mapped
        self.size = len(mapped)

    def _read(self, offset: int, length: int) -> memoryview:
        return memoryview(self._mapped[offset : offset + length])


def _refused(error: Exception, path: str) -> TraceReadError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return TraceReadError(f"cannot read: {reason}", path=path, errno=getattr(error, "errno", None))


def open_source(source: TraceInput) -> Source:
    """Opens what a caller may pass for a trace to read."""
    if isinstance(source, str | os.PathLike):
        return PathSource(os.fspath(source))
    if isinstance(source, mmap.mmap):
        return MapSource(source)
    if hasattr(source, "seek") and hasattr(source, "read"):
        return FileSource(source)
    raise TraceUsageError(f"a path, a binary file object or a memory map is needed, not {type(source).__name__}")
