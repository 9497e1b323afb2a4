"""Turns rows of a trace into Arrow record batches and back. Opens no files."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from prismtrace.model import ABSENT, ABSENT32, COLUMNS, ColumnSpec, ColumnType
from prismtrace.tables import Column, DictionaryColumn, ListColumn, Table
from prismtrace_arrow.schema import (
    DERIVED_KEY,
    column_type_of,
    enum_names,
    exact_type_of,
    named_spec,
    named_types,
    row_name,
    table_kind,
)

_MAX_TEXT_BYTES: Final = 1 << 28
_CLASSES: Final = {kind.table.name.lower(): kind for kind in Table.__subclasses__()}


def record_batch(table: Table, schema: pa.Schema, *, name: str) -> pa.RecordBatch:
    """The rows of ``table`` (called ``name``) as a batch of ``schema``."""
    specs = {spec.name: spec for spec in COLUMNS[table_kind(name)]}
    present, named = table.columns(), named_types(table)
    arrays: list[pa.Array] = []
    for field in schema:
        derived = (field.metadata or {}).get(DERIVED_KEY)
        if field.name == "rank":
            arrays.append(pa.array(np.full(len(table), table.rank, np.int32)))
        elif field.name == row_name(name):
            arrays.append(pa.array(np.ascontiguousarray(table.row_index)))
        elif derived is not None:
            arrays.append(_names(specs[derived.decode()], present.get(derived.decode()), len(table)))
        else:
            spec = specs.get(field.name) or named_spec(field.name, named.get(field.name) or _type_of(field.type))
            arrays.append(_array(spec, present.get(field.name), field.type, len(table)))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _type_of(kind: pa.DataType) -> ColumnType:
    found = exact_type_of(kind)
    if found is None:
        raise TypeError(f"a named column cannot hold {kind}")
    return found


def _array(spec: ColumnSpec, column: Column | None, kind: pa.DataType, num_rows: int) -> pa.Array:
    if column is None:
        return (
            pa.nulls(num_rows, kind)
            if spec.optional or "." in spec.name
            else pa.array(np.zeros(num_rows, spec.type.dtype), kind)
        )
    if isinstance(column, DictionaryColumn):
        values = pa.array(column.values, kind)
        return values.take(pa.array(np.ascontiguousarray(column.codes), mask=column.codes < 0))
    if isinstance(column, ListColumn):
        first, last = int(column.offsets[0]), int(column.offsets[-1])
        offsets = pa.array((column.offsets - first).astype(np.int32))
        return pa.ListArray.from_arrays(offsets, pa.array(column.values[first:last]), mask=pa.array(~column.valid))
    values = np.ascontiguousarray(column)
    if not spec.optional:
        return pa.array(values, kind)
    return pa.array(values, kind, mask=_absent(spec, values))


def _absent(spec: ColumnSpec, values: NDArray[Any]) -> NDArray[np.bool_] | None:
    if spec.type is ColumnType.FLOAT64:
        missing: NDArray[np.bool_] = np.isnan(values)
    else:
        missing = values == (ABSENT32 if spec.type is ColumnType.INT32 else ABSENT)
    return missing if missing.any() else None


def _names(spec: ColumnSpec, column: Any, num_rows: int) -> pa.Array:
    """Names of enum values; null for a value that this version does not name."""
    assert spec.enum is not None
    names = enum_names(spec.enum)
    codes = np.zeros(num_rows, np.int8) if column is None else np.ascontiguousarray(column)
    unknown = codes >= len(names)
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int8), mask=unknown), names)


def max_rows_of(table: Table) -> int:
    """How many rows of ``table`` fit into one batch whatever strings they repeat."""
    longest = 1
    for column in table.columns().values():
        if isinstance(column, DictionaryColumn) and column.values:
            longest = max(longest, max(len(value) * 4 for value in column.values))
    return max(1, _MAX_TEXT_BYTES // longest)


def rows_of(table: Table, rows: NDArray[Any]) -> Table:
    """Some rows of a table."""
    columns: dict[str, Column] = {
        name: column[rows] if isinstance(column, np.ndarray) else column.take(rows)
        for name, column in table.columns().items()
    }
    about: dict[str, Any] = {"named": table.named_specs} if hasattr(table, "named_specs") else {}
    return type(table)(table.rank, columns, row_index=table.row_index[rows], **about)


def columns_of(batch: pa.RecordBatch | pa.Table, *, name: str) -> dict[str, Column]:
    """The columns of a batch that belong into the table called ``name``, in the form that a writer accepts.

    Raises:
        ValueError: a column holds what a trace cannot hold; the message names the column.
    """
    specs = {spec.name: spec for spec in COLUMNS[table_kind(name)]}
    columns: dict[str, Column] = {}
    for field, array in zip(batch.schema, batch.columns, strict=True):
        if field.name in ("rank", row_name(name)) or DERIVED_KEY in (field.metadata or {}):
            continue
        spec = specs.get(field.name)
        if spec is None and "." in field.name:
            kind = exact_type_of(field.type) or column_type_of(field.type)
            spec = named_spec(field.name, kind) if kind is not None else None
        if spec is None or array.null_count == len(array):
            continue
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        try:
            columns[field.name] = column_of(spec, array)
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise ValueError(f"column {field.name!r}: {error}") from error
    return columns


def named_rows(batch: pa.RecordBatch | pa.Table) -> dict[str, NDArray[np.bool_]]:
    """Which rows have a value, for the columns beside the registry's that do not have one everywhere."""
    found: dict[str, NDArray[np.bool_]] = {}
    for field, array in zip(batch.schema, batch.columns, strict=True):
        if "." in field.name and array.null_count:
            found[field.name] = np.asarray(array.is_valid().to_numpy(zero_copy_only=False))
    return found


def empty_rows(name: str, num_rows: int) -> dict[str, Column]:
    """Rows that say nothing: a column that is never absent, with its default."""
    spec = next(spec for spec in COLUMNS[table_kind(name)] if not spec.optional)
    return {spec.name: np.full(num_rows, spec.default, spec.type.dtype)}


def table_of(name: str, rank: int, columns: dict[str, Column], num_rows: int, schema: pa.Schema) -> Any:
    """Columns as a table, which keeps the types of named columns; as they are where there is none."""
    if not any("." in column for column in columns):
        return columns
    named = {}
    for column in columns:
        if "." in column:
            kind = exact_type_of(schema.field(column).type) or column_type_of(schema.field(column).type)
            assert kind is not None
            named[column] = named_spec(column, kind)
    about: dict[str, Any] = {"row_index": np.arange(num_rows), "named": named}
    return _CLASSES[name](rank, columns, **about)


def column_of(spec: ColumnSpec, array: pa.Array) -> Column:
    """One column of a trace from an Arrow array: null is absent."""
    if spec.type in (ColumnType.STRING, ColumnType.DIGEST):
        return _dictionary(spec, array)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if spec.type is ColumnType.LIST_INT64:
        return _lists(array)
    if spec.type is ColumnType.FLOAT64:
        return np.asarray(pc.fill_null(array.cast(pa.float64()), float("nan")).to_numpy(zero_copy_only=False))
    wanted = {ColumnType.UINT8: pa.uint8(), ColumnType.INT32: pa.int32(), ColumnType.UINT64: pa.uint64()}
    if spec.type is ColumnType.BOOL:
        array = array if pa.types.is_boolean(array.type) else array.cast(pa.int64()).cast(pa.bool_())
        return np.asarray(pc.fill_null(array, False).to_numpy(zero_copy_only=False))
    target = wanted.get(spec.type, pa.int64())
    array = array if array.type == target else array.cast(target)
    if spec.optional and array.null_count < len(array):
        lowest = pc.min(array).as_py()
        if lowest == spec.default:
            raise ValueError(f"the value {lowest} cannot be stored: it stands for absent")
    if array.null_count:
        array = pc.fill_null(array, spec.default)
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _dictionary(spec: ColumnSpec, array: pa.Array) -> Column:
    kind = pa.string() if spec.type is ColumnType.STRING else pa.binary(16)
    if pa.types.is_null(array.type):
        array = array.cast(kind)
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    values = array.dictionary.to_pylist()
    if spec.type is ColumnType.STRING and not all(isinstance(value, str) for value in values):
        raise ValueError(f"it must hold strings, it holds {array.dictionary.type}")
    codes = pc.fill_null(array.indices.cast(pa.int32()), -1).to_numpy(zero_copy_only=False)
    return DictionaryColumn(np.asarray(codes), tuple(values))


def _lists(array: pa.Array) -> ListColumn:
    if pa.types.is_null(array.type):
        array = array.cast(pa.list_(pa.int64()))
    kind = array.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise ValueError(f"it must hold lists of integers, it holds {kind}")
    values = array.flatten().cast(pa.int64())
    if values.null_count:
        raise ValueError("a list has an element without a value")
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False))
    return ListColumn(offsets, np.asarray(values.to_numpy(zero_copy_only=False)), valid)
