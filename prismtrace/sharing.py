"""Writes the same rows for many ranks at once, of which a few integer columns have other values in each rank.

Does not find out which ranks are alike (`compact` does), and does not read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from prismtrace.chunk import encode_members
from prismtrace.columns import ColumnsInput, Rows, normalise
from prismtrace.errors import TraceUsageError
from prismtrace.model import ABSENT, ABSENT32, ROLE_RANK, ColumnSpec, TableKind
from prismtrace.roles import MAX_MAPPED, Difference, Template, present, wide
from prismtrace.tables import Column, DictionaryColumn, ListColumn
from prismtrace.writer import ROWS_PER_CHUNK, TraceWriter

Replaced = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Of a column: for each row the number of what stands in its place, -1 for nothing; and [number, place of the rank]."""


def add_alike(
    writer: TraceWriter,
    ranks: Sequence[int],
    columns: ColumnsInput,
    *,
    role: int,
    table: TableKind = TableKind.UNITS,
    replaced: Mapping[str, Replaced] | None = None,
) -> None:
    """Appends rows to several ranks, stored once as those of a role.

    Args:
        writer: the trace to write to; none of the ranks has rows of this table yet.
        ranks: rising.
        columns: the rows, with the values of whatever rank.
        role: 1 .. 2**64 - 1; it has no rows of this table yet.
        table: the table that the rows belong to.
        replaced: integer columns of which each rank has values of its own.

    Raises:
        TraceUsageError: the arguments do not fit one another.
    """
    if not ranks or any(one >= other for one, other in pairwise(ranks)):
        raise TraceUsageError("ranks must be given in rising order, and there must be some")
    rows = normalise(table, columns)
    changes = {name: _Change(rows, name, *given, len(ranks)) for name, given in (replaced or {}).items()}
    for start, stop in _pieces(rows.num_rows, list(changes.values())):
        part = rows.part(start, stop)
        for template in writer.put_rows(table, ROLE_RANK, start, part, role=role):
            found = [change.differences(template, start, stop) for change in changes.values()]
            by_rank = list(zip(*(column for column in found if column), strict=True)) or [()] * len(ranks)
            writer.put(
                encode_members(table, ranks=ranks, first_row=start, role=role, template=template, differences=by_rank)
            )


def role_id_of(tables: Iterable[tuple[TableKind, int, Rows]]) -> int:
    """An id that follows from the rows of a role: one id in two files means the same rows.

    Args:
        tables: rows of the role, each with their table and the number of the first.
    """
    state = hashlib.blake2b(digest_size=8)
    for table, first, rows in tables:
        state.update(f"{table} {first} {rows.num_rows}".encode())
        for spec in rows.specs:
            state.update(f"{spec.name} {spec.type}".encode())
            state.update(_content(rows.columns[spec.name]))
    return int.from_bytes(state.digest(), "little") or 1


def _content(column: Column) -> bytes:
    """The values of a column as bytes."""
    if isinstance(column, DictionaryColumn):
        return repr(list(column)).encode("utf-8", "surrogatepass")
    if isinstance(column, ListColumn):
        return repr([None if row is None else row.tolist() for row in column]).encode()
    return np.ascontiguousarray(column).tobytes()


class _Change:
    """One column of which each rank has values of its own."""

    def __init__(
        self, rows: Rows, name: str, codes: NDArray[np.int64], values: NDArray[np.int64], num_ranks: int
    ) -> None:
        spec = next((spec for spec in rows.specs if spec.name == name), None)
        column = rows.columns.get(name)
        if spec is None or not isinstance(column, np.ndarray) or column.dtype.kind not in "iu":
            raise TraceUsageError(f"column {name!r} cannot be replaced: it is no column of integers of these rows")
        if len(codes) != rows.num_rows or (len(codes) and not -1 <= codes.min() <= codes.max() < len(values)):
            raise TraceUsageError(f"the numbers of what replaces {name!r} do not fit its {rows.num_rows} rows")
        if values.shape[1:] != (num_ranks,):
            raise TraceUsageError(f"what replaces {name!r} is of shape {values.shape}, and there are {num_ranks} ranks")
        self.spec = spec
        self._values = np.ascontiguousarray(values, np.int64)
        same: dict[bytes, int] = {}
        one_of = np.array([same.setdefault(row.tobytes(), code) for code, row in enumerate(self._values)], np.int64)
        self.codes = np.where(codes >= 0, one_of[codes], -1) if len(one_of) else codes
        self.column = wide(spec, column).copy()
        stays = (self._values == self._values[:, :1]).all(axis=1) if len(one_of) else np.zeros(0, np.bool_)
        rows_with = np.flatnonzero(self.codes >= 0)
        kept = stays[self.codes[rows_with]] & (self._values[self.codes[rows_with], 0] == self.column[rows_with])
        self.codes[rows_with[kept]] = -1  # all ranks have what the rows say
        used = self._values[np.unique(self.codes[self.codes >= 0])]
        if spec.optional and np.isin(used, (ABSENT, ABSENT32)).any():
            raise TraceUsageError(f"what replaces {name!r} is no value in some rank; such ranks are written alone")
        self._stand_in(rows)
        # rows that keep a value which others lose count too: a map knows values, not rows
        self.is_place = np.isin(self.column, self.column[self.codes >= 0])

    def _stand_in(self, rows: Rows) -> None:
        """Give replaced rows without a value that of some rank: where no row has one the role stores no column."""
        lacks = ~_has_value(self.spec, self.column) & (self.codes >= 0)
        if lacks.any():
            has = _has_value(self.spec, self._values)
            of_code = np.take_along_axis(self._values, has.argmax(axis=1)[:, None], axis=1)[:, 0]
            self.column[lacks] = of_code[self.codes[lacks]]
            given = rows.columns[self.spec.name]
            assert isinstance(given, np.ndarray)
            rows.columns[self.spec.name] = self.column.astype(given.dtype)

    def differences(self, template: Template, start: int, stop: int) -> list[Difference]:
        """For each rank how the rows from `start` on differ; empty where none of them is replaced."""
        spec = template.specs.get(self.spec.name)
        if spec is None or not (self.codes[start:stop] >= 0).any():
            return []
        column = template.column(spec)
        assert isinstance(column, np.ndarray)
        valid = present(spec, column)
        known = np.flatnonzero(valid) if valid is not None else np.arange(stop - start)
        found, first, inverse = np.unique(wide(spec, column)[known], return_index=True, return_inverse=True)
        template.keep_distinct(spec, found, inverse, first)
        codes = np.full(len(found), -1, np.int64)
        of_row = self.codes[start:stop][known]
        codes[inverse[of_row >= 0]] = of_row[of_row >= 0]
        mapped = np.where((codes >= 0)[:, None], self._values[codes], found[:, None]).T
        same = (mapped == found).all(axis=1)
        return [Difference(spec, bool(is_same), None, values) for is_same, values in zip(same, mapped, strict=True)]


def _has_value(spec: ColumnSpec, values: NDArray[np.int64]) -> NDArray[np.bool_]:
    return ~np.isin(values, (spec.default, ABSENT, ABSENT32))


def _pieces(num_rows: int, changes: list[_Change]) -> list[tuple[int, int]]:
    """Stretches of rows in which one value of a column is always replaced by the same."""
    ends: list[int] = []
    known: list[dict[int, int]] = [{} for _ in changes]
    begun = 0
    is_place = np.any([change.is_place for change in changes], axis=0) if changes else np.zeros(0, np.bool_)
    for row in np.flatnonzero(is_place).tolist():
        here = [
            (places, int(change.column[row]), int(change.codes[row]))
            for places, change in zip(known, changes, strict=True)
            if change.is_place[row]
        ]
        if row - begun >= ROWS_PER_CHUNK or any(
            places.get(value, code) != code or len(places) >= MAX_MAPPED for places, value, code in here
        ):
            ends.append(row)
            begun = row
            for places in known:
                places.clear()
        for places, value, code in here:
            places[value] = code
    bounds = [0, *ends, num_rows]
    pieces = [(start, stop) for start, stop in pairwise(bounds) if stop > start]
    return [(at, min(at + ROWS_PER_CHUNK, stop)) for start, stop in pieces for at in range(start, stop, ROWS_PER_CHUNK)]
