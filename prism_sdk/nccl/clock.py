"""Puts times of a GPU's clock on the host's: an offset and a drift, fitted between bounds, with what is left open.

It takes pairs of times; where they come from is the business of `tasks`.

A kernel cannot start before the host began to launch it, and the host cannot hear of its end before it ended. So each
kernel bounds ``host - gpu`` from below (launch) and from above (news of its end). The straight line that keeps the most
room on both sides is taken. How far it may be off is the largest distance of any line that keeps all bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismtrace import ABSENT

__all__ = ["ClockFit", "fit_clock"]

_MIN_SPAN_NS = 2_000_000_000
_MAX_DRIFT = 5e-4  # more than any clock that is in order: a slope beyond it is noise
_TOLERANCE_NS = 1000  # clocks that were not given a drift wander by less over the time this is for
_NUM_BINS = 4096
_NUM_ROUNDS = 80
_NUM_SLOPES = 33


@dataclass(frozen=True)
class ClockFit:
    """``host = gpu + offset_ns + drift * (gpu - base_ns)``.

    `uncertainty_ns`: no line that keeps all bounds is farther off, at any kernel; absent where there are bounds of one
    side only. `num_violations` counts bounds that the line breaks by more than 1 us: above 0 the
    clocks are no straight line of each other. `residual_median_ns` is the median distance of the news of an end from
    the end: mostly waiting to be polled.
    """

    offset_ns: int
    drift: float
    base_ns: int
    uncertainty_ns: int | None
    num_lower: int
    num_upper: int
    num_violations: int
    residual_median_ns: int

    def apply(self, gpu_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Host times, in ns; absent ones stay absent."""
        known = gpu_ns != ABSENT
        since = np.where(known, gpu_ns - self.base_ns, 0)
        moved = gpu_ns + self.offset_ns + np.rint(since * self.drift).astype(np.int64)
        return np.where(known, moved, ABSENT)


def fit_clock(
    launched: tuple[NDArray[np.int64], NDArray[np.int64]], ended: tuple[NDArray[np.int64], NDArray[np.int64]]
) -> ClockFit | None:
    """The line for one GPU; None if nothing is known of any end.

    Args:
        launched: (gpu time of a kernel's start, host time before its launch), ns each.
        ended: (gpu time of a kernel's end, host time at which it was known), ns each.
    """
    gpu_high, host_high = ended
    if not len(gpu_high):
        return None
    gpu_low, host_low = launched
    base = int(min(gpu_high.min(), gpu_low.min(initial=gpu_high.min())))
    shift = int(host_high[0] - gpu_high[0])  # keeps what follows small enough for floats
    high = (gpu_high - base).astype(float), (host_high - gpu_high - shift).astype(float)
    low = (gpu_low - base).astype(float), (host_low - gpu_low - shift).astype(float)
    span = float(max(high[0].max(), low[0].max(initial=0.0)))
    few_high, few_low = _closest(*high, upper=True), _closest(*low, upper=False)
    drift, bounds = 0.0, _Bounds(few_low, few_high)
    if len(few_low[0]) and (span >= _MIN_SPAN_NS or bounds.room(0.0) < 0):
        drift = bounds.roomiest_drift()
    top = bounds.top(drift)
    offset = (top + bounds.bottom(drift)) / 2 if len(few_low[0]) else top
    above = high[1] - drift * high[0] - offset
    below = offset - (low[1] - drift * low[0])
    return ClockFit(
        offset_ns=shift + round(offset), drift=drift, base_ns=base,
        uncertainty_ns=bounds.farthest(drift, offset, span) if len(few_low[0]) else None,
        num_lower=len(gpu_low), num_upper=len(gpu_high),
        num_violations=int(np.count_nonzero(above < -_TOLERANCE_NS) + np.count_nonzero(below < -_TOLERANCE_NS)),
        residual_median_ns=round(float(np.median(above))),
    )  # fmt: skip


def _closest(
    at: NDArray[np.float64], bound: NDArray[np.float64], *, upper: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The tightest bound of each of many stretches of time: the others can decide nothing."""
    if len(at) <= _NUM_BINS:
        return at, bound
    width = (at.max() - at.min()) / _NUM_BINS or 1.0
    order = np.lexsort((bound if upper else -bound, (at - at.min()) // width))
    first = np.append(True, np.diff(((at - at.min()) // width)[order]) > 0)
    return at[order][first], bound[order][first]


@dataclass(frozen=True)
class _Bounds:
    """Points (gpu time, host - gpu) that a line may not be above (`high`) or below (`low`)."""

    low: tuple[NDArray[np.float64], NDArray[np.float64]]
    high: tuple[NDArray[np.float64], NDArray[np.float64]]

    def top(self, slope: float) -> float:
        """The highest offset that keeps the bounds from above."""
        return float((self.high[1] - slope * self.high[0]).min())

    def bottom(self, slope: float) -> float:
        """The lowest offset that keeps the bounds from below."""
        return float((self.low[1] - slope * self.low[0]).max())

    def room(self, slope: float) -> float:
        """How much offset is left open; a concave function of the slope, negative where no line keeps all bounds."""
        return self.top(slope) - self.bottom(slope)

    def roomiest_drift(self) -> float:
        """The slope with the most room."""
        left, right = -_MAX_DRIFT, _MAX_DRIFT
        for _ in range(_NUM_ROUNDS):
            one, two = left + (right - left) / 3, right - (right - left) / 3
            if self.room(one) < self.room(two):
                left = one
            else:
                right = two
        return (left + right) / 2

    def farthest(self, drift: float, offset: float, span: float) -> int:
        """The largest distance, from 0 to `span`, between the line and any other that keeps all bounds."""
        if self.room(drift) < 0:
            return round(-self.room(drift) / 2)
        ends = [self._last_feasible(drift, limit) for limit in (-_MAX_DRIFT, _MAX_DRIFT)]
        farthest = 0.0
        for slope in np.linspace(ends[0], ends[1], _NUM_SLOPES):
            for other in (self.top(slope), self.bottom(slope)):
                for at in (0.0, span):
                    farthest = max(farthest, abs(other - offset + (slope - drift) * at))
        return int(np.ceil(farthest))

    def _last_feasible(self, inside: float, outside: float) -> float:
        if self.room(outside) >= 0:
            return outside
        for _ in range(_NUM_ROUNDS):
            middle = (inside + outside) / 2
            if self.room(middle) >= 0:
                inside = middle
            else:
                outside = middle
        return outside
