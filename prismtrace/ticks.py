"""Converts between integer values and ticks: steps of `scale / 2**shift`, such as the grid of a clock or of a float.

Does not encode; arithmetic is modulo 2**64 and rounds to nearest, ties to even.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

FLOAT32_SHIFT: Final = 32
"""This shift stands for the grid of a float32 that was multiplied by `scale`."""

MAX_SHIFT: Final = FLOAT32_SHIFT
_UNITS: Final = ((10**9, 28), (10**6, 18), (10**3, 8))
_PROBES: Final = 12
_LARGE: Final = 1 << 26


@dataclass(frozen=True)
class Tick:
    """One step is `scale / 2**shift` units of the column, or from one float32 to the next, times `scale`."""

    scale: int = 1
    shift: int = 0

    def values(self, ticks: NDArray[np.int64]) -> NDArray[np.int64]:
        """What a number of ticks stands for."""
        if self.shift == 0:
            return ticks if self.scale == 1 else ticks * np.int64(self.scale)
        if self.shift == FLOAT32_SHIFT:
            return _of_float32(ticks, self.scale)
        half = np.int64(1 << (self.shift - 1))
        whole = ticks >> self.shift
        part = (ticks - (whole << self.shift)) * np.int64(self.scale)
        values = whole * np.int64(self.scale) + ((part + half) >> self.shift)
        tie = (part & np.int64((1 << self.shift) - 1)) == half
        values -= np.where(tie, values & 1, 0)
        return values

    def ticks(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """The nearest number of ticks."""
        if self.shift == 0 and self.scale == 1:
            return values
        if self.shift == FLOAT32_SHIFT:
            return _to_float32(values, self.scale)
        whole = values // self.scale
        part = values - whole * np.int64(self.scale)
        near = ((part << self.shift) + np.int64(self.scale // 2)) // self.scale
        ticks: NDArray[np.int64] = (whole << self.shift) + near
        return ticks


ONE: Final = Tick()


def _to_float32(values: NDArray[np.int64], scale: int) -> NDArray[np.int64]:
    """The ordinals of the float32 nearest to values / scale: 0 for 0, 1 for the smallest above it, -1 below."""
    bits = (values.astype(np.float64) / scale).astype(np.float32).view(np.int32).astype(np.int64)
    ordinals: NDArray[np.int64] = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return ordinals


def _of_float32(ordinals: NDArray[np.int64], scale: int) -> NDArray[np.int64]:
    """The values that ordinals stand for, as integers; those of no finite float32 or outside int64 are refused."""
    size = np.abs(ordinals)
    bits = np.where(ordinals < 0, size | 0x80000000, size)
    if not ((size >= 0) & (size < 0x7F800000)).all():  # before the cast, which warns of infinities and others
        raise ValueError("a tick that is no float32")
    values = np.rint(bits.astype(np.uint32).view(np.float32).astype(np.float64) * scale)
    if not ((values >= -(2.0**63)) & (values < 2.0**63)).all():
        raise ValueError("a value outside of int64")
    return values.astype(np.int64)


def find_tick(values: NDArray[np.int64], *others: NDArray[np.int64], floats: bool = True) -> Tick:
    """The coarsest tick that all values are on: an integer, a float, or a binary fraction of a power of ten."""
    parts = (values, *others)
    for scale in (1_000_000, 1000):
        if all(not len(part) or not part[0] % scale for part in parts) and not any((p % scale).any() for p in parts):
            return Tick(scale)
    for scale, shift in _UNITS:
        exact = Tick(scale, FLOAT32_SHIFT)
        if floats and _are_large(parts) and _are_on(exact, parts, _PROBES) and _are_on(exact, parts, 0):
            return exact
        if _are_on(Tick(scale, shift), parts, _PROBES) and _are_on(Tick(scale, shift), parts, 0):
            used: Any = 0
            for part in parts:
                used |= int(np.bitwise_or.reduce(Tick(scale, shift).ticks(part), initial=0))
            spare = (used & -used).bit_length() - 1 if used else 0
            return Tick(scale, max(0, shift - spare))
    return ONE


def _are_large(parts: tuple[NDArray[np.int64], ...]) -> bool:
    """Whether most values are so large that few integers are on the grid of a float32, and none is out of its range."""
    some = [np.abs(part[:: max(1, len(part) // 64)]) for part in parts]
    if not all(len(part) and int(part.mean()) > _LARGE for part in some):
        return False
    return all(int(part.max()) < 1 << 62 and int(part.min()) > -(1 << 62) for part in parts)


def _are_on(tick: Tick, parts: tuple[NDArray[np.int64], ...], probes: int) -> bool:
    """Whether values are on a tick: all of them, or some for a quick look."""
    for part in parts:
        some = part[:: max(1, len(part) // probes)] if probes else part
        if len(part) < 4 or not (tick.values(tick.ticks(some)) == some).all():
            return False
    return True
