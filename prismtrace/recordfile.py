"""Appends whole records to a file that nobody else writes: all of a record or nothing, and a name only when asked.

Does not know what records hold.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Any, Final

from prismtrace.errors import TraceUsageError, TraceWriteError, writing

_MAX_VECTORS: Final = 512
_LOCKED: Final = "another writer has this file open; write one file per process and merge"


class RecordFile:
    """An append-only file of whole records: what a failed write left behind is cut off again.

    The file is locked (advisory) as long as it is open, so that two writers never work on one file.

    Args:
        path: the file to create.
        overwrite: replaces a file that exists and is not being written.
        atomic: the file has another name until `publish`, and is gone when `close` comes without it.
        resume: opens a file that exists; `cut` then says where to go on.
    """

    def __init__(self, path: str, *, overwrite: bool = False, atomic: bool = False, resume: bool = False) -> None:
        self.path = path
        self.offset = 0
        self.failed: TraceWriteError | None = None
        self._overwrite, self._atomic = overwrite, atomic
        self._name = path
        if atomic:
            self._name = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}.tmp")
        with writing(path, what="cannot open" if resume else "cannot create"):
            if not resume:
                self._make_room()
            self._file = open(self._name, "r+b" if resume else "xb", buffering=0)  # noqa: SIM115
        try:
            _lock(self._file, path)
        except BaseException:
            self._file.close()
            raise
        self._pid = os.getpid()

    def _make_room(self) -> None:
        exists = os.path.lexists(self.path)
        if self._overwrite and is_special(self.path):  # never to be unlinked or replaced, whoever runs this
            raise TraceWriteError("is neither a file nor missing: a device, a pipe or a socket", path=self.path)
        if exists and self._atomic and not self._overwrite:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path)
        if exists and self._overwrite and os.path.isfile(self.path):
            with open(self.path, "rb") as present:
                _lock(present, self.path)
        if self._atomic and os.path.lexists(self._name):
            os.unlink(self._name)
        elif exists and self._overwrite and not self._atomic and not os.path.isdir(self.path):
            os.unlink(self.path)

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._file.closed

    def append(self, buffers: list[Any]) -> int:
        """Writes buffers back to back and returns the offset of the first; all of them or none."""
        if self.failed is not None:
            raise TraceWriteError("an earlier write failed, the file stays unfinished", path=self.path) from self.failed
        if self.closed:
            raise TraceUsageError(f"{self.path}: the writer is closed")
        if os.getpid() != self._pid:
            raise TraceUsageError(f"{self.path}: the writer was opened in another process; open one file per process")
        start, position = self.offset, 0
        total = sum(len(buffer) for buffer in buffers)
        try:
            with writing(self.path):
                while position < total:
                    count = os.writev(self._file.fileno(), _rest(buffers, position))
                    if count == 0:
                        raise OSError(None, "the file takes no more bytes")
                    position += count
        except TraceWriteError as error:
            self.failed = error
            self._cut(start)
            raise
        self.offset = start + total
        return start

    def cut(self, offset: int) -> None:
        """Cuts off what comes after `offset` and goes on there."""
        with writing(self.path):
            self._file.truncate(offset)
            self._file.seek(offset)
        self.offset = offset

    def _cut(self, length: int) -> None:
        try:
            self._file.truncate(length)
        except OSError:
            return  # the torn record stays; readers stop before it

    def sync(self) -> None:
        """Makes what was written survive a loss of power."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Gives an atomic file its name."""
        if not self._atomic or self.closed:
            return
        with writing(self.path, what="cannot create"):
            if self._overwrite:
                os.replace(self._name, self.path)
            else:
                os.link(self._name, self.path)
                os.unlink(self._name)
        self._atomic = False

    def close(self) -> None:
        """Closes the file as it is; an atomic one that was not published is removed."""
        if self.closed:
            return
        with writing(self.path, what="cannot close"):
            if os.getpid() == self._pid:
                if self._atomic:
                    os.unlink(self._name)
                _unlock(self._file)
            self._file.close()


def is_special(path: str) -> bool:
    """Whether a name belongs to something that is neither a file nor a folder, links followed."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _lock(file: Any, path: str) -> None:
    """Takes the lock of a writer, where the file system has locks."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TraceWriteError(_LOCKED, path=path, errno=error.errno) from error
    except OSError:
        return


def _unlock(file: Any) -> None:
    """Gives the lock back, also if a forked child still has the file open."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_UN)
    except OSError:
        return


def _rest(buffers: list[Any], position: int) -> list[Any]:
    """The buffers without their first `position` bytes, at most as many as one system call takes."""
    rest: list[Any] = []
    for buffer in buffers:
        if len(rest) == _MAX_VECTORS:
            break
        size = len(buffer)
        if position < size:
            rest.append(memoryview(buffer)[position:] if position else buffer)
        position = max(0, position - size)
    return rest
