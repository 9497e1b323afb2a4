"""Holds what a comparison of two traces found, and puts single differences into words.

Does not compare; `diff` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from prismtrace.model import ABSENT, ABSENT32, Op, ProcessGroup, UnitKind
from prismtrace.structure import ORDER_COLUMNS, WHAT_COLUMNS, column_numbers
from prismtrace.tables import UnitTable
from prismtrace.timing import TimingChange

CATEGORIES: Final = (
    "header",
    "ranks",
    "structure",
    "times",
    "memory",
    "groups",
    "metadata",
    "scalars",
    "payloads",
    "columns",
    "events",
)
"""What `diff` tells apart and can ignore."""


@dataclass(frozen=True)
class StructureChange:
    """Units of one rank and step that were added, removed or changed. `step` None: units that belong to no step."""

    rank: int
    step: int | None
    num_added: int
    num_removed: int
    num_changed: int
    first: str
    exact: bool = True


@dataclass(frozen=True)
class ValueChange:
    """One thing that differs; None where one side does not have it."""

    category: str
    where: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class TraceDiff:
    """What changed from trace `a` to trace `b`.

    `counts` has every category that was compared and differs, with the number of differences; lists are cut at
    `max_items` each. `largest_scalar_difference` is None where no two values differ.
    """

    path_a: str
    path_b: str
    counts: Mapping[str, int]
    structure: tuple[StructureChange, ...]
    timing: tuple[TimingChange, ...]
    values: tuple[ValueChange, ...]
    num_units_a: int
    num_units_b: int
    num_ranks_identical: int
    largest_scalar_difference: float | None
    ignored: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether anything that was compared is different."""
        return bool(self.counts)


@dataclass
class Found:
    """Differences as they come up."""

    max_items: int
    counts: Counter[str] = field(default_factory=Counter)
    structure: list[StructureChange] = field(default_factory=list)
    values: list[ValueChange] = field(default_factory=list)
    shown: Counter[str] = field(default_factory=Counter)
    largest: float | None = None

    def add(self, category: str, where: str, before: object, after: object, *, number: int = 1) -> None:
        self.counts[category] += number
        if self.shown[category] < self.max_items:
            self.shown[category] += 1
            texts = [None if value is None else str(value) for value in (before, after)]
            self.values.append(ValueChange(category, where, *texts))


def value_text(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if value is None or (isinstance(value, np.integer) and int(value) in (ABSENT, ABSENT32)):
        return "absent"
    return str(value)


def group_text(group: ProcessGroup | None) -> str | None:
    if group is None:
        return None
    ranks = ",".join(map(str, group.ranks[:8])) + (" ..." if group.size > 8 else "")
    return f"{group.name!r} {group.description!r} {group.backend} {group.size} ranks: {ranks}"


def unit_change(a: UnitTable, b: UnitTable, row_a: int | None, row_b: int | None) -> str:
    """The first difference in words."""
    if row_a is None or row_b is None:
        units, row, verb = (b, row_b, "added") if row_a is None else (a, row_a, "removed")
        assert row is not None
        return f"unit {int(units.row_index[row])} {verb}: {describe_unit(units, row)}"
    parts = []
    for name in (*WHAT_COLUMNS, *ORDER_COLUMNS):
        one, two = (column_numbers(getattr(units, name)[row : row + 1]) for units, row in ((a, row_a), (b, row_b)))
        if name == "awaits":
            one, two = int(a.row_index[row_a]) - one, int(b.row_index[row_b]) - two
        if one[0] != two[0]:
            parts.append(f"{name} {value_text(getattr(a, name)[row_a])} -> {value_text(getattr(b, name)[row_b])}")
    detail = "; ".join(parts[:4]) or "group"
    return f"unit {int(a.row_index[row_a])} ({describe_unit(a, row_a)} -> {describe_unit(b, row_b)}): {detail}"


def describe_unit(units: UnitTable, row: int) -> str:
    """`all_reduce`, `compute forward`: a unit in a few words."""
    kind, op, label = int(units.kind[row]), int(units.op[row]), units.label[row]
    names = UnitKind._value2member_map_
    word = names[kind].name.lower() if kind in names else f"kind {kind}"
    if op and op in Op._value2member_map_:
        word = Op(op).name.lower()
    return f"{word} {label}" if label else word
