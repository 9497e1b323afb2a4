"""Tells warmup, steady state and cooldown of a pipeline schedule apart while it runs. It plans nothing."""

from __future__ import annotations

__all__ = ["ScheduleParts"]


class ScheduleParts:
    """Follows the forward and backward passes of one step on one rank.

    *Warmup* is everything before the first backward pass, *cooldown* everything after the last forward pass, *steady*
    what lies between. The definition needs nothing but the number of forward passes and so holds for every schedule.
    """

    def __init__(self) -> None:
        self._num_forwards = 0
        self._seen_forwards = 0
        self._seen_backward = False

    def begin(self, *, num_forwards: int) -> None:
        """A step begins, in which this rank runs that many forward passes (microbatches times its stages)."""
        self._num_forwards, self._seen_forwards, self._seen_backward = num_forwards, 0, False

    def forward(self) -> str:
        """A forward pass begins: the part that it belongs to."""
        self._seen_forwards += 1
        return "steady" if self._seen_backward else "warmup"

    def backward(self) -> str:
        """A backward pass begins: the part that it belongs to."""
        self._seen_backward = True
        return "cooldown" if self._seen_forwards >= self._num_forwards else "steady"
