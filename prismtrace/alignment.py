"""Finds what was added, removed and changed between two sequences of digests.

Does not know what the digests stand for.
"""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_MAX_CELLS: Final = 1_000_000


@dataclass(frozen=True)
class Edits:
    """How one sequence becomes the other; `first_a` and `first_b` are where they part. Where long middles differ,
    elements are only counted (`exact` is False): a change then shows as one added and one removed."""

    num_added: int
    num_removed: int
    num_changed: int
    first_a: int
    first_b: int
    exact: bool = True


def compare(a: NDArray[Any], b: NDArray[Any]) -> Edits | None:
    """None when the sequences are equal."""
    shorter = min(len(a), len(b))
    unequal = np.flatnonzero(a[:shorter] != b[:shorter])
    if not len(unequal) and len(a) == len(b):
        return None
    start = int(unequal[0]) if len(unequal) else shorter
    tail_a, tail_b = a[start:][::-1], b[start:][::-1]
    rest = min(len(tail_a), len(tail_b))
    unequal = np.flatnonzero(tail_a[:rest] != tail_b[:rest])
    end = int(unequal[0]) if len(unequal) else rest
    middle_a = a[start : len(a) - end].tolist()
    middle_b = b[start : len(b) - end].tolist()
    if len(middle_a) * len(middle_b) > _MAX_CELLS:
        if len(middle_a) == len(middle_b) and _mostly_equal(middle_a, middle_b):
            changed = sum(x != y for x, y in zip(middle_a, middle_b, strict=True))
            return Edits(0, 0, changed, start, start)
        count_a, count_b = Counter(middle_a), Counter(middle_b)
        return Edits((count_b - count_a).total(), (count_a - count_b).total(), 0, start, start, exact=False)
    added = removed = changed = 0
    matcher = difflib.SequenceMatcher(None, middle_a, middle_b, autojunk=False)
    for tag, first_a, last_a, first_b, last_b in matcher.get_opcodes():
        if tag != "equal":
            both = min(last_a - first_a, last_b - first_b)
            changed += both
            removed += last_a - first_a - both
            added += last_b - first_b - both
    return Edits(added, removed, changed, start, start)


def _mostly_equal(a: list[Any], b: list[Any]) -> bool:
    return 2 * sum(1 for x, y in zip(a, b, strict=True) if x == y) > len(a)
