"""Decodes chosen columns of a chunk and refuses what contradicts itself.

Does not read files: the caller supplies the bytes of the data section.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace._generated.schema import Encoding, StreamPart
from prismtrace.chunkstreams import ChunkStreams
from prismtrace.columns import MAX_LIST_VALUES, VALUE_RANGES
from prismtrace.dictionaries import Dictionaries, add_up
from prismtrace.encoding import (
    NARROW,
    ZIGZAG,
    Stream,
    apply_differences,
    check_stream,
    decode_floats,
    decode_integers,
    decode_narrow,
    decode_zigzag,
)
from prismtrace.entries import ChunkMeta
from prismtrace.errors import TraceFormatError, TraceLimitError, TraceVersionError, reading
from prismtrace.members import Changes, changes_of, table_size
from prismtrace.model import ABSENT, ABSENT32, COLUMNS, FIRST_NAMED_COLUMN, ColumnSpec, ColumnType, TableKind
from prismtrace.repeated import Repeated
from prismtrace.roles import INTEGERS
from prismtrace.tables import Column, DictionaryColumn, frozen_column, list_column
from prismtrace.ticks import FLOAT32_SHIFT

_NOTHING: Final[frozenset[int]] = frozenset()
_ROLE_PARTS: Final = frozenset((StreamPart.MAP, StreamPart.SHIFT))
_KNOWN_PARTS: Final = _ROLE_PARTS | {StreamPart.VALUES, StreamPart.VALIDITY, StreamPart.LENGTHS, StreamPart.BITS}

Into = Callable[[str, "np.dtype[Any]"], "NDArray[Any] | None"]
"""Gives the place for the rows of a column, by name and type, where there is one already."""


class ChunkDecoder(ChunkStreams):
    """Decodes chosen columns of one chunk. `fetch(start, length)` returns bytes of its data section.

    `template` decodes the chunk of the role with the same rows, for a chunk of ranks that have one; `place` is the
    rank that is read, as its position among the `num_ranks` ranks of the chunk: None for the rows of all ranks of a
    stacked chunk, one after the other. `keep` keeps decoded columns for the next one who asks; `shared` gives the
    shared strings; `repeated` remembers columns of other chunks.
    """

    def __init__(
        self,
        meta: ChunkMeta,
        *,
        fetch: Callable[[int, int], memoryview],
        path: str,
        data_offset: int,
        template: ChunkDecoder | None = None,
        place: int | None = 0,
        num_ranks: int = 1,
        tables: dict[int, Changes] | None = None,
        keep: bool = False,
        into: Into | None = None,
        shared: Callable[[], tuple[str, ...]] = tuple,
        repeated: Repeated | None = None,
    ) -> None:
        self.named = {spec.name: spec for spec in meta.named}
        super().__init__(meta, fetch=fetch, path=path, data_offset=data_offset)
        self._meta = meta
        self._template, self._place, self._num_ranks = template, place, num_ranks
        self._tables = {} if tables is None else tables  # decoded maps and shifts, for all ranks of the chunk
        self._into, self._repeated = into, None if into else repeated  # a part of a joined table is not given to others
        self._repeat = num_ranks if place is None else 1
        self._num_rows = meta.num_rows * self._repeat
        self._kept: dict[str, Column] | None = {} if keep else None
        self._integers: dict[int, NDArray[np.int64]] = {}
        self._numbers: dict[int, NDArray[np.int64]] = {}  # of differences that are needed twice
        self._valid: dict[int | str, NDArray[np.bool_] | None] = {}
        self._bounds: dict[int, tuple[int, int]] = {}
        self._masks: dict[bytes, NDArray[np.bool_]] = {}
        self._places: dict[int, NDArray[np.int64]] = {}
        self._dictionaries = Dictionaries(self._streams, path=path, offset=data_offset, shared=shared)

    def decode(self, specs: Collection[ColumnSpec], named: frozenset[str] | None) -> dict[str, Column]:
        """The columns of `specs` that the chunk or its role holds, and those of the named ones (None = all)."""
        every = {**(self._template.named if self._template else {}), **self.named}
        wanted = [*specs, *(spec for name, spec in every.items() if named is None or name in named)]
        with reading("chunk", path=self._path, offset=self._data_offset):
            return {spec.name: column for spec in wanted if (column := self._column(spec)) is not None}

    def named_specs(self, columns: Collection[str]) -> tuple[ColumnSpec, ...]:
        """The named columns among decoded ones."""
        every = {**(self._template.named if self._template else {}), **self.named}
        return tuple(spec for name, spec in every.items() if name in columns)

    def _own(self, spec: ColumnSpec) -> frozenset[int]:
        """The parts that the chunk itself has of a column; empty for a column that only the role has."""
        if spec.column_id >= FIRST_NAMED_COLUMN and spec.name not in self.named:
            return _NOTHING
        return self._parts.get(spec.column_id, _NOTHING)

    def _of_role(self, spec: ColumnSpec) -> tuple[ChunkDecoder, ColumnSpec] | None:
        """The role's decoder and description of a column; None when it has no such column."""
        if self._template is None:
            return None
        other = self._template.named.get(spec.name) if spec.column_id >= FIRST_NAMED_COLUMN else spec
        if other is None or not self._template._own(other):
            return None
        if other.type is not spec.type:
            raise self._error(f"column {spec.name} is {spec.type.name} here and {other.type.name} in its role")
        return self._template, other

    def _differs(self, spec: ColumnSpec) -> bool:
        """Whether the values depend on the role's: there are none here, or a map, a shift or differences."""
        found = self._streams.get((spec.column_id, StreamPart.VALUES)) if self._own(spec) else None
        return found is None or found[0].encoding == Encoding.ROLE_DIFFERENCE

    def _validity(self, spec: ColumnSpec) -> NDArray[np.bool_] | None:
        if self._template is not None and self._differs(spec) and (role := self._of_role(spec)):
            known = role[0]._validity(role[1])
            if known is None or self._repeat == 1:
                return known
            if spec.name not in self._valid:
                self._valid.setdefault(spec.name, np.tile(known, self._repeat))
            return self._valid[spec.name]
        if spec.column_id in self._valid:
            return self._valid[spec.column_id]
        found = self._raw(spec.column_id, StreamPart.VALIDITY)
        valid: NDArray[np.bool_] | None = None
        if found is not None:
            stream, raw, offset = found
            rows = self._num_rows
            if stream.encoding != Encoding.PLAIN or stream.width != 1 or stream.num_values != (rows + 7) // 8:
                raise TraceFormatError(f"validity of column {spec.name}", path=self._path, offset=offset)
            valid = self._masks.get(raw)
            if valid is None:
                bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")
                if bits[rows:].any():
                    message = f"validity of column {spec.name} past its end"
                    raise TraceFormatError(message, path=self._path, offset=offset)
                valid = self._masks.setdefault(raw, bits[:rows].view(np.bool_))
        return self._valid.setdefault(spec.column_id, valid)  # one object for all threads: _places knows it by id

    def has_own(self, spec: ColumnSpec) -> bool:
        """Whether the chunk has streams of a column itself, and not its role alone."""
        return bool(self._own(spec))

    def _column(self, spec: ColumnSpec) -> Column | None:
        parts = self._own(spec)
        if not parts:
            role = self._of_role(spec)
            return role[0]._column(role[1]) if role else None
        if self._kept is None and self._repeated is not None:
            streams = [self._streams[spec.column_id, part] for part in sorted(parts)]
            return self._repeated.column(spec, streams, num_rows=self._num_rows, fetch=self._fetch,
                                         decode=lambda: self._decoded(spec, parts))  # fmt: skip
        if self._kept is None:
            return self._decoded(spec, parts)
        if spec.name not in self._kept:
            self._kept.setdefault(spec.name, frozen_column(self._decoded(spec, parts)))
        return self._kept[spec.name]

    def _decoded(self, spec: ColumnSpec, parts: frozenset[int]) -> Column:
        self._check(spec, parts)
        if spec.type is ColumnType.LIST_INT64:
            return self._lists(spec)
        if spec.type is ColumnType.FLOAT64:
            return self._floats(spec)
        if spec.type in (ColumnType.STRING, ColumnType.DIGEST):
            return self._dictionary(spec, self._integer_values(spec))
        narrow = self._narrow(spec)
        return self._typed(spec, self._integer_values(spec)) if narrow is None else self._whole(spec, narrow)

    def _check(self, spec: ColumnSpec, parts: frozenset[int]) -> None:
        """Refuses streams that do not go together, or not with the column."""
        if not parts <= _KNOWN_PARTS:
            message = f"unknown stream part {max(parts - _KNOWN_PARTS)} in column {spec.name}"
            raise TraceVersionError(message, path=self._path, offset=self._data_offset)
        if parts & _ROLE_PARTS or self._differs(spec):
            self._check_role_parts(spec, parts)
        elif (StreamPart.LENGTHS in parts) != (spec.type is ColumnType.LIST_INT64):
            raise self._error(f"column {spec.name}: lengths do not fit its type")
        if StreamPart.BITS in parts:
            values = self._streams.get((spec.column_id, StreamPart.VALUES))
            if values is None or values[0].encoding not in ZIGZAG or spec.type not in INTEGERS:
                raise self._error(f"column {spec.name} has bits of numbers without their lengths")
        if not spec.optional and StreamPart.VALIDITY in parts:
            raise self._error(f"column {spec.name} must have a value in every row")

    def _check_role_parts(self, spec: ColumnSpec, parts: frozenset[int]) -> None:
        """Refuses maps, shifts and differences without a role's column to apply them to, or beside each other."""
        if not parts & (_ROLE_PARTS | {StreamPart.VALUES}):
            raise self._error(f"column {spec.name} has no values")
        if len(parts - {StreamPart.BITS}) != 1 or spec.type not in INTEGERS:
            raise self._error(f"column {spec.name}: streams that do not go together")
        if self._of_role(spec) is None:
            raise self._error(f"column {spec.name} refers to a role that does not have it")

    def _count(self, spec: ColumnSpec) -> int:
        valid = self._validity(spec)
        return self._num_rows if valid is None else int(np.count_nonzero(valid))

    def _integer_values(self, spec: ColumnSpec) -> NDArray[np.int64]:
        """The values of the rows that have one, those of the role included."""
        parts = self._own(spec)
        if not parts:
            role = self._of_role(spec)
            assert role is not None
            return self._for_each(role[0]._integer_values(role[1]))
        if spec.column_id in self._integers:
            return self._integers[spec.column_id]
        values = self._of_ranks(spec) if parts & _ROLE_PARTS else self._stored_values(spec)
        self._integers[spec.column_id] = values
        return values

    def _for_each(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Values of the role for each rank of a stacked chunk."""
        return values if self._repeat == 1 else np.tile(values, self._repeat)

    def _narrow(self, spec: ColumnSpec) -> NDArray[Any] | None:
        """The values of the rows that have one in the type of the column, where the stream gives them at once."""
        key = (spec.column_id, int(StreamPart.VALUES))
        if key not in self._streams or self._streams[key][0].encoding not in NARROW or spec.type is ColumnType.UINT64:
            return None
        stream, raw, _ = self._counted(spec)
        return decode_narrow(stream, raw, spec.type.dtype)

    def _counted(self, spec: ColumnSpec) -> tuple[Stream, bytes, int]:
        """The VALUES stream of a column, which has as many values as there are rows with one."""
        found = self._raw(spec.column_id, StreamPart.VALUES)
        assert found is not None
        if found[0].num_values != self._count(spec):
            raise self._error(f"column {spec.name}: {found[0].num_values} values for {self._count(spec)} rows")
        return found

    def _stored_values(self, spec: ColumnSpec) -> NDArray[np.int64]:
        stream, position = self._streams[spec.column_id, StreamPart.VALUES]
        check_stream(stream, path=self._path, offset=self._data_offset + position)
        if stream.num_values != self._count(spec):
            raise self._error(f"column {spec.name}: {stream.num_values} values for {self._count(spec)} rows")
        if (bounds := stream.bounds()) is not None:
            self._bounds[spec.column_id] = bounds
        reference = None
        if stream.encoding == Encoding.DIFFERENCE:
            reference = self._reference(spec, stream)
            if reference is not None and spec.column_id in self._numbers:
                return apply_differences(stream, self._numbers[spec.column_id], reference)
        elif stream.encoding == Encoding.CONTINUED:
            reference = self._lengths(spec, stream)
        elif stream.encoding == Encoding.ROLE_DIFFERENCE and (role := self._of_role(spec)):
            reference = self._for_each(role[0]._integer_values(role[1]))
        found = self._raw(spec.column_id, StreamPart.VALUES)
        assert found is not None
        bits = self._bits(spec.column_id, stream)
        return decode_integers(stream, found[1], path=self._path, offset=found[2], reference=reference, bits=bits)

    def _lengths(self, spec: ColumnSpec, stream: Stream) -> NDArray[np.int64]:
        """Ticks from each value of a column to the value of the column that continues it in the same row."""
        other = self._spec_of(stream.reference)
        found = self._raw(stream.reference, StreamPart.VALUES)
        if other is None or found is None or found[0].encoding != Encoding.DIFFERENCE:
            raise self._error(f"column {spec.name} is continued by column {stream.reference}")
        if found[0].reference != spec.column_id or found[0].num_values != self._count(other):
            raise self._error(f"column {spec.name} and column {other.name} do not belong together")
        lengths = self._numbers[stream.reference] = decode_zigzag(
            found[0], found[1], self._bits(stream.reference, found[0])
        )
        if found[0].tick != stream.tick:
            if found[0].shift or stream.shift == FLOAT32_SHIFT:
                raise self._error(f"column {spec.name} is continued by a column of other ticks")
            lengths = stream.tick.ticks(found[0].tick.values(lengths))
        mine, theirs = self._validity(spec), self._validity(other)
        if theirs is None and mine is None:
            return lengths
        theirs = np.ones(self._num_rows, np.bool_) if theirs is None else theirs
        if mine is not None and (theirs & ~mine).any():
            raise self._error(f"column {other.name} has values where column {spec.name} has none")
        full = np.zeros(self._num_rows, np.int64)
        full[theirs] = lengths
        return full if mine is None else full[mine]

    def _spec_of(self, column: int) -> ColumnSpec | None:
        """The INT64 column of the registry that has an id."""
        specs = COLUMNS[TableKind(self._meta.table)]
        return next((o for o in specs if o.column_id == column and o.type is ColumnType.INT64), None)

    def _of_ranks(self, spec: ColumnSpec) -> NDArray[np.int64]:
        """The role's values, shifted or mapped for this rank, or for all ranks of a stacked chunk."""
        role = self._of_role(spec)
        assert role is not None
        return self._changes(spec).of_rank(role[0]._integer_values(role[1]), self._place)

    def _changes(self, spec: ColumnSpec) -> Changes:
        """The shift or map of a column, of all ranks of the chunk."""
        if spec.column_id in self._tables:
            return self._tables[spec.column_id]
        is_map = (spec.column_id, StreamPart.MAP) in self._streams
        part = StreamPart.MAP if is_map else StreamPart.SHIFT
        num_values = self._streams[spec.column_id, part][0].num_values
        num = table_size(num_values, self._num_ranks, mapped=is_map)
        if not num:
            raise self._error(f"column {spec.name}: {num_values} values for {self._num_ranks} ranks")
        found = self._raw(spec.column_id, part)
        assert found is not None
        stream, raw, offset = found
        changes = changes_of(decode_integers(stream, raw, path=self._path, offset=offset), num, mapped=is_map)
        if changes is None:
            raise self._error(f"column {spec.name}: a map that has a value twice")
        return self._tables.setdefault(spec.column_id, changes)

    def _reference(self, spec: ColumnSpec, stream: Stream) -> NDArray[np.int64] | None:
        other = self._spec_of(stream.reference)
        if other is None or other.column_id >= spec.column_id:
            raise self._error(f"column {spec.name} refers to column {stream.reference}")
        if parts := self._own(other):
            self._check(other, parts)
        elif self._of_role(other) is None:
            return None
        values, rows, wanted = self._integer_values(other), self._validity(other), self._validity(spec)
        if rows is None:
            return values if wanted is None else values[wanted]
        if wanted is None or (wanted & ~rows).any():
            return None
        return values[wanted[rows]]

    def _typed(self, spec: ColumnSpec, values: NDArray[np.int64]) -> Column:
        if spec.type is ColumnType.UINT64:
            return values.view(np.uint64)
        dtype = spec.type.dtype
        least, most = VALUE_RANGES[spec.type]
        if spec.optional:
            least += 1  # stands for absent
        low, high = self._bounds.get(spec.column_id, (least - 1, most))
        if (low < least or high > most) and len(values):
            low, high = int(values.min()), int(values.max())
            if low < least or high > most:
                raise self._error(f"column {spec.name} has values in {low} .. {high}")
        return self._whole(spec, values.astype(dtype, copy=False))

    def _whole(self, spec: ColumnSpec, values: NDArray[Any]) -> NDArray[Any]:
        """A column of all rows from the values of those that have one."""
        valid = self._validity(spec)
        if valid is None:
            return values
        absent = ABSENT32 if spec.type is ColumnType.INT32 else ABSENT
        return self._spread(values, valid, absent, self._into and self._into(spec.name, values.dtype))

    def _spread(
        self, values: NDArray[Any], valid: NDArray[np.bool_], absent: float, full: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """The values in the rows that have one, `absent` in the others."""
        places = self._places.get(id(valid))  # masks live as long as this decoder, or its role's
        if places is None:
            places = self._places[id(valid)] = np.flatnonzero(valid)
        full = np.empty(self._num_rows, values.dtype) if full is None else full
        full.fill(absent)
        full[places] = values
        return full

    def _floats(self, spec: ColumnSpec) -> Column:
        stream, raw, offset = self._counted(spec)
        values = decode_floats(stream, raw, path=self._path, offset=offset)
        valid = self._validity(spec)
        if valid is None:
            return values
        return self._spread(values, valid, np.nan)

    def _dictionary(self, spec: ColumnSpec, values: NDArray[np.int64]) -> Column:
        dictionary: tuple[Any, ...] = (
            self._dictionaries.strings(self._raw)
            if spec.type is ColumnType.STRING
            else self._dictionaries.digests(self._raw)
        )
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < len(dictionary):
            raise self._error(f"column {spec.name}: code outside the dictionary of {len(dictionary)}")
        valid = self._validity(spec)
        codes = values.astype(np.int32)
        return DictionaryColumn(codes if valid is None else self._spread(codes, valid, -1), dictionary)

    def _lists(self, spec: ColumnSpec) -> Column:
        lengths = self._raw(spec.column_id, StreamPart.LENGTHS)
        data = self._raw(spec.column_id, StreamPart.VALUES)
        assert lengths is not None and data is not None
        if lengths[0].num_values != self._count(spec):
            raise self._error(f"column {spec.name}: {lengths[0].num_values} lists for {self._count(spec)} rows")
        if data[0].num_values > MAX_LIST_VALUES:
            raise TraceLimitError(
                f"column {spec.name} has {data[0].num_values} elements", path=self._path, offset=data[2]
            )
        sizes = decode_integers(lengths[0], lengths[1], path=self._path, offset=lengths[2])
        if not add_up(sizes, data[0].num_values):
            raise self._error(f"column {spec.name}: list lengths do not add up")
        values = decode_integers(data[0], data[1], path=self._path, offset=data[2])
        valid = self._validity(spec)
        return list_column(sizes, values, np.ones(self._num_rows, np.bool_) if valid is None else valid)
