"""Solves the least squares behind clock alignment: unknown offsets, and drifts, from times that should be equal.

Does not read traces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_ROUNDS: Final = 12
_OUTLIER: Final = 5.0
_MAX_ITERATIONS: Final = 2000


@dataclass(frozen=True)
class Observations:
    """At `end_ns` on the clock number `clock`, the rank number `member` saw event number `event` end.

    `base_ns` is the first such time of each clock: arithmetic in floats is on distances from it.
    """

    event: Integers
    clock: Integers
    member: Integers
    end_ns: Integers
    base_ns: Integers

    @property
    def num_events(self) -> int:
        """Number of events."""
        return int(self.event.max(initial=-1)) + 1

    @property
    def num_clocks(self) -> int:
        """Number of clocks."""
        return len(self.base_ns)


@dataclass(frozen=True)
class Fit:
    """Corrections by clock; residuals by observation, after and before. The first clock is the reference."""

    offset_ns: Integers
    drift: Floats
    residual_ns: Floats
    before_ns: Floats
    num_outliers: int


def components(seen: Observations) -> list[list[int]]:
    """Sets of clocks that events connect, each sorted, the one with the first clock first."""
    label = np.arange(seen.num_clocks)
    while True:
        lowest = np.full(seen.num_events, seen.num_clocks)
        np.minimum.at(lowest, seen.event, label[seen.clock])
        fresh = label.copy()
        np.minimum.at(fresh, seen.clock, lowest[seen.event])
        if np.array_equal(fresh, label):
            break
        label = fresh
    return [np.flatnonzero(label == value).tolist() for value in np.unique(label).tolist()]


def fit(seen: Observations, *, drift: bool) -> Fit:
    """Minimises the squared distances of each event's corrected times from their mean; outliers are left out."""
    rough = _rough_offsets(seen)
    since = (seen.end_ns - seen.base_ns[seen.clock]).astype(np.float64)
    # exact in integers as far as possible: distances from the reference's base after the rough correction
    times = (seen.end_ns + rough[seen.clock] - (seen.base_ns[0] + rough[0])).astype(np.float64)
    before = (seen.end_ns - seen.base_ns[0]).astype(np.float64)
    before -= _means(before, seen.event, np.ones(len(before)), seen.num_events)[seen.event]
    scale = max(1.0, float(since.max(initial=1.0)))
    scaled = since / scale if drift else None
    solution = np.zeros(2 * seen.num_clocks)
    # the rough offsets are medians: what is far off after them is an outlier, which squares would make too much of
    weight = _trimmed(seen, _residual(seen, times, scaled, solution, np.ones(len(times))))
    residual = times
    for _ in range(_ROUNDS):
        solution = _solve(seen, times, scaled, weight)
        residual = _residual(seen, times, scaled, solution, weight)
        fresh = _trimmed(seen, residual)
        if np.array_equal(fresh, weight):
            break
        weight = fresh
    offsets, drifts = solution[: seen.num_clocks], solution[seen.num_clocks :] / scale
    offset_ns = rough - rough[0] + np.rint(offsets - offsets[0]).astype(np.int64)
    if drift:
        # the reference's clock is right by definition: turn what was found into "relative to it"
        drifts = np.where(np.arange(len(drifts)) == 0, 0.0, drifts)
    return Fit(offset_ns, drifts, residual, before, int(np.count_nonzero(weight == 0.0)))


def _trimmed(seen: Observations, residual: Floats) -> Floats:
    """Weight 0 for outliers, 1 for the others; a clock never loses more than half of its observations."""
    limit = _OUTLIER * 1.4826 * max(float(np.median(np.abs(residual))), 1.0)
    weight = (np.abs(residual) <= limit).astype(np.float64)
    kept = np.bincount(seen.clock, weight, seen.num_clocks)
    total = np.bincount(seen.clock, minlength=seen.num_clocks)
    weight[(kept < 0.5 * total)[seen.clock]] = 1.0
    return weight


def _rough_offsets(seen: Observations) -> Integers:
    """Integer offsets along a spanning tree, by medians: exact arithmetic for clocks that are years apart."""
    offset = np.zeros(seen.num_clocks, np.int64)
    done = np.zeros(seen.num_clocks, np.bool_)
    done[0] = True
    while True:
        known = done[seen.clock]
        first = np.full(seen.num_events, np.iinfo(np.int64).max)
        np.minimum.at(first, seen.event[known], (seen.end_ns + offset[seen.clock])[known])
        usable = np.flatnonzero(~known & (first[seen.event] != np.iinfo(np.int64).max))
        if not len(usable):
            return offset
        gaps = first[seen.event[usable]] - seen.end_ns[usable]
        order = np.lexsort((gaps, seen.clock[usable]))
        fresh, start, count = np.unique(seen.clock[usable][order], return_index=True, return_counts=True)
        offset[fresh] = gaps[order][start + count // 2]
        done[fresh] = True


def _means(values: Floats, event: Integers, weight: Floats, num_events: int) -> Floats:
    """Weighted mean of each event; the plain one where all of its weights are 0."""
    total = np.bincount(event, weight, num_events)
    weight = np.where((total == 0)[event], 1.0, weight)
    return np.bincount(event, weight * values, num_events) / np.bincount(event, weight, num_events)


def _residual(seen: Observations, times: Floats, since: Floats | None, solution: Floats, weight: Floats) -> Floats:
    moved = times + solution[seen.clock]
    if since is not None:
        moved = moved + solution[seen.num_clocks + seen.clock] * since
    return moved - _means(moved, seen.event, weight, seen.num_events)[seen.event]


def _solve(seen: Observations, times: Floats, since: Floats | None, weight: Floats) -> Floats:
    """Conjugate gradients on the normal equations; the reference clock (number 0) is held at zero."""
    num, clock = seen.num_clocks, seen.clock

    def project(values: Floats) -> Floats:
        return weight * (values - _means(values, seen.event, weight, seen.num_events)[seen.event])

    def gather(values: Floats) -> Floats:
        result = np.zeros(2 * num)
        result[:num] = np.bincount(clock, values, num)
        if since is not None:
            result[num:] = np.bincount(clock, values * since, num)
        result[0] = result[num] = 0.0
        return result

    def spread(solution: Floats) -> Floats:
        moved = solution[clock]
        return moved if since is None else moved + solution[num + clock] * since

    diagonal = np.zeros(2 * num)
    diagonal[:num] = np.bincount(clock, weight, num)
    if since is not None:
        diagonal[num:] = np.bincount(clock, weight * since * since, num)
    diagonal = np.where(diagonal > 0, diagonal, 1.0)
    solution = np.zeros(2 * num)
    gradient = gather(-project(times))
    target = 1e-12 * float(np.sqrt(gradient @ (gradient / diagonal))) + 1e-9
    direction = gradient / diagonal
    size = float(gradient @ direction)
    for _ in range(_MAX_ITERATIONS):
        if np.sqrt(max(size, 0.0)) <= target:
            break
        moved = gather(project(spread(direction)))
        curvature = float(direction @ moved)
        if curvature <= 0.0:
            break
        step = size / curvature
        solution += step * direction
        gradient -= step * moved
        scaled = gradient / diagonal
        following = float(gradient @ scaled)
        direction = scaled + (following / size) * direction
        size = following
    return solution
