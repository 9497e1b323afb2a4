"""Removes the shared memory that processes of a launch left behind when they were killed.

Responsible for knowing which processes descended from the launch, and for the files that bear their ids; it ends no
process (forkserver.py does).

torch hands a tensor to another process through a file in /dev/shm that it unlinks right after it has opened it. A data
loader worker that is killed in between leaves the file, and its memory is lost until the machine is started anew.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from mmap import MAP_ANONYMOUS, MAP_SHARED, PROT_READ, PROT_WRITE, mmap
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_FILE = re.compile(r"torch_(\d+)_\d")
_MAX_PID = 1 << 22  # the kernel's own limit


class Descendants:
    """The process ids that a launch has had: a byte for each, in memory that all processes of the launch share.

    Mapped without a descriptor, because programs close descriptors that they do not know; bytes and not a list, because
    setting one needs no lock. Pages that nobody touches cost nothing.
    """

    def __init__(self) -> None:
        self._seen = mmap(-1, _MAX_PID + 1, MAP_SHARED | MAP_ANONYMOUS, PROT_READ | PROT_WRITE)
        self._since_ns = time.time_ns()

    def add(self, pids: Iterable[int]) -> None:
        """Note processes of the launch."""
        for pid in pids:
            if 0 < pid <= _MAX_PID:
                self._seen[pid] = 1

    def follow_forks(self) -> None:
        """Note every process that this one and its descendants fork (by Python, without starting another program)."""
        os.register_at_fork(after_in_child=lambda: self.add([os.getpid()]))

    def __contains__(self, pid: int) -> bool:
        return 0 < pid <= _MAX_PID and self._seen[pid] == 1

    def remove_shared_memory(self, folder: Path = SHARED_MEMORY) -> list[Path]:
        """Remove torch's files of processes that descended from the launch and are dead; returns what was removed.

        Containers may share the folder and not the process ids: that no such process is alive says nothing of a file.
        """
        removed = []
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                match = _FILE.match(path.name)
                if match and int(match[1]) in self and not _is_alive(int(match[1])) and self._is_ours(path):
                    with contextlib.suppress(OSError):
                        path.unlink()
                        removed.append(path)
        return removed

    def _is_ours(self, path: Path) -> bool:
        """Whether the file was made by this user and since the launch began: process ids are used again."""
        try:
            status = path.lstat()
        except OSError:
            return False
        return status.st_uid == os.geteuid() and status.st_mtime_ns >= self._since_ns


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
