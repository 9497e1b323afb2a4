"""The names of units as adapters gave them, and the columns that they become. Who gives them is in adapters.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_ABSENT32 = int(np.iinfo(np.int32).min)

# the registry's own columns, and named columns whose owner is Prism
_NUMBER_COLUMNS = ("microbatch", "stage", "model_chunk")
_TEXT_COLUMNS = {
    "label": "label", "part": "prism.part", "layer": "prism.layer", "schedule": "prism.schedule",
    "adapter": "prism.adapter",
}  # fmt: skip


class Names:
    """What framework adapters say of the units of one stretch; compared by identity, which is fast."""

    __slots__ = ("adapter", "label", "layer", "microbatch", "model_chunk", "part", "schedule", "stage")

    def __init__(
        self, label: str | None = None, microbatch: int | None = None, stage: int | None = None,
        model_chunk: int | None = None, part: str | None = None, layer: str | None = None,
        schedule: str | None = None, adapter: str | None = None,
    ) -> None:  # fmt: skip
        self.label = label
        self.microbatch = microbatch
        self.stage = stage
        self.model_chunk = model_chunk
        self.part = part
        self.layer = layer
        self.schedule = schedule
        self.adapter = adapter

    def with_part_of(self, other: Names) -> Names:
        """These names with the part of `other`."""
        return Names(
            self.label, self.microbatch, self.stage, self.model_chunk, other.part, self.layer, self.schedule,
            self.adapter,
        )  # fmt: skip


def name_columns(names: Sequence[Names | None]) -> dict[str, Any]:
    """The columns of rows with these names; none when no row has any."""
    if not any(names):
        return {}
    columns: dict[str, Any] = {}
    for field, column in _TEXT_COLUMNS.items():
        columns[column] = [None if one is None else getattr(one, field) for one in names]
    for field in _NUMBER_COLUMNS:
        given = [None if one is None else getattr(one, field) for one in names]
        columns[field] = np.array([_ABSENT32 if value is None else value for value in given], dtype=np.int64)
    return columns


class Notes:
    """Lists of integers for named columns, each for one unit; callables are asked when rows are written."""

    def __init__(self) -> None:
        self._notes: list[tuple[int, str, Any]] = []

    def add(self, unit: int, column: str, value: Sequence[int] | Callable[[], Sequence[int]]) -> None:
        """Keep a value for the column of row `unit`."""
        self._notes.append((unit, column, value))

    def columns(self, first: int, num: int) -> dict[str, list[list[int] | None]]:
        """The columns of rows `first` to `first + num`; what they took is forgotten."""
        columns: dict[str, list[list[int] | None]] = {}
        kept = []
        for unit, column, value in self._notes:
            if unit >= first + num:
                kept.append((unit, column, value))
                continue
            values = columns.setdefault(column, [None] * num)
            if unit >= first:
                values[unit - first] = [int(one) for one in (value() if callable(value) else value)]
        self._notes = kept
        return columns
