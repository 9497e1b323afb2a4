"""Brings single values from the GPU to the host without holding up either.

Responsible for a copy in flight and for knowing when it is there; whose values they are is hooks.py's business.

Pinning memory for each value would hold up the GPU (the driver waits for it), so there is one piece for many.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

_SLOT_BYTES = 16  # the largest element
_NUM_SLOTS = 1024
_free: list[torch.Tensor] = []  # slots of pinned memory


class LateValue:
    """A scalar that is on its way. It takes no device memory: a copy there would count in the program's peak."""

    def __init__(self, value: torch.Tensor) -> None:
        if not _free:
            slots = torch.empty(_NUM_SLOTS, _SLOT_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
            _free.extend(slots.unbind())
        self._slot = _free.pop()
        self._host = self._slot[: value.element_size()].view(value.dtype)
        self._host.copy_(value.reshape(1), non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record(torch.cuda.current_stream(value.device))

    def is_there(self) -> bool:
        """Whether asking for the value would not block."""
        return bool(self._there.query())

    def __call__(self) -> float:
        """The value; blocks until it is there."""
        self._there.synchronize()
        return float(self._host.item())

    def __del__(self) -> None:
        """The slot serves again once nothing is written to it any more."""
        with contextlib.suppress(Exception):  # of a GPU that has failed, of an interpreter that ends
            if self._there.query():
                _free.append(self._slot)


def late_value(value: torch.Tensor) -> Callable[[], float]:
    """The value of a scalar on an accelerator, later; of one that is no CUDA tensor a function that asks for it."""
    return LateValue(value) if value.device.type == "cuda" else value.clone().item
