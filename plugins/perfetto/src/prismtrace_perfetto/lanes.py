"""Spreads slices that overlap over several lanes of a track: a viewer shows only what nests. Writes nothing."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Lanes:
    """The lanes of one track, kept between calls."""

    def __init__(self) -> None:
        self._busy: list[tuple[int, int]] = []
        self._free: list[int] = []
        self.num_lanes = 0

    def assign(self, start: NDArray[Any], end: NDArray[Any]) -> NDArray[np.int32]:
        """A lane for each slice; ``start`` ascends. A slice takes the lowest lane in which all before it have ended."""
        if not len(start):
            return np.zeros(0, np.int32)
        first = int(start[0])
        if self.num_lanes <= 1 and all(busy <= first for busy, _ in self._busy):
            latest = np.maximum.accumulate(end)
            if (start[1:] >= latest[:-1]).all():
                self._busy, self._free, self.num_lanes = [(int(latest[-1]), 0)], [], 1
                return np.zeros(len(start), np.int32)
        return np.array([self._take(s, e) for s, e in zip(start.tolist(), end.tolist(), strict=True)], np.int32)

    def _take(self, start: int, end: int) -> int:
        while self._busy and self._busy[0][0] <= start:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            lane = self.num_lanes
            self.num_lanes += 1
        heapq.heappush(self._busy, (end, lane))
        return lane


class NestedLanes:
    """The lanes of a track whose slices may lie inside one another, as calls do; only crossing slices are moved."""

    def __init__(self) -> None:
        self._open: list[list[int]] = []

    @property
    def num_lanes(self) -> int:
        """How many lanes are in use."""
        return len(self._open)

    def assign(self, start: NDArray[Any], end: NDArray[Any]) -> NDArray[np.int32]:
        """A lane for each slice; ``start`` ascends, and of equal starts the longest slice comes first."""
        return np.array([self._take(s, e) for s, e in zip(start.tolist(), end.tolist(), strict=True)], np.int32)

    def _take(self, start: int, end: int) -> int:
        for lane, stack in enumerate(self._open):
            while stack and stack[-1] <= start:
                stack.pop()
            if not stack or end <= stack[-1]:
                stack.append(end)
                return lane
        self._open.append([end])
        return len(self._open) - 1
