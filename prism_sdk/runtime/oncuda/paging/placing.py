"""Finds room in host memory for what leaves a device.

Responsible for what is taken back from ranks that were given blocks ahead, and for what the pool gives back to the
system; who leaves is choosing.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prism_sdk.runtime.oncuda.paging.hostpool import HostPool
from prism_sdk.runtime.oncuda.paging.tenants import RESIDENT, Tenant

__all__ = ["find_place", "find_room_beside"]


def find_place(tenant: Tenant, tenants: Iterable[Tenant], *, pool: HostPool, room_in_host: Callable[[], int]) -> bool:
    """Whether the rank has blocks now for all that it has on the device; else it has none.

    Args:
        tenant: the rank that leaves.
        tenants: all ranks.
        pool: where the blocks are.
        room_in_host: how many bytes the pool may grow.
    """
    tenants = list(tenants)
    while fresh_bytes := pool.fresh_bytes(tenant.rank, tenant.num_bytes):  # slow: rather what others have ahead
        if not _take_back(pool, tenants, spared=tenant):
            break
    if fresh_bytes <= max(0, room_in_host()) and pool.take(tenant.rank, tenant.num_bytes):
        return True
    pool.free(tenant.rank)
    return False


def find_room_beside(
    num_bytes: int, tenants: Iterable[Tenant], *, pool: HostPool, room_in_host: Callable[[], int]
) -> bool:
    """Whether the host has so much for something else; the pool shrinks for it as far as nothing is in it."""
    tenants = list(tenants)
    while (missing := num_bytes - room_in_host()) > 0:
        if not pool.shrink(missing) and not _take_back(pool, tenants):
            return False
    return True


def _take_back(pool: HostPool, tenants: Iterable[Tenant], *, spared: Tenant | None = None) -> bool:
    """Free what a rank was given ahead, of those that were the one that parked last. False: nobody was."""
    having = [
        tenant for tenant in tenants
        if tenant.where == RESIDENT and not tenant.is_moving and tenant is not spared and pool.bytes_of(tenant.rank)
    ]  # fmt: skip
    if having:
        pool.free(max(having, key=lambda tenant: tenant.parked_as).rank)
    return bool(having)
