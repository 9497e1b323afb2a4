"""Chooses whose device memory leaves for whom.

Responsible for the order among ranks that share a device; nothing here moves or waits, which is the pager's.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from prism_sdk.runtime.oncuda.paging.tenants import Request, Tenant, Want

__all__ = ["victim", "will_park"]


def victim(request: Request, tenants: Iterable[Tenant], stuck: Collection[int], *, patience_ns: int) -> Tenant | None:
    """Whose memory goes: of those that wait the one that parked first, then those that would run last.

    Args:
        request: on whose behalf.
        tenants: all ranks.
        stuck: those of the device that are blocked in an allocation.
        patience_ns: how long a rank that is to return waits for others that could run without it.
    """
    tenants = list(tenants)
    others = [
        tenant for tenant in tenants
        if tenant.device == request.device and tenant.rank != request.rank and tenant.link is not None
        and tenant.is_there and tenant.num_bytes and not tenant.stays
    ]  # fmt: skip
    waiting = [tenant for tenant in others if tenant.parked_as and not tenant.ready_as]
    if waiting:
        return min(waiting, key=lambda tenant: tenant.parked_as)
    is_urgent = request.want is not Want.RETURN or _has_waited(request, patience_ns)
    ready = [tenant for tenant in others if tenant.parked_as]
    if ready and (is_urgent or not will_park(request, tenants, stuck, patience_ns=patience_ns)):
        return max(ready, key=lambda tenant: tenant.ready_as)
    blocked = [tenant for tenant in others if tenant.rank in stuck]
    if blocked and not will_park(request, tenants, stuck, patience_ns=patience_ns):
        return blocked[-1]
    return None


def will_park(request: Request, tenants: Iterable[Tenant], stuck: Collection[int], *, patience_ns: int) -> bool:
    """Whether another rank of the device runs, or will without our doing: it parks sooner or later."""
    for tenant in tenants:
        if tenant.device != request.device or tenant.rank == request.rank or tenant.link is None:
            continue
        if not tenant.parked_as and tenant.rank not in stuck:
            return True
        if tenant.ready_as and tenant.is_there and request.want is Want.RETURN:
            return not _has_waited(request, patience_ns)
    return False


def _has_waited(request: Request, patience_ns: int) -> bool:
    return time.monotonic_ns() - request.since_ns > patience_ns
