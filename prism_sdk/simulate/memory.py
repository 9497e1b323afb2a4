"""Predicts the memory of a rank whose microbatches run in another order or number. It moves no units.

A forward pass leaves activations behind until the backward pass of its microbatch: the microbatch is *in flight*. The
high water of a unit is then what is always there plus the microbatches in flight times what one of them takes. The
second follows from units of one rank that ran with different numbers in flight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from prismtrace import ABSENT32, Phase, UnitKind

__all__ = ["UNKNOWN_BYTES", "in_flight", "rearranged_memory"]

Int64Array = npt.NDArray[np.int64]

#: In ``memory_bytes`` of all units of a rank: not known any more. (An absent value only says that nobody looked.)
UNKNOWN_BYTES = -2


def in_flight(columns: Mapping[str, npt.NDArray[Any]]) -> Int64Array:
    """For each unit, how many microbatches are in flight while it runs; its own one counts."""
    counts = np.zeros(len(columns["kind"]), dtype=np.int64)
    named = np.flatnonzero((columns["kind"] == UnitKind.COMPUTE) & (columns["microbatch"] != ABSENT32))
    steps, numbers = columns["step"][named].tolist(), columns["microbatch"][named].tolist()
    is_backward = (columns["phase"][named] == Phase.BACKWARD).tolist()
    last = {(step, number): at for at, (step, number) in enumerate(zip(steps, numbers, strict=True)) if is_backward[at]}
    held: set[int] = set()
    step = None
    begin = 0
    for at, row in enumerate(named.tolist()):
        if steps[at] != step:
            held, step = set(), steps[at]
        counts[begin:row] = len(held)
        begin = row
        held.add(numbers[at])
        counts[row] = len(held)
        if last.get((steps[at], numbers[at])) == at:
            held.discard(numbers[at])
            begin = row + 1
    counts[begin:] = len(held)
    return counts


def _bytes_of_one(columns: Mapping[str, npt.NDArray[Any]], counts: Int64Array) -> float | None:
    """What one microbatch in flight takes; None where the rank never ran with different numbers of them."""
    rows = (columns["kind"] == UnitKind.COMPUTE) & (columns["phase"] == Phase.FORWARD) & (columns["memory_bytes"] >= 0)
    rows &= columns["microbatch"] != ABSENT32
    if not rows.any():
        return None
    few, many = counts[rows].min(), counts[rows].max()
    if few == many:
        return None
    level = [float(np.median(columns["memory_bytes"][rows & (counts == count)])) for count in (few, many)]
    return max(level[1] - level[0], 0.0) / float(many - few)


def rearranged_memory(
    before: Mapping[str, npt.NDArray[Any]], after: Mapping[str, npt.NDArray[Any]], order: Int64Array
) -> Int64Array:
    """``memory_bytes`` of units that were taken from ``before`` in ``order`` and now run as in ``after``.

    All are ``UNKNOWN_BYTES`` where the numbers in flight change and the trace does not show what one takes.
    """
    memory = np.array(after["memory_bytes"], dtype=np.int64)
    old, new = in_flight(before), in_flight(after)
    change = new - old[order]
    if not change.any():
        return memory
    each = _bytes_of_one(before, old)
    if each is None:
        return np.full_like(memory, UNKNOWN_BYTES)
    return np.where(memory >= 0, memory + np.rint(change * each).astype(np.int64), memory)
