"""Checks and normalises the columns that a caller hands to the writer.

Does not encode them; what leaves this module has the types of the registry and one common length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.errors import TraceUsageError
from prismtrace.model import ABSENT, ABSENT32, COLUMNS, ColumnSpec, ColumnType, TableKind, named_spec
from prismtrace.tables import Column, DictionaryColumn, ListColumn, Table

MAX_STRING_BYTES: Final = 1 << 16
MAX_LIST_VALUES: Final = 1 << 24
MAX_DICTIONARY: Final = 1 << 20
"""How many strings, or digests, the dictionary of a chunk may have."""

MAX_NAME_BYTES: Final = 1 << 10
DIGEST_BYTES: Final = 16

ColumnInput = Sequence[Any] | NDArray[Any] | DictionaryColumn[Any] | ListColumn
ColumnsInput = Mapping[str, ColumnInput | None] | Table
_T = ColumnType

VALUE_RANGES: Final[dict[ColumnType, tuple[int, int]]] = {
    ColumnType.UINT8: (0, 255),
    ColumnType.BOOL: (0, 1),
    ColumnType.INT32: (-(1 << 31), (1 << 31) - 1),
    ColumnType.INT64: (-(1 << 63), (1 << 63) - 1),
}
"""The smallest and largest value of the types of integers."""


@dataclass(frozen=True)
class Rows:
    """Rows of one table as the registry wants them. `specs` describes every column that is there, in id order."""

    num_rows: int
    columns: dict[str, Column]
    specs: tuple[ColumnSpec, ...]

    def part(self, start: int, stop: int) -> Rows:
        """Some of the rows."""
        if stop - start == self.num_rows:
            return self
        columns = {name: _between(column, start, stop) for name, column in self.columns.items()}
        return Rows(stop - start, columns, self.specs)


def _between(column: Column, start: int, stop: int) -> Column:
    if isinstance(column, ListColumn):
        return ListColumn(column.offsets[start : stop + 1], column.values, column.valid[start:stop])
    if isinstance(column, DictionaryColumn):
        return DictionaryColumn(column.codes[start:stop], column.values)
    return column[start:stop]


def normalise(table: TableKind, columns: ColumnsInput, *, types: Mapping[str, ColumnType] | None = None) -> Rows:
    """The columns as the registry wants them. `types` are those that named columns had before."""
    types = dict(types or {})
    if isinstance(columns, Table):
        types = {**types, **{spec.name: spec.type for spec in columns.named_specs.values()}}
        columns = columns.columns()
    specs = {spec.name: spec for spec in COLUMNS[table]}
    result: dict[str, Column] = {}
    found: dict[str, ColumnSpec] = {}
    num_rows: int | None = None
    for name, given in columns.items():
        if given is None:
            continue
        try:
            spec = specs.get(name) or _named(table, name, given, types)
            if spec is None:
                column: Column | None = None
                length = len(given)
            else:
                column = _normal(spec, given)
                length = len(column)
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, TraceUsageError):
                raise
            raise TraceUsageError(f"column {name!r}: {error}") from error
        if num_rows is not None and length != num_rows:
            raise TraceUsageError(f"column {name!r} has {length} rows, the columns before it have {num_rows}")
        num_rows = length
        if spec is not None and column is not None:
            result[name], found[name] = column, spec
    ordered = [spec for spec in COLUMNS[table] if spec.name in found]
    ordered += [spec for name, spec in found.items() if name not in specs]
    return Rows(num_rows or 0, result, tuple(ordered))


def check_name(name: object) -> None:
    """Refuses a name that a named column cannot have."""
    if not isinstance(name, str) or "." not in name.strip("."):
        raise TraceUsageError(f"a named column is called OWNER.NAME, not {name!r}")
    if len(name.encode("utf-8")) > MAX_NAME_BYTES:
        raise TraceUsageError(f"the column name {name[:40]!r}... is longer than {MAX_NAME_BYTES} bytes")


def _named(table: TableKind, name: str, given: Any, types: Mapping[str, ColumnType]) -> ColumnSpec | None:
    """The description of a column that the registry does not have; None when nothing tells its type."""
    if "." not in str(name):
        known = ", ".join(spec.name for spec in COLUMNS[table])
        message = f"{table.name.lower()} have no column {name!r}; they have {known} (others are called OWNER.NAME)"
        raise TraceUsageError(message)
    check_name(name)
    before, kind = types.get(name), _type_of(given)
    if kind is None or before is kind:
        return None if before is None else named_spec(name, before)
    if before is not None:
        wider = {(_T.FLOAT64, _T.INT64), (_T.FLOAT64, _T.BOOL), (_T.INT64, _T.BOOL), (_T.UINT64, _T.INT64)}
        wider |= {(_T.UINT8, _T.INT64), (_T.INT32, _T.INT64)}
        if (before, kind) not in wider:
            raise TraceUsageError(f"column {name!r} was {before.name} before, now it is {kind.name}")
        kind = before
    return named_spec(name, kind)


def _type_of(given: Any) -> ColumnType | None:
    """The type of a named column by its values: None when no row has one."""
    if isinstance(given, ListColumn):
        return _T.LIST_INT64
    if isinstance(given, DictionaryColumn):
        return _T.DIGEST if given.values and isinstance(given.values[0], bytes) else _T.STRING
    if isinstance(given, np.ndarray) and given.dtype.kind in "biuf":
        return _numpy_type(given)
    rows = given.tolist() if isinstance(given, np.ndarray) else given
    classes = {_class_of(value) for value in rows if value is not None}
    if len(classes) <= 1:
        kind = next(iter(classes), None)
    elif classes <= {_T.INT64, _T.FLOAT64}:
        kind = _T.FLOAT64
    elif classes == {_T.BOOL, _T.INT64}:
        kind = _T.INT64
    else:
        raise TraceUsageError(f"values of different types: {', '.join(sorted(kind.name for kind in classes))}")
    if kind is _T.BOOL and any(value is None for value in rows):
        return _T.INT64
    if kind is _T.INT64 and any(value is not None and value >= 1 << 63 for value in rows):
        return _T.UINT64
    return kind


def _numpy_type(given: NDArray[Any]) -> ColumnType:
    if given.dtype.kind == "u" and given.dtype.itemsize == 8 and len(given) and int(given.max()) >= 1 << 63:
        return _T.UINT64
    return {"b": _T.BOOL, "i": _T.INT64, "u": _T.INT64, "f": _T.FLOAT64}[given.dtype.kind]


def _class_of(value: Any) -> ColumnType:
    if isinstance(value, bool | np.bool_):
        return _T.BOOL
    if isinstance(value, int | np.integer):
        return _T.INT64
    if isinstance(value, float | np.floating):
        return _T.FLOAT64
    if isinstance(value, str):
        return _T.STRING
    if isinstance(value, bytes):
        return _T.DIGEST
    if isinstance(value, list | tuple | np.ndarray):
        return _T.LIST_INT64
    raise TraceUsageError(f"values of type {type(value).__name__} cannot be a column")


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
    if not isinstance(given, np.ndarray) or given.dtype.kind == "O":
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
    allowed = {"f": "fiub", "b": "b"}.get(dtype.kind, "iub")
    if array.dtype.kind not in allowed:
        if spec.type is ColumnType.BOOL and array.dtype.kind in "iu" and not ((array > 1) | (array < 0)).any():
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
    return _floats(array) if dtype.kind == "f" and spec.optional else array.astype(dtype)


def _floats(array: NDArray[Any]) -> NDArray[np.float64]:
    values = array.astype(np.float64)
    if array.dtype == np.int64:
        values[array == ABSENT] = np.nan
    return values


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
