"""Brings single values from the GPU to the host without holding up either.

Responsible for a copy in flight and for knowing when it is there; whose values they are is hooks.py's business.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class LateValue:
    """A scalar that is on its way. It takes no device memory: a copy there would count in the program's peak."""

    def __init__(self, value: torch.Tensor) -> None:
        self._host = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
        self._host.copy_(value.reshape(()), non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record(torch.cuda.current_stream(value.device))

    def is_there(self) -> bool:
        """Whether asking for the value would not block."""
        return bool(self._there.query())

    def __call__(self) -> float:
        """The value; blocks until it is there."""
        self._there.synchronize()
        return float(self._host.item())


def late_value(value: torch.Tensor) -> Callable[[], float]:
    """The value of a scalar on an accelerator, later; of one that is no CUDA tensor a function that asks for it."""
    return LateValue(value) if value.device.type == "cuda" else value.clone().item
