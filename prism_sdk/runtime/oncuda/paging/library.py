"""The library that serves a rank's device memory, as Python sees it.

Responsible for loading it before torch, so that its functions come first, and for calling it; it decides nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism_sdk.errors import RunError

__all__ = ["Moved", "PageStats", "Pages", "current_pages", "loaded", "preload"]

RESIDENT, IN_HOST_MEMORY, ON_DISK = 0, 1, 2

_library: ctypes.CDLL | None = None
_current: Pages | None = None


class Moved(ctypes.Structure):
    """How a move ended: `Moved` of pages.h."""

    _fields_ = [
        ("status", ctypes.c_uint32),
        ("code", ctypes.c_uint32),
        ("num_bytes", ctypes.c_uint64),
        ("copy_ns", ctypes.c_uint64),
        ("total_ns", ctypes.c_uint64),
        ("fresh_bytes", ctypes.c_uint64),
    ]


_FIELDS = ("movable", "fixed", "overhead", "limit", "refused", "num_pages", "where")


class _Stats(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in _FIELDS]


@dataclass(frozen=True)
class PageStats:
    """What a rank has been given, in bytes; `refused_bytes` is the last allocation that was not granted, else 0."""

    movable_bytes: int
    fixed_bytes: int
    overhead_bytes: int
    limit_bytes: int
    refused_bytes: int
    num_pages: int
    where: int


def preload(path: str) -> None:
    """Load the library; to be called before torch is imported, or torch's calls do not come here.

    A library that is loaded for all (RTLD_GLOBAL) before another one is where the other one's names are looked up
    first.  Unlike LD_PRELOAD it is not inherited by what the program starts.
    """
    global _library
    assert "torch" not in sys.modules
    _library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def loaded() -> bool:
    """Whether this process, or the one it was forked from, has it."""
    return _library is not None


def current_pages() -> Pages | None:
    """This process's, once it has begun to serve allocations."""
    return _current


class Pages:
    """The device memory of this process's program."""

    def __init__(
        self, *, socket_fd: int = -1, pool_fd: int = -1, rank: int = 0, disk: Path | None = None,
        limit_bytes: int = 0, reserve_bytes: int = 0, is_alone: bool = False, others_bytes: int | None = None,
        num_workers: int = 8,
    ) -> None:  # fmt: skip
        """Begin to serve allocations; once in a process, before it opens the device.

        `pool_fd` is of a HostPool, which need not stay open: memory goes to the blocks of it that `rank` has.

        `others_bytes` counts under the limit in place of all that is not the program's (but the context at least).
        """
        assert _library is not None
        self._library: Any = _library
        self._library.prism_pages_ready_bytes.restype = ctypes.c_uint64
        self.disk_fd = -1 if disk is None else os.open(disk, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        result = self._library.prism_pages_open(
            socket_fd,
            pool_fd,
            rank,
            self.disk_fd,
            ctypes.c_uint64(limit_bytes),
            ctypes.c_uint64(reserve_bytes),
            int(is_alone),
            ctypes.c_int64(-1 if others_bytes is None else others_bytes),
            num_workers,
        )
        if result > 0:
            why = f"host memory for its device memory cannot be mapped: {os.strerror(result)}"
            raise RunError(why, rank=rank, hint="allow more address space: ulimit -v unlimited")
        if result:
            hint = "allow more threads: ulimit -u"
            raise RunError("the thread that moves device memory cannot be started", hint=hint)
        global _current
        _current = self

    def stats(self) -> PageStats:
        """What the program holds."""
        stats = _Stats()
        self._library.prism_pages_stats(ctypes.byref(stats))
        return PageStats(*(int(getattr(stats, name)) for name in _FIELDS))

    def real_memory(self) -> tuple[int, int]:
        """Free and total bytes of the device as it is, whoever uses it."""
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        self._library.prism_pages_real_memory(ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def hold_still(self) -> bool:
        """Note whether threads of the program may use the device while it waits: then nothing may be moved."""
        must = any(map(_may_compute, threading.enumerate()))
        self._library.prism_pages_hold_still(int(must))
        return must

    def move_out(self, where: int = IN_HOST_MEMORY) -> Moved:
        """Move all pages away from the device."""
        moved = Moved()
        self._library.prism_pages_out(where, ctypes.byref(moved))
        return moved

    def prepare(self, *, num_threads: int = 2) -> None:
        """Begin to touch the host memory for the next move; threads of low priority do it, and nobody waits."""
        self._library.prism_pages_prepare(num_threads)

    def ready_bytes(self) -> int:
        """How much of that is done."""
        return int(self._library.prism_pages_ready_bytes())

    def move_in(self, *, into_reserve: bool = True) -> Moved:
        """Bring them back."""
        moved = Moved()
        self._library.prism_pages_in(int(into_reserve), ctypes.byref(moved))
        return moved


def _may_compute(thread: threading.Thread) -> bool:
    if thread is threading.current_thread() or thread is threading.main_thread():
        return False
    target = getattr(thread, "_target", None)  # torch's own, which pins batches of a data loader
    return getattr(target, "__module__", "") != "torch.utils.data._utils.pin_memory"
