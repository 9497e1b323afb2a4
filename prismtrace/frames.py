"""Turns tables of one or many ranks into data frames of pyarrow, pandas or polars, which are imported when asked for.

Does not write files of these libraries; the plugin prismtrace-arrow does, in bounded memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.errors import TraceLimitError, TraceUsageError
from prismtrace.model import ABSENT, ABSENT32, COLUMNS, ColumnSpec, ColumnType
from prismtrace.tables import DictionaryColumn, ListColumn, Table, missing_column

if TYPE_CHECKING:
    from prismtrace.reader import TraceReader

__all__ = ["MAX_ROWS", "first_rows", "library", "tables_of", "to_arrow", "to_pandas", "to_polars"]

#: Rows of one data frame: about 200 bytes each.
MAX_ROWS: Final = 50_000_000


def library(name: str) -> Any:
    """Import a library of data frames; TraceUsageError says what to install where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TraceUsageError(f"this needs {name}: pip install {name}") from error


@dataclass(frozen=True)
class _Values:
    """One column: numbers with a mask of absent ones, codes into texts (-1 absent), or lists."""

    data: NDArray[Any]
    absent: NDArray[np.bool_] | None = None
    texts: tuple[Any, ...] | None = None
    lists: ListColumn | None = None


def tables_of(
    reader: TraceReader, name: str, *, ranks: Collection[int] | None = None, steps: range | int | None = None
) -> list[Table]:
    """One table of each (chosen) rank that has rows of it.

    Raises:
        TraceUsageError: there is no such table or rank.
        TraceLimitError: they are too many rows.
    """
    kinds = ("units", "steps", "scalars", "events", "tracks")
    if name not in kinds:
        raise TraceUsageError(f"there is no table {name!r}; there are: {', '.join(kinds)}")
    found, num_rows = [], 0
    for rank in reader.ranks if ranks is None else sorted(set(ranks)):
        table: Table = reader.units(rank, steps=steps) if name == "units" else getattr(reader, name)(rank)
        num_rows += len(table)
        if num_rows > MAX_ROWS:
            raise TraceLimitError(f"more than {MAX_ROWS} rows: choose ranks or steps", path=reader.path)
        found.append(table)
    return [table for table in found if len(table)] or found[:1]


def _specs(tables: Sequence[Table]) -> list[ColumnSpec]:
    """The columns that some table has: those of the registry in its order, then the named ones."""
    present = {name for table in tables for name in table.columns()}
    registered = [spec for spec in COLUMNS[tables[0].table] if spec.name in present or not spec.optional]
    named = {name: spec for table in tables for name, spec in table.named_specs.items() if name in present}
    return registered + [named[name] for name in sorted(named)]


def _columns(tables: Sequence[Table], *, names: bool) -> Iterator[tuple[str, _Values]]:
    if not tables:
        raise TraceUsageError("the trace has no ranks: there is nothing to show")
    sizes = [len(table) for table in tables]
    yield "rank", _Values(np.repeat(np.array([table.rank for table in tables], np.int32), sizes))
    yield "row_index", _Values(np.concatenate([table.row_index for table in tables]))
    for spec in _specs(tables):
        parts = [table.columns().get(spec.name) for table in tables]
        columns = [missing_column(spec, num_rows=size) if part is None else part
                   for part, size in zip(parts, sizes, strict=True)]  # fmt: skip
        yield spec.name, _joined(spec, columns, names=names)


def _joined(spec: ColumnSpec, columns: Sequence[Any], *, names: bool) -> _Values:
    if spec.type in (ColumnType.STRING, ColumnType.DIGEST):
        return _joined_texts(columns)
    if spec.type is ColumnType.LIST_INT64:
        ends = np.cumsum([0, *(len(column.values) for column in columns)])
        offsets = [column.offsets[:-1] + base for column, base in zip(columns, ends[:-1], strict=True)]
        merged = ListColumn(
            np.concatenate([*offsets, ends[-1:]]).astype(np.int64),
            np.concatenate([column.values for column in columns]),
            np.concatenate([column.valid for column in columns]),
        )
        return _Values(np.zeros(0), lists=merged)
    values = np.concatenate([np.asarray(column) for column in columns])
    if spec.enum is not None and names:
        words = tuple(item.name.lower() for item in sorted(spec.enum))
        known = values < len(words)
        if known.all():
            # 0 is UNSPECIFIED: nothing was said
            codes = values.astype(np.int32)
            return _Values(np.where(codes == 0, -1, codes), texts=words)
    if not spec.optional:
        return _Values(values)
    if spec.type is ColumnType.FLOAT64:
        return _Values(values, absent=np.isnan(values))
    return _Values(values, absent=values == (ABSENT32 if spec.type is ColumnType.INT32 else ABSENT))


def _joined_texts(columns: Sequence[DictionaryColumn[Any]]) -> _Values:
    numbers: dict[Any, int] = {}
    codes = []
    for column in columns:
        mapped = np.array([numbers.setdefault(text, len(numbers)) for text in column.values] + [-1], np.int32)
        codes.append(mapped[np.asarray(column.codes)])
    return _Values(np.concatenate(codes), texts=tuple(numbers))


def to_arrow(tables: Sequence[Table], *, names: bool = True) -> Any:
    """Tables of some ranks as one `pyarrow.Table`; texts are dictionary columns."""
    pa = library("pyarrow")
    found = {}
    for name, column in _columns(tables, names=names):
        if column.lists is not None:
            lists = column.lists
            found[name] = pa.LargeListArray.from_arrays(
                pa.array(lists.offsets), pa.array(lists.values), mask=pa.array(~lists.valid)
            )
        elif column.texts is not None:
            codes = pa.array(np.maximum(column.data, 0), mask=column.data < 0)
            kind = pa.binary() if column.texts and isinstance(column.texts[0], bytes) else pa.string()
            found[name] = pa.DictionaryArray.from_arrays(codes, pa.array(list(column.texts), kind))
        else:
            found[name] = pa.array(np.ascontiguousarray(column.data), mask=column.absent)
    return pa.table(found)


def to_pandas(tables: Sequence[Table], *, names: bool = True) -> Any:
    """Tables of some ranks as one `pandas.DataFrame`; integers that may be absent are nullable, texts categories."""
    pd = library("pandas")
    found: dict[str, Any] = {}
    for name, column in _columns(tables, names=names):
        if column.lists is not None:
            values = np.empty(len(column.lists), dtype=object)
            values[:] = list(column.lists)
            found[name] = values
        elif column.texts is not None:
            found[name] = pd.Categorical.from_codes(column.data, categories=list(column.texts))
        elif column.absent is not None and column.data.dtype.kind == "i":
            found[name] = pd.arrays.IntegerArray(np.where(column.absent, 0, column.data), column.absent)
        else:
            found[name] = np.array(column.data)
    return pd.DataFrame(found)


def to_polars(tables: Sequence[Table], *, names: bool = True) -> Any:
    """Tables of some ranks as one `polars.DataFrame`."""
    pl = library("polars")
    found = []
    for name, column in _columns(tables, names=names):
        if column.lists is not None:
            lists = [None if row is None else row.tolist() for row in column.lists]
            found.append(pl.Series(name, lists, dtype=pl.List(pl.Int64)))
        elif column.texts is not None:
            kind = pl.Binary if column.texts and isinstance(column.texts[0], bytes) else pl.String
            texts = pl.Series(name, [*column.texts, None], dtype=kind)
            found.append(texts.gather(np.where(column.data < 0, len(column.texts), column.data)))
        else:
            series = pl.Series(name, np.ascontiguousarray(column.data))
            if column.absent is not None and column.absent.any():
                series = series.scatter(np.flatnonzero(column.absent), None)
            found.append(series)
    return pl.DataFrame(found)


def first_rows(table: Table, *, limit: int) -> tuple[list[str], list[list[object]]]:
    """The names of the columns, and the first rows as Python values (None: absent)."""
    header, columns = [], []
    size = min(limit, len(table))
    for name, column in _columns([table], names=True):
        header.append(name)
        if column.lists is not None:
            columns.append([None if row is None else row.tolist() for row in column.lists[:size]])
        elif column.texts is not None:
            texts = [None if code < 0 else column.texts[code] for code in column.data[:size].tolist()]
            columns.append([text.hex() if isinstance(text, bytes) else text for text in texts])
        else:
            absent = np.zeros(size, np.bool_) if column.absent is None else column.absent[:size]
            columns.append([None if gone else value for value, gone in
                            zip(column.data[:size].tolist(), absent.tolist(), strict=True)])  # fmt: skip
    return header, [list(row) for row in zip(*columns, strict=True)]
