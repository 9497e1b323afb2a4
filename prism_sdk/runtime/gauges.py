"""How much memory the machine at hand has and uses: of the host, and of the devices where there are any.

It knows nothing of ranks; a figure that the machine does not tell is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Bytes in use and in all."""

    used_bytes: int
    total_bytes: int


def host_memory() -> Memory | None:
    """Memory of this container where it has a limit, else of the machine. What can be given up at once is not in use.

    Source: MemTotal - MemAvailable of /proc/meminfo; memory.current less inactive_file of memory.stat (cgroup v2).
    """
    machine = _machine()
    return machine and (_container(machine) or machine)


def available_bytes() -> int | None:
    """What can still be taken, in the container and on the machine."""
    machine = _machine()
    if machine is None:
        return None
    return min(one.total_bytes - one.used_bytes for one in (machine, _container(machine)) if one is not None)


def _machine() -> Memory | None:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return Memory(total - available, total)


def _container(machine: Memory) -> Memory | None:
    """None without a limit below what the machine has."""
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit ("max")
        limit = int((_CGROUP / "memory.max").read_text())
        if limit < machine.total_bytes:
            used = int((_CGROUP / "memory.current").read_text()) - _inactive_file_bytes()
            return Memory(min(max(used, 0), limit), limit)
    return None


def _inactive_file_bytes() -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (_CGROUP / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0


def count_oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory, as far as it tells: on the machine and in our cgroup."""
    total = 0
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat") as file:
        total += sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/cgroup") as file:
            path = next((line.rstrip()[3:] for line in file if line.startswith("0::")), "")
        with open(f"/sys/fs/cgroup{path}/memory.events") as file:
            total += sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return total


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t of NVIDIA's management library."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class DeviceGauge:
    """Memory of the NVIDIA devices that the job may use, through the library that comes with the driver.

    Args:
        visible: value of CUDA_VISIBLE_DEVICES; absent: every device.
    """

    def __init__(self, visible: str | None = None) -> None:
        self._library: ctypes.CDLL | None = None
        self._handles: Sequence[ctypes.c_void_p] = ()
        if not glob.glob("/dev/nvidia[0-9]*"):
            return
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() == 0:
                self._library = library
                self._handles = [handle for handle in map(self._handle, self._wanted(visible)) if handle is not None]

    def memory(self) -> Memory | None:
        """Over all of them; None where there is none."""
        if self._library is None:
            return None
        used = total = 0
        for handle in self._handles:
            memory = _NvmlMemory()
            if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
                used, total = used + memory.used, total + memory.total
        return Memory(used, total) if total else None

    def free_bytes(self, index: int) -> int | None:
        """Of one of them, by the number that the job's processes give it; None where nobody can tell."""
        if self._library is None or index >= len(self._handles):
            return None
        memory = _NvmlMemory()
        code = self._library.nvmlDeviceGetMemoryInfo(self._handles[index], ctypes.byref(memory))
        return int(memory.free) if code == 0 else None

    def _wanted(self, visible: str | None) -> list[str]:
        if visible is not None:
            return [word.strip() for word in visible.split(",") if word.strip()]
        assert self._library is not None
        number = ctypes.c_uint()
        self._library.nvmlDeviceGetCount_v2(ctypes.byref(number))
        return [str(index) for index in range(number.value)]

    def _handle(self, name: str) -> ctypes.c_void_p | None:
        """Of a device by number, or by the identity that starts with GPU- or MIG-."""
        assert self._library is not None
        handle = ctypes.c_void_p()
        if name.isdigit():
            code = self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            code = self._library.nvmlDeviceGetHandleByUUID(os.fsencode(name), ctypes.byref(handle))
        return handle if code == 0 else None
