"""Counts which spans cover which stretches of time, in whole nanoseconds. It knows nothing of units or ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["coverage", "cut", "union_ns"]

Int64Array = npt.NDArray[np.int64]


def cut(*times: Int64Array) -> Int64Array:
    """All times once, in order: the bounds of the elementary stretches between them."""
    return np.unique(np.concatenate(times)) if times else np.zeros(0, dtype=np.int64)


def coverage(bounds: Int64Array, start_ns: Int64Array, end_ns: Int64Array) -> Int64Array:
    """How many of the spans [start, end) cover each stretch ``bounds[i] .. bounds[i + 1]``.

    Args:
        bounds: (B,) sorted, each once; starts and ends of all spans are among them, or outside all of them.
        start_ns: (S,).
        end_ns: (S,); spans that are empty or end before they start cover nothing.

    Returns:
        (B - 1,), or (0,) where there is no stretch.
    """
    if len(bounds) < 2:
        return np.zeros(0, dtype=np.int64)
    kept = end_ns > start_ns
    change = np.zeros(len(bounds) + 1, dtype=np.int64)
    np.add.at(change, np.searchsorted(bounds, start_ns[kept]), 1)
    np.add.at(change, np.searchsorted(bounds, end_ns[kept]), -1)
    return np.cumsum(change)[: len(bounds) - 1]


def union_ns(spans: Sequence[tuple[int, int]] | npt.NDArray[np.int64]) -> int:
    """The time that is covered by at least one of the spans (pairs of start and end)."""
    pairs = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
    bounds = cut(pairs[:, 0], pairs[:, 1])
    return int(np.diff(bounds)[coverage(bounds, pairs[:, 0], pairs[:, 1]) > 0].sum())
