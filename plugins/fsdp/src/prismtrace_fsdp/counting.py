"""Counts the microbatches of an ordinary training loop. Where a pipeline owns the schedule, it does nothing."""

from __future__ import annotations

import sys
from typing import Any

from prism_sdk.abc import UnitNamer

__all__ = ["Microbatches"]


class Microbatches:
    """Each forward pass of a model that comes after a backward pass begins a microbatch.

    So a loop may call its model several times for one loss. An optimizer's step begins the count anew. A pass without
    gradients counts for none: behind the backward pass of a microbatch it belongs to no microbatch.
    """

    def __init__(self, namer: UnitNamer) -> None:
        self._namer = namer
        self._count: dict[int, tuple[int, int]] = {}  # model -> its microbatch, and backward passes before it
        self._at_step = 0
        self._said_at = -1  # backward passes before the microbatch that units are said to belong to
        self._torch: Any = None

    def forward(self, model: int) -> None:
        """A forward pass of `model` (any number that tells models apart) begins; evaluation does not count."""
        if self._namer.is_scheduled:
            return
        torch = self._torch = self._torch or sys.modules["torch"]
        if torch._C._current_graph_task_id() != -1:  # recomputed in the backward pass
            return
        backwards = self._namer.num_backward_passes
        if not torch.is_grad_enabled():
            if backwards != self._said_at:
                self._said_at = backwards
                self._namer.assume()
            return
        step = self._namer.num_optimizer_steps
        if step != self._at_step:
            self._at_step = step
            self._count.clear()
        microbatch, before = self._count.get(model, (-1, -1))
        if backwards != before:
            microbatch += 1
            self._count[model] = microbatch, backwards
        self._said_at = backwards
        self._namer.assume(microbatch=microbatch)
