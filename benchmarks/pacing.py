"""Computation that takes given times on any machine: it sleeps. It is no script."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import torch


def pause(duration_ms: float, jitter: float = 0.0) -> None:
    """Sleep, and spin over the last stretch: a sleep may end late.

    `jitter` is the standard deviation of the duration's logarithm.
    """
    until = time.monotonic() + duration_ms / 1e3 * math.exp(random.gauss(0.0, jitter))
    time.sleep(max(until - time.monotonic() - 2e-4, 0.0))
    while time.monotonic() < until:
        pass


class Pace(torch.autograd.Function):
    """The identity, which takes `forward_ms` and, on the way back, twice that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_ms: float, jitter: float = 0.0) -> torch.Tensor:
        ctx.forward_ms, ctx.jitter = forward_ms, jitter
        pause(forward_ms, jitter)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        pause(2 * ctx.forward_ms, ctx.jitter)
        return gradient, None, None
