"""Counts where the bytes of a file go, by table and column, without decoding anything.

Does not read data sections: the headers of chunks say how long their streams are.
"""

from __future__ import annotations

from dataclasses import dataclass

from prismtrace import metas
from prismtrace._generated.schema import StreamPart
from prismtrace.dictionaries import DICTIONARY_COLUMN
from prismtrace.encoding import Stream
from prismtrace.entries import ChunkMeta
from prismtrace.index import read_meta
from prismtrace.model import COLUMNS, ROLE_RANK, TableKind
from prismtrace.reader import TraceReader


@dataclass(frozen=True)
class ColumnSize:
    """Bytes of one column in all chunks: as stored, and before compression. `(strings)` are the chunks' dictionaries,
    `(headers)` what chunks need beside their data."""

    table: str
    column: str
    stored_bytes: int
    raw_bytes: int


@dataclass(frozen=True)
class FileSizes:
    """Where the bytes go: columns (largest first), payloads, and everything else (index, header, metadata, gaps)."""

    file_bytes: int
    columns: tuple[ColumnSize, ...]
    payload_bytes: int
    payload_raw_bytes: int
    other_bytes: int
    num_rows: dict[str, int]


def file_sizes(reader: TraceReader) -> FileSizes:
    """The sizes of an open trace; reads the header of every chunk."""
    stored: dict[tuple[str, str], list[int]] = {}
    num_rows: dict[str, int] = {}
    in_chunks = 0
    for offset, length in zip(*_places(reader), strict=True):
        frame, raw = read_meta(reader._source, offset)
        meta = metas.parse_chunk(raw, path=reader.path, offset=offset)
        table, names = _names(meta)
        if meta.rank == ROLE_RANK:
            table += " of roles"
        num_ranks = sum(item.num_ranks for item in meta.ranges) or 1
        num_rows[table] = num_rows.get(table, 0) + meta.num_rows * num_ranks
        for stream in meta.streams:
            size = stored.setdefault((table, _column(stream, names)), [0, 0])
            size[0] += stream.stored_length
            size[1] += stream.raw_length
        header = stored.setdefault((table, "(headers)"), [0, 0])
        header[0] += length - frame.data_length
        in_chunks += length
    columns = [ColumnSize(*key, *size) for key, size in stored.items()]
    columns.sort(key=lambda item: -item.stored_bytes)
    payloads = reader._index.payload_entries
    payload_bytes = int(payloads["stored_length"].sum())
    total = reader._source.size
    return FileSizes(
        total,
        tuple(columns),
        payload_bytes,
        int(payloads["raw_length"].sum()),
        total - in_chunks - payload_bytes,
        num_rows,
    )


def _places(reader: TraceReader) -> tuple[list[int], list[int]]:
    entries = reader._index.chunk_entries
    return entries["offset"].tolist(), entries["length"].tolist()


def _names(meta: ChunkMeta) -> tuple[str, dict[int, str]]:
    """Name of the table, and of its columns by id (those that the chunk itself names included)."""
    if meta.table not in TableKind._value2member_map_ or TableKind(meta.table) not in COLUMNS:
        return f"table {meta.table}", {}
    kind = TableKind(meta.table)
    names = {spec.column_id: spec.name for spec in COLUMNS[kind]}
    names.update((spec.column_id, spec.name) for spec in meta.named)
    return kind.name.lower(), names


def _column(stream: Stream, names: dict[int, str]) -> str:
    if stream.column == DICTIONARY_COLUMN:
        return "(digests)" if stream.part == StreamPart.DIGESTS else "(strings)"
    return names.get(stream.column, f"column {stream.column}")
