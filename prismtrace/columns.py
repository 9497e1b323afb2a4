"""Checks and normalises the columns that a caller hands to the writer.

Does not encode them; what leaves this module has the types of the registry and one common length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.errors import TraceUsageError
from prismtrace.model import ABSENT, ABSENT32, COLUMNS, ColumnSpec, ColumnType, TableKind
from prismtrace.tables import Column, DictionaryColumn, ListColumn, Table

MAX_STRING_BYTES: Final = 1 << 16
MAX_LIST_VALUES: Final = 1 << 24
DIGEST_BYTES: Final = 16

ColumnInput = Sequence[Any] | NDArray[Any] | DictionaryColumn[Any] | ListColumn
ColumnsInput = Mapping[str, ColumnInput | None] | Table


def normalise(table: TableKind, columns: ColumnsInput) -> tuple[int, dict[str, Column]]:
    """Number of rows, and the columns as the registry wants them."""
    if isinstance(columns, Table):
        columns = columns.columns()
    specs = {spec.name: spec for spec in COLUMNS[table]}
    result: dict[str, Column] = {}
    num_rows: int | None = None
    for name, given in columns.items():
        if name not in specs:
            known = ", ".join(specs)
            raise TraceUsageError(f"{table.name.lower()} have no column {name!r}; they have {known}")
        if given is None:
            continue
        try:
            column = _normal(specs[name], given)
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, TraceUsageError):
                raise
            raise TraceUsageError(f"column {name!r}: {error}") from error
        if num_rows is not None and len(column) != num_rows:
            raise TraceUsageError(f"column {name!r} has {len(column)} rows, the columns before it have {num_rows}")
        num_rows = len(column)
        result[name] = column
    return num_rows or 0, result


def _normal(spec: ColumnSpec, given: ColumnInput) -> Column:
    if spec.type is ColumnType.STRING:
        return _strings(spec, given)
    if spec.type is ColumnType.DIGEST:
        return _digests(spec, given)
    if spec.type is ColumnType.LIST_INT64:
        return _lists(spec, given)
    return _numbers(spec, given)


def _numbers(spec: ColumnSpec, given: Any) -> NDArray[Any]:
    dtype = spec.type.dtype
    if not isinstance(given, np.ndarray):
        given = given if isinstance(given, list | tuple) else list(given)
        if None in given:
            default = spec.default
            if not spec.optional:
                raise TraceUsageError(f"column {spec.name!r} must have a value in every row")
            given = [default if value is None else value for value in given]
        wide = np.uint64 if spec.type is ColumnType.UINT64 else None
        given = np.array(given, wide) if len(given) else np.zeros(0, dtype)
    array: NDArray[Any] = given
    if array.ndim != 1:
        raise TraceUsageError(f"column {spec.name!r} must have one dimension, it has {array.ndim}")
    allowed = {"f": "fiu", "b": "b"}.get(dtype.kind, "iub")
    if array.dtype.kind not in allowed:
        if spec.type is ColumnType.BOOL and array.dtype.kind in "iu" and not (array > 1).any():
            return array.astype(np.bool_)
        raise TraceUsageError(f"column {spec.name!r} must hold {dtype.name} values, it holds {array.dtype}")
    if array.dtype == dtype:
        return array
    if dtype.kind in "iu" and len(array):
        if spec.type is ColumnType.INT32 and spec.optional and array.dtype == np.int64:
            array = np.where(array == ABSENT, ABSENT32, array)
        low, high = int(array.min()), int(array.max())
        info = np.iinfo(dtype.type)
        if low < info.min or high > info.max:
            raise TraceUsageError(f"column {spec.name!r} must hold {dtype.name}, it has values in {low} .. {high}")
    return array.astype(dtype)


def _coded(given: Iterable[Any]) -> tuple[NDArray[np.int32], list[Any]]:
    rows = given if isinstance(given, list | tuple) else list(given)
    distinct = [value for value in dict.fromkeys(rows) if value is not None]
    codes: dict[Any, int] = {value: code for code, value in enumerate(distinct)}
    codes[None] = -1
    return np.fromiter(map(codes.__getitem__, rows), np.int32, len(rows)), distinct


def _checked_codes(spec: ColumnSpec, column: DictionaryColumn[Any]) -> NDArray[np.int32]:
    codes = np.asarray(column.codes)
    if codes.dtype.kind not in "iu" or codes.ndim != 1:
        raise TraceUsageError(f"column {spec.name!r}: codes must be a one-dimensional integer array")
    if len(codes) and not -1 <= int(codes.min()) <= int(codes.max()) < len(column.values):
        raise TraceUsageError(f"column {spec.name!r}: codes outside the {len(column.values)} values")
    return codes.astype(np.int32, copy=False)


def _strings(spec: ColumnSpec, given: Any) -> DictionaryColumn[str]:
    if isinstance(given, DictionaryColumn):
        codes, values = _checked_codes(spec, given), list(given.values)
    else:
        codes, values = _coded(given)
    for value in values:
        if not isinstance(value, str):
            raise TraceUsageError(f"column {spec.name!r} must hold str or None, it holds {type(value).__name__}")
        if len(value.encode("utf-8")) > MAX_STRING_BYTES:
            raise TraceUsageError(f"column {spec.name!r} has a string of {len(value)} characters")
    return DictionaryColumn(codes, tuple(values))


def _digests(spec: ColumnSpec, given: Any) -> DictionaryColumn[bytes]:
    if isinstance(given, DictionaryColumn):
        codes, values = _checked_codes(spec, given), list(given.values)
    else:
        codes, values = _coded(given)
    for value in values:
        if not isinstance(value, bytes) or len(value) != DIGEST_BYTES:
            raise TraceUsageError(f"column {spec.name!r} must hold digests of {DIGEST_BYTES} bytes (see add_payload)")
    return DictionaryColumn(codes, tuple(values))


def _lists(spec: ColumnSpec, given: Any) -> ListColumn:
    if isinstance(given, ListColumn):
        return _checked_lists(spec, given)
    rows: list[Any] = list(given)
    lengths = np.array([-1 if row is None else len(row) for row in rows], np.int64)
    valid = lengths >= 0
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.maximum(lengths, 0), out=offsets[1:])
    if offsets[-1] > MAX_LIST_VALUES:
        raise TraceUsageError(f"column {spec.name!r} has {offsets[-1]} list elements in one call")
    parts = [np.asarray(row, np.int64) for row in rows if row is not None and len(row)]
    values = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return ListColumn(offsets, values, valid)


def _checked_lists(spec: ColumnSpec, column: ListColumn) -> ListColumn:
    lengths = np.diff(column.offsets)
    if len(lengths) != len(column.valid) or (lengths < 0).any() or lengths[~column.valid].any():
        raise TraceUsageError(f"column {spec.name!r}: offsets, values and validity contradict each other")
    if len(lengths) and not 0 <= column.offsets[0] <= column.offsets[-1] <= len(column.values):
        raise TraceUsageError(f"column {spec.name!r}: offsets outside the values")
    return column
