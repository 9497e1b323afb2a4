"""Times of spans as gaps between neighbouring begins and ends of one track. Does not compress.

On a track spans lie inside each other or apart: the sequence of all begins and ends has small gaps, where starts and
durations repeat the length of everything inside. Spans that cross another one are left out and reported as such.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Ints = NDArray[np.int64]


def in_time_order(track: Array, start: Array, end: Array) -> Ints:
    """Rows by track, then start, the longer first, then row."""
    return np.lexsort((-(end - start), start, track))


def crossing(track: Array, start: Array, end: Array) -> NDArray[np.bool_]:
    """Which spans (in time order) reach over the end of a span that began before them and still runs."""
    result = np.zeros(len(track), np.bool_)
    _, begins, who = _points(track, start, end)
    paired = _ends(begins, np.cumsum(np.where(begins, 1, -1)))
    wrong = np.zeros(len(track), np.bool_)
    actual = who[~begins]
    wrong[actual[actual != paired]] = True
    if not wrong.any():
        return result
    for number in np.unique(track[wrong]).tolist():
        rows = np.flatnonzero(track == number)
        open_ends: list[int] = []
        for row, first, last in zip(rows.tolist(), start[rows].tolist(), end[rows].tolist(), strict=True):
            while open_ends and open_ends[-1] <= first:
                open_ends.pop()
            if open_ends and open_ends[-1] < last:
                result[row] = True
            else:
                open_ends.append(last)
    return result


def _points(track: Array, start: Array, end: Array) -> tuple[Ints, NDArray[np.bool_], Ints]:
    """Times, kind and span of all begins and ends of spans that are in time order."""
    count = len(track)
    index = np.arange(count)
    times = np.concatenate([start, end])
    # At one time: ends of what began before (inner first), then begins; the end of an empty span behind its begin.
    ties = np.concatenate([2 * index + 1, np.where(end == start, 2 * index + 2, -index)])
    order = np.lexsort((ties, times, np.concatenate([track, track])))
    begins = order < count
    return times[order], begins, np.where(begins, order, order - count)


def _ends(begins: NDArray[np.bool_], depth: Array) -> Ints:
    """The span that each end closes, in order, when always the innermost one ends."""
    level = np.where(begins, depth, depth + 1)
    order = np.argsort(level, kind="stable")
    sorted_begins = begins[order]
    span = np.cumsum(begins) - 1
    closes = np.empty(len(begins), np.int64)
    ends = order[~sorted_begins]
    opens = order[sorted_begins]
    closes[ends] = span[opens]
    return closes[~begins]


def to_gaps(track: Array, start: Array, end: Array) -> tuple[NDArray[np.bool_], Ints, Ints]:
    """For spans in time order that do not cross: begin or end, span, and time since the point before, for each point.

    The first gap of a track is its absolute time.
    """
    times, begins, who = _points(track, start, end)
    gaps = np.diff(times, prepend=0)
    first = np.diff(track[who], prepend=-1) != 0
    gaps[first] = times[first]
    return begins, who, gaps


def spans_of(begins: NDArray[np.bool_]) -> Ints:
    """The span of each point, from begins and ends alone."""
    who = np.empty(len(begins), np.int64)
    who[begins] = np.arange(int(begins.sum()))
    who[~begins] = _ends(begins, np.cumsum(np.where(begins, 1, -1)))
    return who


def from_gaps(track: Array, begins: NDArray[np.bool_], gaps: Array) -> tuple[Ints, Ints]:
    """Start and end of each span; the reverse of `to_gaps`. `track` is that of each span, in time order."""
    who = spans_of(begins)
    first = np.flatnonzero(np.diff(track[who], prepend=-1) != 0)
    times = np.cumsum(gaps)
    if len(times):
        sizes = np.diff(np.append(first, len(times)))
        before = np.concatenate([[0], times])[first]
        times = times - np.repeat(before, sizes)
    count = len(track)
    start, end = np.empty(count, np.int64), np.empty(count, np.int64)
    start[who[begins]] = times[begins]
    end[who[~begins]] = times[~begins]
    return start, end
