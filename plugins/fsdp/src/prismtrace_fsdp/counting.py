"""Counts the microbatches of an ordinary training loop. Where a pipeline owns the schedule, it does nothing."""

from __future__ import annotations

import sys
from typing import Any

from prism_sdk.abc import UnitNamer

__all__ = ["Microbatches"]


class Microbatches:
    """Each forward pass of a model that comes after a backward pass begins a microbatch.

    So a loop may call its model several times for one loss. An optimizer's step begins the count anew.
    """

    def __init__(self, namer: UnitNamer) -> None:
        self._namer = namer
        self._count: dict[int, tuple[int, int]] = {}  # model -> its microbatch, and backward passes before it
        self._at_step = 0
        self._torch: Any = None

    def forward(self, model: int) -> None:
        """A forward pass of `model` (any number that tells models apart) begins; evaluation does not count."""
        if self._namer.is_scheduled:
            return
        torch = self._torch = self._torch or sys.modules["torch"]
        if not torch.is_grad_enabled():
            return
        step = self._namer.num_optimizer_steps
        if step != self._at_step:
            self._at_step = step
            self._count.clear()
        backwards = self._namer.num_backward_passes
        microbatch, before = self._count.get(model, (-1, -1))
        if backwards != before:
            microbatch += 1
            self._count[model] = microbatch, backwards
        self._namer.assume(microbatch=microbatch)
