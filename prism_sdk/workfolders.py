"""Folders that a command works in and takes away at its end; what killed commands have left, later ones remove.

It knows nothing of what lies in them, and keeps nothing: what is to outlive a command has a place of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from prism_sdk.errors import RunError

__all__ = ["work_folder"]

_LOCK = "lock"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LITTLE_BYTES = 1 << 20  # what a file system may keep when it is full


@contextlib.contextmanager
def work_folder(prefix: str, *, beside: Path | None = None) -> Iterator[Path]:
    """A new folder whose name begins with `prefix`, in the folder of `beside` (absent: that for temporary files).

    A lock on a file in it lasts as long as this process. Folders of that prefix of which nobody has the lock are
    removed. Raises OSError where no folder can be made, and RunError where what is written there finds no room.
    """
    parent = Path(tempfile.gettempdir()) if beside is None else beside.absolute().parent
    for left in parent.glob(f"{prefix}*"):
        _remove_abandoned(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with (folder / "locking").open("w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: then nobody can know, or removes it
                fcntl.flock(lock, fcntl.LOCK_EX)
                os.rename(lock.name, folder / _LOCK)  # under this name it has been locked from the start
            yield folder
    except OSError as error:
        if error.filename is None and error.errno in _NO_ROOM and _is_full(folder):  # a write does not say where
            hint = "make room there" if beside is not None else "make room there, or name another place with TMPDIR"
            raise RunError(f"{folder.parent}: {error.strerror}", hint=hint) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_full(folder: Path) -> bool:
    """Whether it was here, and not on standard output, say, that a write found no room."""
    return shutil.disk_usage(folder).free < _LITTLE_BYTES


def _remove_abandoned(folder: Path) -> None:
    """Remove the folder if it is one of this user's commands and they do not run any more."""
    with contextlib.suppress(OSError):
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
