"""Says how much memory of its own this process has in RAM.

Responsible for the host's memory; a device's is oncuda/peaks.py's.
"""

from __future__ import annotations

import os

_PAGE = os.sysconf("SC_PAGE_SIZE")


class ResidentMemory:
    """Private resident bytes of this process: what stands in /proc/self/statm less the shared pages."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def __call__(self) -> int:
        fields = os.pread(self._fd, 128, 0).split()
        return (int(fields[1]) - int(fields[2])) * _PAGE
