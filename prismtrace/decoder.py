"""Decodes chosen columns of a chunk and refuses what contradicts itself.

Does not read files: the caller supplies the bytes of the data section.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismtrace._generated.schema import Encoding, StreamPart
from prismtrace.chunk import DICTIONARY_COLUMN
from prismtrace.columns import DIGEST_BYTES, MAX_LIST_VALUES
from prismtrace.encoding import Stream, check_stream, decode_floats, decode_integers, stream_bytes
from prismtrace.entries import ChunkMeta
from prismtrace.errors import TraceDataError, TraceFormatError, TraceLimitError, TraceVersionError, reading
from prismtrace.model import ABSENT, ABSENT32, COLUMNS, ColumnSpec, ColumnType, TableKind
from prismtrace.tables import Column, DictionaryColumn, ListColumn


class ChunkDecoder:
    """Decodes chosen columns of one chunk. `fetch(start, length)` returns bytes of its data section."""

    def __init__(
        self, meta: ChunkMeta, *, fetch: Callable[[int, int], memoryview], path: str, data_offset: int
    ) -> None:
        self._meta, self._fetch, self._path, self._data_offset = meta, fetch, path, data_offset
        self._streams: dict[tuple[int, int], tuple[Stream, int]] = {}
        self._integers: dict[int, NDArray[np.int64]] = {}
        self._valid: dict[int, NDArray[np.bool_] | None] = {}
        self._strings: tuple[str, ...] | None = None
        self._digests: tuple[bytes, ...] | None = None
        position = 0
        for stream in meta.streams:
            key = (stream.column, stream.part)
            if key in self._streams:
                raise self._error(f"two streams of part {stream.part} for column {stream.column}")
            self._streams[key] = (stream, position)
            position += stream.stored_length
        self.data_length = position

    def _error(self, message: str, position: int = 0) -> TraceDataError:
        return TraceDataError(message, path=self._path, offset=self._data_offset + position)

    def span(self, specs: Collection[ColumnSpec]) -> tuple[int, int]:
        """First and last byte (exclusive) of the data section that the columns and dictionaries need."""
        wanted = {spec.column_id for spec in specs}
        if any(spec.type in (ColumnType.STRING, ColumnType.DIGEST) for spec in specs):
            wanted.add(DICTIONARY_COLUMN)
        wanted |= {stream.reference for stream in self._meta.streams if stream.column in wanted and stream.reference}
        spans = [
            (position, position + stream.stored_length)
            for stream, position in self._streams.values()
            if stream.column in wanted
        ]
        return (min(start for start, _ in spans), max(end for _, end in spans)) if spans else (0, 0)

    def decode(self, specs: Collection[ColumnSpec]) -> dict[str, Column]:
        """The columns of `specs` that the chunk holds."""
        with reading("chunk", path=self._path, offset=self._data_offset):
            result: dict[str, Column] = {}
            for spec in specs:
                column = self._column(spec)
                if column is not None:
                    result[spec.name] = column
            return result

    def _raw(self, column: int, part: int) -> tuple[Stream, bytes, int] | None:
        found = self._streams.get((column, part))
        if found is None:
            return None
        stream, position = found
        offset = self._data_offset + position
        check_stream(stream, path=self._path, offset=offset)
        stored = self._fetch(position, stream.stored_length)
        return stream, stream_bytes(stream, stored, path=self._path, offset=offset), offset

    def _validity(self, spec: ColumnSpec) -> NDArray[np.bool_] | None:
        if spec.column_id in self._valid:
            return self._valid[spec.column_id]
        found = self._raw(spec.column_id, StreamPart.VALIDITY)
        valid: NDArray[np.bool_] | None = None
        if found is not None:
            stream, raw, offset = found
            rows = self._meta.num_rows
            if stream.encoding != Encoding.PLAIN or stream.width != 1 or stream.num_values != (rows + 7) // 8:
                raise TraceFormatError(f"validity of column {spec.name}", path=self._path, offset=offset)
            bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")
            if bits[rows:].any():
                raise TraceFormatError(f"validity of column {spec.name} past its end", path=self._path, offset=offset)
            valid = bits[:rows].view(np.bool_)
        self._valid[spec.column_id] = valid
        return valid

    def _column(self, spec: ColumnSpec) -> Column | None:
        known = (StreamPart.VALUES, StreamPart.VALIDITY, StreamPart.LENGTHS)
        parts = [part for column, part in self._streams if column == spec.column_id]
        if not parts:
            return None
        for part in parts:
            if part not in known:
                raise TraceVersionError(
                    f"unknown stream part {part} in column {spec.name}", path=self._path, offset=self._data_offset
                )
        if StreamPart.VALUES not in parts:
            raise self._error(f"column {spec.name} has no values")
        if (StreamPart.LENGTHS in parts) != (spec.type is ColumnType.LIST_INT64):
            raise self._error(f"column {spec.name}: lengths do not fit its type")
        if not spec.optional and StreamPart.VALIDITY in parts:
            raise self._error(f"column {spec.name} must have a value in every row")
        if spec.type is ColumnType.LIST_INT64:
            return self._lists(spec)
        if spec.type is ColumnType.FLOAT64:
            return self._floats(spec)
        values = self._integer_values(spec)
        if spec.type in (ColumnType.STRING, ColumnType.DIGEST):
            return self._dictionary(spec, values)
        return self._typed(spec, values)

    def _count(self, spec: ColumnSpec) -> int:
        valid = self._validity(spec)
        return self._meta.num_rows if valid is None else int(np.count_nonzero(valid))

    def _integer_values(self, spec: ColumnSpec) -> NDArray[np.int64]:
        if spec.column_id in self._integers:
            return self._integers[spec.column_id]
        found = self._raw(spec.column_id, StreamPart.VALUES)
        assert found is not None
        stream, raw, offset = found
        if stream.num_values != self._count(spec):
            raise self._error(f"column {spec.name}: {stream.num_values} values for {self._count(spec)} rows")
        reference = self._reference(spec, stream) if stream.encoding == Encoding.DIFFERENCE else None
        values = decode_integers(stream, raw, path=self._path, offset=offset, reference=reference)
        self._integers[spec.column_id] = values
        return values

    def _reference(self, spec: ColumnSpec, stream: Stream) -> NDArray[np.int64] | None:
        other = next((o for o in COLUMNS[TableKind(self._meta.table)] if o.column_id == stream.reference), None)
        if other is None or other.column_id >= spec.column_id or other.type is not ColumnType.INT64:
            raise self._error(f"column {spec.name} refers to column {stream.reference}")
        if (other.column_id, StreamPart.VALUES) not in self._streams:
            return None
        values, rows, wanted = self._integer_values(other), self._validity(other), self._validity(spec)
        if rows is None:
            return values if wanted is None else values[wanted]
        if wanted is None or (wanted & ~rows).any():
            return None
        return values[wanted[rows]]

    def _typed(self, spec: ColumnSpec, values: NDArray[np.int64]) -> Column:
        dtype = spec.type.dtype
        absent = ABSENT32 if spec.type is ColumnType.INT32 else ABSENT
        if spec.type is ColumnType.UINT64:
            return values.view(np.uint64)
        if len(values):
            low, high = int(values.min()), int(values.max())
            info: Any = np.iinfo(np.uint8 if spec.type is ColumnType.BOOL else dtype.type)
            top = 1 if spec.type is ColumnType.BOOL else info.max
            if low < info.min or high > top or (spec.optional and low == absent):
                raise self._error(f"column {spec.name} has values in {low} .. {high}")
        typed = values.astype(dtype, copy=False)
        valid = self._validity(spec)
        if valid is None:
            return typed
        full = np.full(self._meta.num_rows, absent, dtype)
        full[valid] = typed
        return full

    def _floats(self, spec: ColumnSpec) -> Column:
        found = self._raw(spec.column_id, StreamPart.VALUES)
        assert found is not None
        stream, raw, offset = found
        if stream.num_values != self._count(spec):
            raise self._error(f"column {spec.name}: {stream.num_values} values for {self._count(spec)} rows")
        values = decode_floats(stream, raw, path=self._path, offset=offset)
        valid = self._validity(spec)
        if valid is None:
            return values
        full = np.full(self._meta.num_rows, np.nan)
        full[valid] = values
        return full

    def _dictionary(self, spec: ColumnSpec, values: NDArray[np.int64]) -> Column:
        dictionary: tuple[Any, ...] = self._string_table() if spec.type is ColumnType.STRING else self._digest_table()
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < len(dictionary):
            raise self._error(f"column {spec.name}: code outside the dictionary of {len(dictionary)}")
        valid = self._validity(spec)
        codes = np.full(self._meta.num_rows, -1, np.int32)
        codes[... if valid is None else valid] = values
        return DictionaryColumn(codes, dictionary)

    def _string_table(self) -> tuple[str, ...]:
        if self._strings is None:
            lengths = self._raw(DICTIONARY_COLUMN, StreamPart.STRING_LENGTHS)
            data = self._raw(DICTIONARY_COLUMN, StreamPart.STRING_BYTES)
            if lengths is None or data is None:
                return ()
            sizes = decode_integers(lengths[0], lengths[1], path=self._path, offset=lengths[2])
            ends = _ends(sizes, len(data[1]))
            if ends is None:
                raise self._error("string lengths do not add up")
            raw = data[1]
            self._strings = tuple(raw[start:end].decode("utf-8") for start, end in zip([0, *ends], ends, strict=False))
        return self._strings

    def _digest_table(self) -> tuple[bytes, ...]:
        if self._digests is None:
            found = self._raw(DICTIONARY_COLUMN, StreamPart.DIGESTS)
            if found is None:
                return ()
            stream, raw, offset = found
            if stream.encoding != Encoding.PLAIN or stream.width != DIGEST_BYTES:
                raise TraceFormatError("digest dictionary", path=self._path, offset=offset)
            self._digests = tuple(raw[i : i + DIGEST_BYTES] for i in range(0, len(raw), DIGEST_BYTES))
        return self._digests

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
        if _ends(sizes, data[0].num_values) is None:
            raise self._error(f"column {spec.name}: list lengths do not add up")
        values = decode_integers(data[0], data[1], path=self._path, offset=data[2])
        valid = self._validity(spec)
        if valid is None:
            valid = np.ones(self._meta.num_rows, np.bool_)
        full = np.zeros(self._meta.num_rows, np.int64)
        full[valid] = sizes
        offsets = np.zeros(len(full) + 1, np.int64)
        np.cumsum(full, out=offsets[1:])
        return ListColumn(offsets, values, valid)


def _ends(sizes: NDArray[np.int64], total: int) -> list[int] | None:
    """Running sums of `sizes`, or None when they are not sizes that add up to `total`."""
    if len(sizes) and (int(sizes.min()) < 0 or int(sizes.max()) > total):
        return None
    ends: list[int] = np.cumsum(sizes).tolist()
    return ends if (ends[-1] if ends else 0) == total else None
