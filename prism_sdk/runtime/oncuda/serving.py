"""Begins to serve the device memory of this rank, as the launch wants it; the rank's side of paging.

Responsible for the order at the start of a rank, and for what is said of a rank that reached its limit.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from prism_sdk.runtime import wire
from prism_sdk.runtime.oncuda.ledger import gib
from prism_sdk.runtime.oncuda.paging.library import Pages, current_pages
from prism_sdk.runtime.ranks import PagingSpec
from prism_sdk.runtime.tracer import Tracer
from prismtrace.model import Phase

_WORKERS = 8


def serve_memory(spec: PagingSpec, *, rank: int, token: str) -> None:
    """To be called before the program opens the device."""
    if not spec.has_library:
        _limit_by_torch(spec.limit_bytes)
        return
    socket_fd = -1
    if spec.moves:
        channel = wire.connect(token)
        channel.send(("pages", rank, os.getpid()))
        socket_fd = channel.sock.detach()
    others = None if spec.others_bytes is None else spec.others_bytes.get(rank, 0)
    Pages(
        socket_fd=socket_fd, pool_fd=spec.pool_fd, rank=rank, disk=spec.disk, limit_bytes=spec.limit_bytes,
        reserve_bytes=spec.reserve_bytes, is_alone=spec.is_alone, others_bytes=others,
        num_workers=min(_WORKERS, os.cpu_count() or 1),
    )  # fmt: skip
    if spec.pool_fd >= 0:
        os.close(spec.pool_fd)  # it is mapped: what the program starts and leaves behind must not keep the memory


def _limit_by_torch(limit_bytes: int) -> None:
    """Without the library: torch's allocator refuses what is beyond a share of the device; contexts do not count."""

    def limit() -> None:
        for device in range(torch.cuda.device_count()):
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total, 1.0), device)

    torch.cuda._lazy_call(limit)  # runs when the program opens the device


def describe_limit(error: BaseException, spec: PagingSpec | None, *, tracer: Tracer) -> str:
    """What a rank held that ran out of device memory under a limit; empty for other ends."""
    kind: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
    if spec is None or not spec.limit_bytes or not isinstance(error, kind) or not torch.cuda.is_initialized():
        return ""
    stats = torch.cuda.memory_stats()
    allocated, reserved = (stats.get(f"{name}.all.current", 0) for name in ("allocated_bytes", "reserved_bytes"))
    text = (
        f"rank {tracer.rank} reached --device-memory {gib(spec.limit_bytes)} in step {tracer.step}, {_place(tracer)}: "
        f"tensors hold {gib(allocated)}, torch has reserved {gib(reserved)}"
    )
    pages = current_pages()
    if pages is not None:
        held = pages.stats()
        other = held.movable_bytes + held.fixed_bytes - reserved
        text += f", others allocated {gib(max(other, 0))}, the context takes {gib(held.overhead_bytes)}"
        text += f"; {gib(held.refused_bytes)} more were asked for"
    return text


def _place(tracer: Tracer) -> str:
    """`unit 57 (forward, layers.3)`."""
    names = tracer.names
    known = [Phase(tracer.phase).name.lower(), *([] if names is None else [names.label, names.layer])]
    return f"unit {tracer.num_units} ({', '.join(filter(None, known))})"
