"""Which CPUs a rank may use, and whether it uses any.

Responsible for dividing them up and for the two system files behind that; who runs when is coordinator.py's.
"""

from __future__ import annotations

import os
from contextlib import suppress


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
