"""Says how much of a GPU's memory a rank holds, for the launcher's account of it.

Responsible for asking torch and the driver, rarely; what the numbers mean for the job is ledger.py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from prism_sdk.runtime.oncuda.devices import num_real_devices
from prism_sdk.runtime.oncuda.ledger import DeviceMemoryError, Footprint, gib
from prism_sdk.runtime.oncuda.paging.library import current_pages

_INTERVAL_NS = 20_000_000
_CONTEXT_BYTES = 1 << 30  # more than a context and the libraries' own memory take


class FootprintReporter:
    """Looks at most fifty times a second, and never before the program has opened the GPU."""

    def __init__(self) -> None:
        self._next_ns = 0
        self._told = (0, False)

    def report(self, tell: Callable[[tuple[Any, ...]], None]) -> None:
        """Tell the launcher, unless the rank has no context on a GPU or has reported a moment ago."""
        pages = current_pages()
        if pages is not None:
            holds = (pages.stats().movable_bytes, pages.hold_still())
            if holds != self._told:
                self._told = holds
                device = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
                tell(("pages", device, *holds))
        now = time.monotonic_ns()
        if now >= self._next_ns and torch.cuda.is_initialized():
            self._next_ns = now + _INTERVAL_NS
            tell(("device", footprint()))


def footprint() -> Footprint:
    """The memory that this process holds on its current device, in bytes."""
    index = torch.cuda.current_device()
    pages = current_pages()
    free, total = torch.cuda.mem_get_info(index) if pages is None else pages.real_memory()
    reserved = torch.cuda.memory_stats(index).get("reserved_bytes.all.current", 0)
    return Footprint(index, num_real_devices(), free, total, reserved)


def out_of_memory(error: BaseException, rank: int) -> DeviceMemoryError | None:
    """Prism's own error where a rank ran out of device memory only because others share the device; else None.

    A program that fills the device alone fails as it would for real, with torch's error.
    """
    kind: Any = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
    if not isinstance(error, kind) or not torch.cuda.is_initialized():
        return None
    held = footprint()
    others = held.total_bytes - held.free_bytes - held.reserved_bytes - _CONTEXT_BYTES
    if others <= held.reserved_bytes // 16:
        return None
    return DeviceMemoryError(
        rank, device=held.device, total_bytes=held.total_bytes, free_bytes=held.free_bytes,
        reason=f"it holds {gib(held.reserved_bytes)}, the other ranks and all contexts {gib(others + _CONTEXT_BYTES)}",
    )  # fmt: skip
