"""Hands out rows of a table as Python values, a few thousand at a time, over all ranks.

Does not format them; for analysis use the columns of TraceReader, which are a hundred times faster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from prismtrace.errors import TraceUsageError
from prismtrace.model import ABSENT, ABSENT32, COLUMNS, ColumnSpec, ColumnType, TableKind
from prismtrace.reader import TraceReader
from prismtrace.rewriting import check_ranks, iter_tables
from prismtrace.tables import DictionaryColumn, ListColumn, Table

BATCH_ROWS: Final = 4096


@dataclass(frozen=True)
class RowBatch:
    """Some rows of one rank: the number of the first, and per column a list of values (None: absent)."""

    rank: int
    row_index: list[int]
    columns: dict[str, list[Any]]


def table_kind(name: str) -> TableKind:
    """The table called `name`: units, steps, scalars ..."""
    kind = TableKind.__members__.get(name.upper())
    if kind is None or kind is TableKind.UNSPECIFIED:
        known = ", ".join(kind.name.lower() for kind in TableKind if kind)
        raise TraceUsageError(f"there is no table {name!r}; there are: {known}")
    return kind


def column_names(reader: TraceReader, kind: TableKind, ranks: Sequence[int]) -> list[str]:
    """The columns that some row of the ranks has, or every row: those of the registry in its order, then the others."""
    found = dict.fromkeys(_always(kind))
    for rank in ranks if reader._index.total_rows(kind) else ():
        for table in iter_tables(reader, kind, rank):
            found.update(dict.fromkeys(table.columns()))
    known = [spec.name for spec in COLUMNS[kind]]
    return [name for name in known if name in found] + sorted(name for name in found if name not in known)


def iter_rows(
    reader: TraceReader,
    *,
    table: TableKind = TableKind.UNITS,
    ranks: Collection[int] | None = None,
    steps: range | None = None,
    columns: Sequence[str] | None = None,
    limit: int | None = None,
    names: bool = True,
) -> Iterator[RowBatch]:
    """Rows in order of rank and row.

    Args:
        reader: an open trace.
        table: which table.
        ranks: global ranks; all with data by default.
        steps: only rows of these steps (tables without a step have all their rows).
        columns: names; by default those that the rows of each batch have, and those that every row has.
        limit: stops after so many rows.
        names: enumerations as lower-case names, not numbers.
    """
    left = limit
    wanted_ranks = check_ranks(reader, ranks)
    for rank in wanted_ranks if reader._index.total_rows(table) else ():
        for part in _parts(reader, table, rank, steps):
            _check_columns(part, table, columns)
            rows = np.arange(len(part))
            if steps is not None and hasattr(part, "step"):
                step = np.asarray(part.step)
                rows = np.flatnonzero((step >= steps.start) & (step < steps.stop) & (step != ABSENT32))
            if left is not None:
                rows = rows[:left]
                left -= len(rows)
            chosen = list(dict.fromkeys([*_always(table), *part.columns()])) if columns is None else columns
            for start in range(0, len(rows), BATCH_ROWS):
                some = rows[start : start + BATCH_ROWS]
                values = {name: _values(part, table, name, some, names=names) for name in chosen}
                yield RowBatch(rank, part.row_index[some].tolist(), values)
            if left == 0:
                return


def _always(table: TableKind) -> list[str]:
    """Columns that have a value in every row, also where a chunk says nothing about them."""
    return [spec.name for spec in COLUMNS[table] if not spec.optional]


def _parts(reader: TraceReader, table: TableKind, rank: int, steps: range | None) -> Iterator[Table]:
    if table is TableKind.UNITS:
        yield from reader.iter_units(rank, steps=steps)
    else:
        yield from iter_tables(reader, table, rank)


def _check_columns(part: Table, table: TableKind, columns: Sequence[str] | None) -> None:
    known = [spec.name for spec in COLUMNS[table]]
    for name in columns or ():
        if name not in known and "." not in name:
            raise TraceUsageError(f"{table.name.lower()} have no column {name!r}; they have {', '.join(known)}")


def _values(part: Table, table: TableKind, name: str, rows: Any, *, names: bool) -> list[Any]:
    spec = next((spec for spec in COLUMNS[table] if spec.name == name), None)
    column = part.columns().get(name) if spec is None else getattr(part, name)
    if column is None:
        return [None] * len(rows)
    if isinstance(column, ListColumn):
        return [None if row is None else row.tolist() for row in column.take(rows)]
    if isinstance(column, DictionaryColumn):
        return [value.hex() if isinstance(value, bytes) else value for value in column.take(rows)]
    values: list[Any] = np.asarray(column)[rows].tolist()
    if spec is not None and spec.enum is not None:
        return _enumeration(spec, values) if names else values
    optional = spec is None or spec.optional
    if column.dtype.kind == "f":
        return [None if value != value and optional else value for value in values]
    absent = ABSENT32 if column.dtype == np.int32 else ABSENT
    return [None if value == absent else value for value in values] if optional else values


def _enumeration(spec: ColumnSpec, values: list[int]) -> list[Any]:
    assert spec.enum is not None and spec.type is ColumnType.UINT8
    words: dict[int, Any] = {int(item): item.name.lower() for item in spec.enum}
    words[0] = None
    return [words.get(value, value) for value in values]
