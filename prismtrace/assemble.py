"""Joins the decoded columns of several chunks into one read-only table.

Does not read or decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from prismtrace.errors import TraceDataError
from prismtrace.model import ColumnSpec
from prismtrace.tables import Column, DictionaryColumn, ListColumn, Table, frozen, missing_column

T = TypeVar("T", bound=Table)


@dataclass(frozen=True)
class Part:
    """Decoded rows of one chunk. `named` describes those of its columns that the registry does not have."""

    columns: dict[str, Column]
    row_index: NDArray[np.int64]
    named: tuple[ColumnSpec, ...] = ()

    def take(self, rows: NDArray[Any] | slice) -> Part:
        """The rows that a slice or a mask selects."""
        columns = {name: _taken(column, rows) for name, column in self.columns.items()}
        return Part(columns, self.row_index[rows], self.named)


def _taken(column: Column, rows: NDArray[Any] | slice) -> Column:
    if isinstance(column, np.ndarray):
        return column[rows]
    return column[rows] if isinstance(rows, slice) else column.take(rows)


def concatenate(
    kind: type[T],
    rank: int,
    specs: Sequence[ColumnSpec],
    parts: Sequence[Part],
    *,
    selected: frozenset[str] | None,
    path: str,
) -> T:
    """One table of the rows of all parts, in order."""
    rows = [part.row_index for part in parts]
    row_index = rows[0] if len(rows) == 1 else np.concatenate(rows) if rows else np.zeros(0, np.int64)
    named: dict[str, ColumnSpec] = {}
    for part in parts:
        for spec in part.named:
            if named.setdefault(spec.name, spec).type is not spec.type:
                types = f"{named[spec.name].type.name} and {spec.type.name}"
                raise TraceDataError(f"column {spec.name!r} of rank {rank} is {types} in two chunks", path=path)
    columns: dict[str, Column] = {}
    for spec in (*specs, *named.values()):
        if any(spec.name in part.columns for part in parts):
            found = [
                part.columns[spec.name]
                if spec.name in part.columns
                else missing_column(spec, num_rows=len(part.row_index))
                for part in parts
            ]
            columns[spec.name] = _joined(found)
    return kind(rank, columns, row_index=frozen(row_index), selected=selected, named=named)


def _joined(parts: list[Any]) -> Column:
    first = parts[0]
    if isinstance(first, np.ndarray):
        return frozen(first if len(parts) == 1 else np.concatenate(parts))
    if isinstance(first, DictionaryColumn):
        return _joined_dictionaries(parts)
    return _joined_lists(parts)


def _joined_dictionaries(parts: list[DictionaryColumn[Any]]) -> Column:
    values: dict[Any, int] = {}
    codes = []
    for part in parts:
        if len(parts) == 1:
            break
        used = np.unique(part.codes)
        remap = np.full(len(part.values) + 1, -1, np.int32)
        for code in used[used >= 0].tolist():
            remap[code] = values.setdefault(part.values[code], len(values))
        codes.append(remap[part.codes])
    if len(parts) == 1:
        return DictionaryColumn(frozen(parts[0].codes), parts[0].values)
    return DictionaryColumn(frozen(np.concatenate(codes)), tuple(values))


def _joined_lists(parts: list[ListColumn]) -> Column:
    if len(parts) == 1:
        part = parts[0]
        return ListColumn(frozen(part.offsets), frozen(part.values), frozen(part.valid))
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    values = np.concatenate([part.values for part in parts])
    return ListColumn(frozen(offsets), frozen(values), frozen(np.concatenate([part.valid for part in parts])))
