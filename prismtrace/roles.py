"""Compares rows of a rank with the rows of a role: what is equal, shifted, mapped or different.

Does not encode, write or choose roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.columns import Rows
from prismtrace.model import ABSENT, ABSENT32, ColumnSpec, ColumnType
from prismtrace.tables import Column, DictionaryColumn, ListColumn, missing_column

MAX_MAPPED: Final = 256
"""How many distinct values of a role's column are mapped at most."""

INTEGERS: Final = frozenset((ColumnType.UINT8, ColumnType.INT32, ColumnType.INT64, ColumnType.UINT64, ColumnType.BOOL))
"""Types of columns that may be mapped, shifted or stored as a difference."""


@dataclass(frozen=True)
class Difference:
    """How a column of a rank differs from that of its role. Where `shift` or `mapped` are None, that does not do.

    `mapped[i]` stands in place of the i-th distinct value of the role's column (`distinct_values`).
    """

    spec: ColumnSpec
    same: bool
    shift: int | None = None
    mapped: NDArray[np.int64] | None = None


def wide(spec: ColumnSpec, column: NDArray[Any]) -> NDArray[np.int64]:
    """An integer column as int64, unsigned values reinterpreted."""
    if spec.type is ColumnType.UINT64:
        return np.ascontiguousarray(column).view(np.int64)
    return column.astype(np.int64, copy=False)


def present(spec: ColumnSpec, column: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Which rows of an integer column have a value; None when all have one."""
    if not spec.optional:
        return None
    valid = column != (ABSENT32 if spec.type is ColumnType.INT32 else ABSENT)
    return None if valid.all() else valid


def same_rows(one: NDArray[np.bool_] | None, other: NDArray[np.bool_] | None) -> bool:
    """Whether two columns have a value in the same rows; None stands for all rows."""
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


class Template:
    """The rows of one chunk of a role, and what comparisons with them need again and again."""

    def __init__(self, rows: Rows, *, first_row: int = 0) -> None:
        specs = tuple(spec for spec in rows.specs if not _is_default(spec, rows.columns[spec.name]))
        columns = {spec.name: rows.columns[spec.name] for spec in specs}  # what the chunk of the role holds
        self.rows, self.first_row = Rows(rows.num_rows, columns, specs), first_row
        self.specs = {spec.name: spec for spec in specs}
        self._distinct: dict[str, tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None] = {}

    def column(self, spec: ColumnSpec) -> Column:
        """A column of the role, with defaults where it has none."""
        column = self.rows.columns.get(spec.name)
        return missing_column(spec, num_rows=self.rows.num_rows) if column is None else column

    def distinct(self, spec: ColumnSpec) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None:
        """Distinct present values, the place of each in them, and where each is first; None when they are too many."""
        if spec.name not in self._distinct:
            column = self.column(spec)
            assert isinstance(column, np.ndarray)
            valid = present(spec, column)
            values = wide(spec, column if valid is None else column[valid])
            found, first, inverse = np.unique(values, return_index=True, return_inverse=True)
            few = len(found) <= min(MAX_MAPPED, max(8, len(values) // 4))
            self._distinct[spec.name] = (found, inverse, first) if few else None
        return self._distinct[spec.name]

    def keep_distinct(
        self, spec: ColumnSpec, values: NDArray[np.int64], places: NDArray[np.int64], first: NDArray[np.int64]
    ) -> None:
        """Say what `distinct` answers for a column, of which more values may be mapped than `differences` would."""
        self._distinct[spec.name] = (values, places, first)

    def differences(self, rows: Rows) -> list[Difference]:
        """Every column of the role, then those that only the rank has; and how the rank's differs."""
        specs = {**self.specs, **{spec.name: spec for spec in rows.specs}}
        found = [self._difference(spec, rows.columns.get(spec.name)) for spec in specs.values()]
        return [item for item in found if item.spec.name in self.specs or not item.same]  # so all ranks have one list

    def _difference(self, spec: ColumnSpec, given: Column | None) -> Difference:
        mine = missing_column(spec, num_rows=self.rows.num_rows) if given is None else given
        other = self.column(spec)
        if spec.name not in self.specs:
            return Difference(spec, same=_is_default(spec, mine))
        if spec.type is not self.specs[spec.name].type:
            return Difference(spec, same=False)
        if spec.type not in INTEGERS:
            return Difference(spec, same=_equal(mine, other))
        assert isinstance(mine, np.ndarray)
        assert isinstance(other, np.ndarray)
        if np.array_equal(mine, other):
            distinct = self.distinct(spec)
            return Difference(spec, True, 0, distinct[0] if distinct else None)
        valid, known = present(spec, mine), present(spec, other)
        if not same_rows(valid, known):
            return Difference(spec, same=False)
        values = wide(spec, mine if valid is None else mine[valid])
        shifts = values - wide(spec, other if valid is None else other[valid])
        shift = int(shifts[0]) if (shifts == shifts[0]).all() else None
        return Difference(spec, False, shift, self._mapped(spec, values))

    def _mapped(self, spec: ColumnSpec, values: NDArray[np.int64]) -> NDArray[np.int64] | None:
        distinct = self.distinct(spec)
        if distinct is None:
            return None
        mapped = values[distinct[2]]
        return mapped if np.array_equal(mapped[distinct[1]], values) else None


def _is_default(spec: ColumnSpec, column: Column) -> bool:
    if isinstance(column, DictionaryColumn):
        return not (column.codes >= 0).any()
    if isinstance(column, ListColumn):
        return not column.valid.any()
    if spec.type is ColumnType.FLOAT64 and spec.optional:
        return bool(np.isnan(column).all())
    return bool((column == spec.default).all())


def _equal(one: Column, other: Column) -> bool:
    if isinstance(one, DictionaryColumn) and isinstance(other, DictionaryColumn):
        if one.values == other.values:
            return np.array_equal(one.codes, other.codes)
        if not np.array_equal(one.codes >= 0, other.codes >= 0):
            return False
        pairs = np.unique(np.stack([one.codes, other.codes]), axis=1).T.tolist()
        return all(a < 0 or one.values[a] == other.values[b] for a, b in pairs)
    if isinstance(one, ListColumn) and isinstance(other, ListColumn):
        mine, theirs = _list_values(one), _list_values(other)
        same = np.array_equal(one.valid, other.valid) and np.array_equal(np.diff(one.offsets), np.diff(other.offsets))
        return same and np.array_equal(mine, theirs)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool((one.view(np.uint64) == other.view(np.uint64)).all())
    return False


def _list_values(column: ListColumn) -> NDArray[np.int64]:
    return column.values[int(column.offsets[0]) : int(column.offsets[-1])]
