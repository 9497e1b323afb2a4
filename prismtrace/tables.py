"""Holds the rows of one rank as read-only numpy columns.

Does not read files and does not interpret the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from prismtrace.model import COLUMNS, ColumnSpec, ColumnType, TableKind
from prismtrace.notebook import TableFrames

V = TypeVar("V", str, bytes)


@dataclass(frozen=True, eq=False)
class DictionaryColumn(Sequence["V | None"], Generic[V]):
    """A column of strings or digests: `codes[i]` is an index into `values`, -1 where the row has none."""

    codes: NDArray[np.int32]
    values: tuple[V, ...]

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> V | None: ...
    @overload
    def __getitem__(self, index: slice) -> DictionaryColumn[V]: ...
    def __getitem__(self, index: int | slice) -> V | DictionaryColumn[V] | None:
        if isinstance(index, slice):
            return DictionaryColumn(self.codes[index], self.values)
        code = int(self.codes[index])
        return self.values[code] if code >= 0 else None

    def __iter__(self) -> Iterator[V | None]:
        values: list[V | None] = list(self.values)
        values.append(None)
        return iter([values[code] for code in self.codes.tolist()])

    def take(self, rows: NDArray[Any]) -> DictionaryColumn[V]:
        """The rows that an index or mask array selects."""
        return DictionaryColumn(self.codes[rows], self.values)


@dataclass(frozen=True, eq=False)
class ListColumn(Sequence["NDArray[np.int64] | None"]):
    """A column of integer lists: row i is `values[offsets[i]:offsets[i + 1]]`, none where `valid[i]` is False."""

    offsets: NDArray[np.int64]
    values: NDArray[np.int64]
    valid: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.valid)

    @overload
    def __getitem__(self, index: int) -> NDArray[np.int64] | None: ...
    @overload
    def __getitem__(self, index: slice) -> ListColumn: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.int64] | ListColumn | None:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        if not self.valid[index]:
            return None
        row = int(index) % len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def take(self, rows: NDArray[Any]) -> ListColumn:
        """The rows that an index or mask array selects."""
        rows = np.arange(len(self))[rows]
        lengths = np.diff(self.offsets)[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        values = self.values[np.repeat(self.offsets[:-1][rows], lengths) + within]
        return ListColumn(frozen(offsets), frozen(values), frozen(self.valid[rows]))


Column = NDArray[Any] | DictionaryColumn[Any] | ListColumn


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """The same array, read-only."""
    if array.flags.writeable:
        array.flags.writeable = False
    return array


def frozen_column(column: Column) -> Column:
    """The same column, read-only."""
    if isinstance(column, np.ndarray):
        column.flags.writeable = False
    elif isinstance(column, DictionaryColumn):
        frozen(column.codes)
    else:
        for array in (column.offsets, column.values, column.valid):
            frozen(array)
    return column


def column_bytes(column: Column) -> int:
    """The memory of a column without the strings of its dictionary."""
    if isinstance(column, np.ndarray):
        return column.nbytes
    if isinstance(column, DictionaryColumn):
        return column.codes.nbytes
    return column.values.nbytes + column.offsets.nbytes


def list_column(sizes: NDArray[np.int64], values: NDArray[np.int64], valid: NDArray[np.bool_]) -> ListColumn:
    """A column of lists from the sizes of those that are there and all their elements, back to back."""
    full = np.zeros(len(valid), np.int64)
    full[valid] = sizes
    offsets = np.zeros(len(full) + 1, np.int64)
    np.cumsum(full, out=offsets[1:])
    return ListColumn(offsets, values, valid)


class Table(TableFrames):
    """Read-only columns as attributes, or by name as `table["owner.name"]` where the registry has no such column.

    Columns that no row has are views of one default value (zero strides).
    """

    table: ClassVar[TableKind]
    rank: int
    row_index: NDArray[np.int64]

    __slots__ = ("_columns", "_missing", "_named", "_selected", "rank", "row_index")

    def __init__(
        self,
        rank: int,
        columns: Mapping[str, Column],
        *,
        row_index: NDArray[np.int64],
        selected: frozenset[str] | None = None,
        named: Mapping[str, ColumnSpec] | None = None,
    ) -> None:
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "row_index", row_index)
        object.__setattr__(self, "_columns", dict(columns))
        object.__setattr__(self, "_selected", selected)
        object.__setattr__(self, "_named", dict(named or {}))
        object.__setattr__(self, "_missing", {})

    def __len__(self) -> int:
        return len(self.row_index)

    @property
    def first_index(self) -> int:
        """Ordinal of row 0 within its rank (0 for an empty table)."""
        return int(self.row_index[0]) if len(self) else 0

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns that hold something: those of the registry by id, then the others."""
        present: dict[str, Column] = object.__getattribute__(self, "_columns")
        registered = [spec.name for spec in COLUMNS[self.table] if spec.name in present]
        return (*registered, *(name for name in self.named_specs if name in present))

    @property
    def named_specs(self) -> Mapping[str, ColumnSpec]:
        """Name and type of the columns that the registry does not have."""
        return MappingProxyType(object.__getattribute__(self, "_named"))

    def __getitem__(self, name: str) -> Any:
        columns: dict[str, Column] = object.__getattribute__(self, "_columns")
        if name in columns:
            return columns[name]
        if any(spec.name == name for spec in COLUMNS[self.table]):
            return getattr(self, name)
        there = ", ".join(self.column_names) or "none"
        raise KeyError(f"{type(self).__name__} of rank {self.rank} has no column {name!r}; it has: {there}")

    def __getattr__(self, name: str) -> Any:
        columns: dict[str, Column] = object.__getattribute__(self, "_columns")
        if name in columns:
            return columns[name]
        spec = next((spec for spec in COLUMNS[self.table] if spec.name == name), None)
        if spec is None:
            raise AttributeError(f"{type(self).__name__} has no column {name!r}")
        selected: frozenset[str] | None = object.__getattribute__(self, "_selected")
        if selected is not None and name not in selected:
            raise AttributeError(f"column {name!r} was not read: add it to `columns`")
        missing: dict[str, Column] = object.__getattribute__(self, "_missing")
        return (
            missing.setdefault(name, missing_column(spec, num_rows=len(self))) if name not in missing else missing[name]
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is read-only")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of rank {self.rank}, {len(self)} rows>"

    def __reduce__(self) -> tuple[Any, ...]:
        selected = object.__getattribute__(self, "_selected")
        return _rebuilt, (type(self), self.rank, self.columns(), self.row_index, selected, dict(self.named_specs))

    def columns(self) -> dict[str, Column]:
        """The columns that hold something, in the form that TraceWriter accepts."""
        return dict(object.__getattribute__(self, "_columns"))


def _rebuilt(kind: type[Table], rank: int, columns: dict[str, Column], rows: Any, selected: Any, named: Any) -> Table:
    return kind(rank, columns, row_index=rows, selected=selected, named=named)


def missing_column(spec: ColumnSpec, *, num_rows: int) -> Column:
    """The column that a file says nothing about."""
    default = np.broadcast_to(np.array(spec.default, spec.type.dtype), num_rows)
    if spec.type in (ColumnType.STRING, ColumnType.DIGEST):
        return DictionaryColumn(default, ())
    if spec.type is ColumnType.LIST_INT64:
        nothing = np.broadcast_to(np.zeros((), np.bool_), num_rows)
        return ListColumn(np.broadcast_to(np.zeros((), np.int64), num_rows + 1), np.zeros(0, np.int64), nothing)
    return default


class UnitTable(Table):
    """The units of one rank, in the order in which its host program issued them."""

    table = TableKind.UNITS
    __slots__ = ()

    kind: NDArray[np.uint8]
    phase: NDArray[np.uint8]
    step: NDArray[np.int32]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    group_id: NDArray[np.uint64]
    seq: NDArray[np.int64]
    op: NDArray[np.uint8]
    reduce_op: NDArray[np.uint8]
    dtype: NDArray[np.uint8]
    num_elements_in: NDArray[np.int64]
    num_elements_out: NDArray[np.int64]
    peer: NDArray[np.int32]
    tag: NDArray[np.int64]
    is_async: NDArray[np.bool_]
    awaits: NDArray[np.int64]
    transfer_ns: NDArray[np.int64]
    gap_ns: NDArray[np.int64]
    memory_bytes: NDArray[np.int64]
    microbatch: NDArray[np.int32]
    stage: NDArray[np.int32]
    model_chunk: NDArray[np.int32]
    label: DictionaryColumn[str]
    payload_in: DictionaryColumn[bytes]
    payload_out: DictionaryColumn[bytes]
    splits_in: ListColumn
    splits_out: ListColumn

    def labels(self) -> list[str | None]:
        """The label of every row."""
        return list(self.label)

    def payload_in_at(self, row: int) -> bytes | None:
        """Digest of what the rank contributed in `row`."""
        return self.payload_in[row]

    def payload_out_at(self, row: int) -> bytes | None:
        """Digest of what the rank received in `row`."""
        return self.payload_out[row]

    def splits_in_at(self, row: int) -> NDArray[np.int64] | None:
        """Elements sent to each member in `row`."""
        return self.splits_in[row]

    def splits_out_at(self, row: int) -> NDArray[np.int64] | None:
        """Elements received from each member in `row`."""
        return self.splits_out[row]


class StepTable(Table):
    """The completed optimizer steps of one rank."""

    table = TableKind.STEPS
    __slots__ = ()

    step: NDArray[np.int32]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    loss: NDArray[np.float64]
    num_losses: NDArray[np.int32]
    memory_peak_bytes: NDArray[np.int64]
    cpu_time_ns: NDArray[np.int64]


class ScalarTable(Table):
    """Named values of one rank, in the order in which the program produced them."""

    table = TableKind.SCALARS
    __slots__ = ()

    step: NDArray[np.int32]
    name: DictionaryColumn[str]
    value: NDArray[np.float64]

    def names(self) -> list[str | None]:
        """The name of every row."""
        return list(self.name)


class EventTable(Table):
    """Imported or profiled events of one rank."""

    table = TableKind.EVENTS
    __slots__ = ()

    name: DictionaryColumn[str]
    category: DictionaryColumn[str]
    kind: NDArray[np.uint8]
    track: NDArray[np.int32]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    correlation_id: NDArray[np.int64]
    flow_id: NDArray[np.int64]
    unit: NDArray[np.int64]


class TrackTable(Table):
    """The lines of execution that events of one rank lie on; events name them by row."""

    table = TableKind.TRACKS
    __slots__ = ()

    name: DictionaryColumn[str]
    process: DictionaryColumn[str]
    kind: NDArray[np.uint8]
    process_id: NDArray[np.int64]
    thread_id: NDArray[np.int64]
    device: NDArray[np.int32]
    stream: NDArray[np.int64]
