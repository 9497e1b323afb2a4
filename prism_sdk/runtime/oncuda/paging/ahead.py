"""Chooses whose host memory is taken before its device memory has to leave.

Responsible for the choice and for how much may be taken so; the memory is touched in the ranks (pool.c), and what
leaves when is pager.py's.

A move into fresh host memory waits for the system, which hands it out at less than half the speed of the copies. So
once a device is nearly full, ranks that will leave next get their host memory while nobody waits for it.  What the pool
has already they have to map alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prism_sdk.runtime.oncuda.paging.hostpool import HostPool
from prism_sdk.runtime.oncuda.paging.links import PREPARE
from prism_sdk.runtime.oncuda.paging.tenants import IN_HOST_MEMORY, RESIDENT, Tenant

__all__ = ["AHEAD_BYTES", "Ahead"]

AHEAD_BYTES = 32 << 30
"""What may be taken ahead and not be used yet, where nobody says otherwise."""

_LEAST_BYTES = 64 << 20  # less is not worth a message
_LOOK_NS = 200_000_000  # between two questions for what a device has free
_THREADS = 2


class Ahead:
    """What is taken ahead, on all devices of one recording."""

    def __init__(
        self, budget_bytes: Callable[[], int], *, pool: Callable[[], HostPool], room_in_host: Callable[[], int],
        free_bytes: Callable[[int], int | None], least_bytes: int = _LEAST_BYTES,
    ) -> None:  # fmt: skip
        """
        Args:
            budget_bytes: what may be taken and not be in use; 0: nothing is taken ahead.
            pool: where it is taken.
            room_in_host: how many bytes more the host has room for; no more than half of it is taken.
            free_bytes: what a device has free; None: nobody can tell, and the first who finds no room does.
            least_bytes: less is left to the move.
        """
        self._budget_bytes, self._pool = budget_bytes, pool
        self._room_in_host, self._free_bytes = room_in_host, free_bytes
        self._least_bytes = least_bytes
        self._short: set[int] = set()  # devices that somebody found full, or nearly
        self._looked_ns: dict[int, int] = {}
        self._under_way: set[int] = set()  # ranks that touch memory

    def is_short(self, device: int) -> None:
        """Somebody found no room there."""
        self._short.add(device)

    def ended(self, rank: int) -> None:
        """The rank touches no more of it, or is gone."""
        self._under_way.discard(rank)

    def look(self, device: int, tenants: Iterable[Tenant]) -> None:
        """Ask the rank of the device that leaves next to take its memory, unless one does already."""
        budget = self._budget_bytes()
        if budget <= 0:
            return
        everybody = list(tenants)
        here = [one for one in everybody if one.device == device and one.where == RESIDENT and one.link is not None]
        if any(one.rank in self._under_way for one in here) or not self._is_nearly_full(device, here):
            return
        pool = self._pool()
        for tenant in sorted((one for one in here if one.parked_as and one.is_there and not one.stays), key=_turn):
            if tenant.num_bytes - pool.bytes_of(tenant.rank) < self._least_bytes:
                continue
            fresh = pool.fresh_bytes(tenant.rank, tenant.num_bytes)
            used = sum(one.num_bytes for one in everybody if one.where == IN_HOST_MEMORY)
            if fresh and (pool.held_bytes - used + fresh > budget or fresh > self._room_in_host() // 2):
                return
            if not pool.take(tenant.rank, tenant.num_bytes):
                return
            assert tenant.link is not None
            self._under_way.add(tenant.rank)
            tenant.link.send(PREPARE, _THREADS)
            return

    def _is_nearly_full(self, device: int, here: list[Tenant]) -> bool:
        """Whether one more rank like the largest would find no room."""
        now = time.monotonic_ns()
        if device not in self._short and here and now - self._looked_ns.get(device, 0) > _LOOK_NS:
            self._looked_ns[device] = now
            free = self._free_bytes(device)
            if free is not None and free < max(one.num_bytes for one in here):
                self._short.add(device)
        return device in self._short


def _turn(tenant: Tenant) -> tuple[bool, int]:
    """As choosing.victim has it: those that wait, who parked first before others; then those that would run last."""
    return tenant.ready_as > 0, -tenant.ready_as if tenant.ready_as else tenant.parked_as
