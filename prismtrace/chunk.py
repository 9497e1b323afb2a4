"""Encodes rows of one table of one rank into a self-contained chunk.

Does not write files and does not decode; `decoder` does that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace._generated.schema import StreamPart
from prismtrace.columns import DIGEST_BYTES, Rows
from prismtrace.encoding import MAX_STREAM_BYTES, Stream, encode_bytes, encode_distinct, encode_floats, encode_integers
from prismtrace.entries import ChunkMeta
from prismtrace.errors import TraceUsageError
from prismtrace.model import ABSENT, ABSENT32, COLUMNS, FIRST_NAMED_COLUMN, ColumnSpec, ColumnType, TableKind
from prismtrace.tables import Column, DictionaryColumn, ListColumn

DICTIONARY_COLUMN: Final = 0
"""Column id of the streams that hold the chunk's own string and digest dictionaries."""

NO_STEPS: Final = (0, -1)
NO_TIMES: Final = (0, -1)

Streams = list[tuple[Stream, bytes | memoryview]]


def encode_chunk(
    table: TableKind, *, rank: int, first_row: int, rows: Rows
) -> tuple[ChunkMeta, list[bytes | memoryview]]:
    """The header of a chunk, and the buffers of its data section."""
    streams: Streams = []
    strings: dict[str, int] = {}
    digests: dict[bytes, int] = {}
    columns = rows.columns
    named: list[ColumnSpec] = []
    for spec in rows.specs:
        column = columns[spec.name]
        if spec.column_id >= FIRST_NAMED_COLUMN:
            spec = replace(spec, column_id=FIRST_NAMED_COLUMN + len(named))
            named.append(spec)
        if isinstance(column, DictionaryColumn):
            _encode_codes(streams, spec, column, strings if spec.type is ColumnType.STRING else digests)
        elif isinstance(column, ListColumn):
            _encode_lists(streams, spec, column)
        elif spec.type is ColumnType.FLOAT64:
            _encode_floats(streams, spec, column)
        else:
            _encode_integers(streams, spec, column, columns, COLUMNS[table])
    if strings:
        encoded = [text.encode("utf-8") for text in strings]
        lengths = np.array([len(text) for text in encoded], np.int64)
        if lengths.sum() > MAX_STREAM_BYTES:
            raise TraceUsageError(f"strings of {lengths.sum()} bytes in one chunk; add fewer rows at a time")
        streams.append(encode_integers(lengths, column=DICTIONARY_COLUMN, part=StreamPart.STRING_LENGTHS))
        streams.append(encode_bytes(b"".join(encoded), column=DICTIONARY_COLUMN, part=StreamPart.STRING_BYTES))
    if digests:
        raw = b"".join(digests)
        streams.append(encode_bytes(raw, column=DICTIONARY_COLUMN, part=StreamPart.DIGESTS, width=DIGEST_BYTES))
    used = {stream.column for stream, _ in streams}
    meta = ChunkMeta(
        int(table),
        rank,
        first_row,
        rows.num_rows,
        *step_range(columns),
        *time_range(columns),
        tuple(stream for stream, _ in streams),
        tuple(spec for spec in named if spec.column_id in used),
    )
    return meta, [stored for _, stored in streams]


def step_range(columns: Mapping[str, Column]) -> tuple[int, int]:
    """First and last step of the rows; first > last when no row has one."""
    return _range([columns.get("step")], ABSENT32) or NO_STEPS


def time_range(columns: Mapping[str, Column]) -> tuple[int, int]:
    """Earliest and latest time of the rows; first > last when no row has one."""
    return _range([columns.get("start_ns"), columns.get("end_ns")], ABSENT) or NO_TIMES


def _range(columns: list[Any], absent: int) -> tuple[int, int] | None:
    present = [column[column != absent] for column in columns if column is not None]
    present = [column for column in present if len(column)]
    if not present:
        return None
    return min(int(column.min()) for column in present), max(int(column.max()) for column in present)


def _encode_validity(streams: Streams, spec: ColumnSpec, valid: NDArray[np.bool_]) -> bool:
    """Adds a validity stream where needed; False when no row has a value and the column is left out."""
    count = int(np.count_nonzero(valid))
    if count == 0:
        return False
    if count < len(valid):
        bits = np.packbits(valid, bitorder="little").tobytes()
        streams.append(encode_bytes(bits, column=spec.column_id, part=StreamPart.VALIDITY))
    return True


def _wide(spec: ColumnSpec, column: NDArray[Any]) -> NDArray[np.int64]:
    if spec.type is ColumnType.UINT64:
        return np.ascontiguousarray(column).view(np.int64)
    return column.astype(np.int64, copy=False)


def _encode_integers(
    streams: Streams, spec: ColumnSpec, column: Any, columns: Mapping[str, Column], table: tuple[ColumnSpec, ...]
) -> None:
    wide = _wide(spec, column)
    valid: Any = None
    if spec.optional:
        valid = column != (ABSENT32 if spec.type is ColumnType.INT32 else ABSENT)
        if valid.all():
            valid = None
        elif not _encode_validity(streams, spec, valid):
            return
        else:
            wide = wide[valid]
    elif not wide.any():
        return
    if spec.type is ColumnType.UINT64:
        streams.append(encode_distinct(wide, column=spec.column_id, part=StreamPart.VALUES))
        return
    reference, reference_id = None, 0
    base = columns.get(spec.reference) if spec.reference else None
    if isinstance(base, np.ndarray):
        present = base if valid is None else base[valid]
        if (present != ABSENT).all():
            reference = present
            reference_id = next(other.column_id for other in table if other.name == spec.reference)
    streams.append(
        encode_integers(
            wide,
            column=spec.column_id,
            part=StreamPart.VALUES,
            delta=spec.delta,
            scalable=spec.unit == "ns",
            reference=reference,
            reference_column=reference_id,
        )
    )


def _encode_floats(streams: Streams, spec: ColumnSpec, column: Any) -> None:
    values = column.astype(np.float64, copy=False)
    if spec.optional:
        valid = ~np.isnan(values)
        if not _encode_validity(streams, spec, valid):
            return
        values = values[valid]
    streams.append(encode_floats(np.ascontiguousarray(values), column=spec.column_id, part=StreamPart.VALUES))


def _encode_codes(
    streams: Streams, spec: ColumnSpec, column: DictionaryColumn[Any], dictionary: dict[Any, int]
) -> None:
    valid = column.codes >= 0
    if not _encode_validity(streams, spec, valid):
        return
    codes = column.codes[valid]
    remap = np.zeros(len(column.values), np.int64)
    remap[codes] = 1
    for code in np.flatnonzero(remap).tolist():
        remap[code] = dictionary.setdefault(column.values[code], len(dictionary))
    streams.append(encode_integers(remap[codes], column=spec.column_id, part=StreamPart.VALUES))


def _encode_lists(streams: Streams, spec: ColumnSpec, column: ListColumn) -> None:
    if not _encode_validity(streams, spec, column.valid):
        return
    lengths = np.diff(column.offsets)[column.valid]
    values = column.values[int(column.offsets[0]) : int(column.offsets[-1])]
    streams.append(encode_integers(lengths, column=spec.column_id, part=StreamPart.LENGTHS))
    streams.append(encode_integers(values, column=spec.column_id, part=StreamPart.VALUES))
