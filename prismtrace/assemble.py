"""Joins the decoded columns of several chunks into one read-only table.

Does not read or decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
        _note_types(named, part, rank=rank, path=path)
    columns: dict[str, Column] = {}
    for spec in (*specs, *named.values()):
        if any(spec.name in part.columns for part in parts):
            found = [
                part.columns[spec.name]
                if spec.name in part.columns
                else missing_column(spec, num_rows=len(part.row_index))
                for part in parts
            ]
            columns[spec.name] = joined(found)
    return kind(rank, columns, row_index=frozen(row_index), selected=selected, named=named)


class Joiner(Generic[T]):
    """Joins parts as they come, so that each may be dropped at once: only lists and dictionaries wait for the end.

    Its result is that of `concatenate`.
    """

    def __init__(self, kind: type[T], rank: int, specs: Sequence[ColumnSpec], *, num_rows: int, path: str) -> None:
        self._kind, self._rank, self._path = kind, rank, path
        self._specs = {spec.name: spec for spec in specs}
        self._named: dict[str, ColumnSpec] = {}
        self._row_index = np.empty(num_rows, np.int64)
        self._at = 0
        self._arrays: dict[str, NDArray[Any]] = {}
        self._others: dict[str, list[Column]] = {}
        self._lengths: list[int] = []

    def add(self, part: Part) -> None:
        """Takes the next rows."""
        _note_types(self._named, part, rank=self._rank, path=self._path)
        start, self._at = self._at, self._at + len(part.row_index)
        self._row_index[start : self._at] = part.row_index
        for name, column in part.columns.items():
            if isinstance(column, np.ndarray):
                if name not in self._arrays:
                    self._arrays[name] = np.empty(len(self._row_index), column.dtype)
                    self._arrays[name][:start] = self._spec(name).default
                if column.base is not self._arrays[name]:
                    self._arrays[name][start : self._at] = column
            else:
                missing = [missing_column(self._spec(name), num_rows=count) for count in self._lengths]
                self._others.setdefault(name, missing).append(column)
        for name in self._arrays.keys() - part.columns.keys():
            self._arrays[name][start : self._at] = self._spec(name).default
        for name in self._others.keys() - part.columns.keys():
            self._others[name].append(missing_column(self._spec(name), num_rows=len(part.row_index)))
        self._lengths.append(len(part.row_index))

    def place(self, name: str, dtype: np.dtype[Any], num_rows: int) -> NDArray[Any] | None:
        """Where the next rows of a column go, so that they need no copy; None in the first part that has it."""
        array = self._arrays.get(name)
        return None if array is None or array.dtype != dtype else array[self._at : self._at + num_rows]

    def _spec(self, name: str) -> ColumnSpec:
        return self._specs.get(name) or self._named[name]

    def table(self, *, selected: frozenset[str] | None) -> T:
        """All rows that were added."""
        columns: dict[str, Column] = {}
        for name in (*self._specs, *self._named):
            if name in self._arrays:
                columns[name] = frozen(self._arrays[name])
            elif name in self._others:
                columns[name] = joined(self._others[name])
        row_index = frozen(self._row_index)
        return self._kind(self._rank, columns, row_index=row_index, selected=selected, named=self._named)


def _note_types(named: dict[str, ColumnSpec], part: Part, *, rank: int, path: str) -> None:
    """Adds the named columns of a part; refuses one that has another type in a part before."""
    for spec in part.named:
        if named.setdefault(spec.name, spec).type is not spec.type:
            types = f"{named[spec.name].type.name} and {spec.type.name}"
            raise TraceDataError(f"column {spec.name!r} of rank {rank} is {types} in two chunks", path=path)


def joined(parts: list[Any]) -> Column:
    """One column of the rows of all parts, of which there is at least one."""
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
        used = np.zeros(len(part.values) + 1, np.bool_)
        used[part.codes] = True
        remap = np.full(len(part.values) + 1, -1, np.int32)
        for code in np.flatnonzero(used[:-1]).tolist():
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
