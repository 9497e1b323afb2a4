"""Which CPUs a rank may use, and whether it uses any.

Responsible for dividing them up and for the system files behind that; who runs when is coordinator.py's.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def num_cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_share(position: int, num_shares: int) -> tuple[int, ...] | None:
    """The CPUs of one of `num_shares` equal shares of those that this process may use; None when there are too few."""
    available = sorted(os.sched_getaffinity(0))
    each = len(available) // num_shares
    return tuple(available[position * each : (position + 1) * each]) or None


def sandbox_cpus(position: int, *, num_sandbox: int, world_size: int) -> tuple[int, ...] | None:
    """The CPUs of one of `num_sandbox` sandbox ranks: as many as a rank gets that runs beside real ones.

    A calibration slice divides the CPUs among as many ranks as there are CPUs (or ranks in the job). A sandbox rank
    that got its virtual peers' share as well would not run as it did there.
    """
    return cpu_share(position, max(num_sandbox, min(num_cpus(), world_size)))


def slot_cpus(slot: int, num_slots: int) -> tuple[int, ...]:
    """An equal share of the CPUs for each slot; with more slots than CPUs several slots share one."""
    available = sorted(os.sched_getaffinity(0))
    return cpu_share(slot, num_slots) or (available[slot % len(available)],)


def set_affinity(pid: int, cpus: tuple[int, ...]) -> None:
    """Bind all threads of a process to `cpus`."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                os.sched_setaffinity(int(task), cpus)


def cpu_ticks(pid: int) -> int:
    """User and system time of a process in clock ticks; -1 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return -1


class CpuWaits:
    """For how long the calling process's main thread was ready to run and had no CPU, since this was made."""

    def __init__(self) -> None:
        self._began_ns, self._waited_ns = time.monotonic_ns(), _waited_ns()

    def percent(self) -> float | None:
        """The share of the time since then; None where the kernel does not say."""
        now = _waited_ns()
        if now is None or self._waited_ns is None:
            return None
        return 100 * (now - self._waited_ns) / max(time.monotonic_ns() - self._began_ns, 1)


def _waited_ns() -> int | None:
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # a kernel without scheduler statistics
        return None
