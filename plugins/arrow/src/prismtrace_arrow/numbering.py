"""Keeps references between rows right when a table comes back with some rows taken out. Reads no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace import ABSENT, ABSENT32

REFERENCES: Final[Mapping[tuple[str, str], str]] = {
    ("units", "awaits"): "units",
    ("events", "unit"): "units",
    ("events", "track"): "tracks",
}
"""Columns that hold the ordinal of a row of the same rank, and the table of that row."""


class Numbering:
    """Which rows of each table and rank came back so far: a trace numbers rows without gaps."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], int] = {}
        self._kept: dict[tuple[str, int], list[NDArray[np.int64]]] = {}

    @property
    def tables_with_gaps(self) -> list[str]:
        """The tables in which rows are missing."""
        return sorted({table for table, _ in self._kept})

    def add(self, table: str, rank: int, row_index: NDArray[np.int64], *, column: str) -> None:
        """Take note of rows; they must come in ascending order."""
        key = (table, rank)
        last = self._last.get(key, -1)
        if not len(row_index):
            return
        if row_index[0] <= last or (np.diff(row_index) <= 0).any():
            raise ValueError(f"column {column!r}: rank {rank} is not in ascending order; sort by rank, {column}")
        self._last[key] = int(row_index[-1])
        if key not in self._kept and int(row_index[-1]) - last == len(row_index):
            return
        self._kept.setdefault(key, [np.arange(last + 1, dtype=np.int64)]).append(row_index)

    def follow(self, table: str, rank: int, part: dict[str, Any]) -> None:
        """Change the references in rows of a table to the new ordinals; to rows that are gone they become absent."""
        for (owner, column), target in REFERENCES.items():
            values = part.get(column)
            if owner != table or (target, rank) not in self._kept or not isinstance(values, np.ndarray):
                continue
            kept = np.concatenate(self._kept[target, rank])
            self._kept[target, rank] = [kept]
            absent = ABSENT32 if values.dtype == np.int32 else ABSENT
            position = np.minimum(np.searchsorted(kept, values), len(kept) - 1)
            found = (values != absent) & (kept[position] == values)
            part[column] = np.where(found, position, absent).astype(values.dtype)
