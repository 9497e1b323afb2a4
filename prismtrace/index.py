"""Knows where everything is in a file: from its footer, or by scanning the records of an unfinished file.

Does not read columns or payload bytes.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismtrace import container, metas
from prismtrace.container import FRAME_BYTES, TRAILER_BYTES, Frame, RecordKind
from prismtrace.errors import (
    TraceChecksumError,
    TraceDataError,
    TraceFormatError,
    TraceLimitError,
    TraceTruncatedError,
    TraceVersionError,
)
from prismtrace.model import ProcessGroup, TableKind
from prismtrace.source import Source

MAX_META_BYTES_SCANNED = 1 << 26


@dataclass(frozen=True)
class Index:
    """Where the chunks and payloads of a file are. `end` is where a scan stopped; None with a footer."""

    header: metas.HeaderMeta
    chunk_entries: NDArray[Any]
    payload_entries: NDArray[Any]
    groups: dict[int, ProcessGroup]
    metadata: dict[str, str]
    end: int | None = None
    path: str = field(default="", kw_only=True)

    @cached_property
    def payloads(self) -> dict[bytes, int]:
        """Digest -> position in payload_entries."""
        raw = self.payload_entries["digest"].tobytes()
        return {raw[16 * i : 16 * i + 16]: i for i in range(len(self.payload_entries))}

    @cached_property
    def _tables(self) -> dict[tuple[int, int], NDArray[Any]]:
        entries = self.chunk_entries
        if not len(entries):
            return {}
        entries = entries[np.lexsort((entries["first_row"], entries["rank"], entries["table"]))]
        table, rank = entries["table"], entries["rank"]
        new = np.flatnonzero((table[1:] != table[:-1]) | (rank[1:] != rank[:-1])) + 1
        ends = entries["first_row"] + entries["num_rows"]
        same = np.ones(len(entries) - 1, np.bool_)
        same[new - 1] = False
        if (same & (entries["first_row"][1:] < ends[:-1])).any():
            raise TraceDataError("two chunks hold the same rows of one table", path=self.path)
        bounds = [0, *new.tolist(), len(entries)]
        keys = zip(table[bounds[:-1]].tolist(), rank[bounds[:-1]].tolist(), strict=True)
        return {key: entries[a:b] for key, a, b in zip(keys, bounds[:-1], bounds[1:], strict=True)}

    def check(self) -> None:
        """Refuses an index in which two chunks hold the same rows."""
        _ = self._tables

    def entries(self, table: TableKind, rank: int) -> NDArray[Any]:
        """The chunks of one table of one rank, in row order."""
        return self._tables.get((int(table), rank), self.chunk_entries[:0])

    def num_rows(self, table: TableKind, rank: int) -> int:
        """Rows of one table of one rank."""
        return int(self.entries(table, rank)["num_rows"].sum(dtype=np.int64))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with rows in a table that this library knows, sorted."""
        known = {int(kind) for kind in TableKind if kind}
        return tuple(sorted({rank for table, rank in self._tables if table in known}))

    @cached_property
    def rank_set(self) -> frozenset[int]:
        """The same, as a set."""
        return frozenset(self.ranks)


def read_header(source: Source) -> tuple[metas.HeaderMeta, int]:
    """The header, and the offset of the first record after it."""
    container.check_magic(bytes(source.read_at(0, min(8, source.size))), path=source.name)
    frame, meta = read_meta(source, 8)
    if frame.kind != RecordKind.HEADER:
        raise TraceFormatError("the first record is not the header", path=source.name, offset=8)
    return metas.parse_header(meta, path=source.name, offset=8), 8 + frame.length


def read_meta(source: Source, offset: int, *, limit: int = MAX_META_BYTES_SCANNED) -> tuple[Frame, bytes]:
    """The frame and the checked meta section of the record at `offset`."""
    head = source.read_at(offset, min(max(source.size - offset, FRAME_BYTES), 4096))
    frame = container.parse_frame(head, path=source.name, offset=offset)
    if frame.meta_length > limit:
        raise TraceLimitError(f"meta section of {frame.meta_length} bytes", path=source.name, offset=offset)
    if offset + frame.length > source.size:
        message = f"a record of {frame.length} bytes, the file ends at byte {source.size}"
        raise TraceTruncatedError(message, path=source.name, offset=offset)
    end = FRAME_BYTES + frame.meta_length
    raw = head[FRAME_BYTES:end] if end <= len(head) else source.read_at(offset + FRAME_BYTES, frame.meta_length)
    meta = bytes(raw)
    if zlib.crc32(meta) != frame.meta_crc:
        raise TraceChecksumError("checksum of a meta section", path=source.name, offset=offset)
    return frame, meta


def index_of_footer(source: Source) -> Index:
    """The index of a finished file."""
    header, start = read_header(source)
    trailer_offset = source.size - TRAILER_BYTES
    raw = bytes(source.read_at(max(0, trailer_offset), min(TRAILER_BYTES, source.size)))
    offset, length = container.parse_trailer(raw, path=source.name, offset=trailer_offset)
    if offset < start:
        raise TraceFormatError("the footer lies inside the header", path=source.name, offset=trailer_offset)
    frame, meta = read_meta(source, offset, limit=container.MAX_META_BYTES)
    if frame.kind != RecordKind.FOOTER or frame.length != length or frame.data_length:
        raise TraceFormatError("the trailer does not point to a footer", path=source.name, offset=trailer_offset)
    footer = metas.parse_footer(meta, path=source.name, offset=offset)
    _check_entries(footer, start=start, end=offset, path=source.name, offset=offset)
    groups = {group.group_id: group for group in footer.groups}
    index = Index(header, footer.chunks, footer.payloads, groups, footer.metadata, path=source.name)
    index.check()
    return index


def _check_entries(footer: metas.FooterMeta, *, start: int, end: int, path: str, offset: int) -> None:
    chunks, payloads = footer.chunks, footer.payloads
    room = np.uint64(end)
    for name, entries, length in (
        ("chunk", chunks, chunks["length"]),
        ("payload", payloads, payloads["stored_length"]),
    ):
        first = entries["offset" if name == "chunk" else "data_offset"]
        bad = (entries["offset"] < start) | (first > room) | (length > room) | (first > room - np.minimum(length, room))
        bad |= (entries["offset"] % np.uint64(8)) != 0
        if bad.any():
            raise TraceFormatError(f"the index has a {name} outside the file", path=path, offset=offset)
    if len(chunks):
        if (chunks["num_rows"] > metas.MAX_CHUNK_ROWS).any():
            raise TraceLimitError(f"a chunk of more than {metas.MAX_CHUNK_ROWS} rows", path=path, offset=offset)
        if (chunks["rank"] < 0).any() or (chunks["first_row"] >= np.uint64(1 << 62)).any():
            raise TraceFormatError("the index has a rank or row out of range", path=path, offset=offset)


def scan(source: Source) -> Index:
    """The index of an unfinished file, up to its last whole record."""
    header, offset = read_header(source)
    chunks: list[tuple[int, ...]] = []
    payloads: dict[bytes, tuple[Any, ...]] = {}
    groups: dict[int, ProcessGroup] = {}
    metadata: dict[str, str] = {}
    while offset < source.size:
        try:
            frame, meta = read_meta(source, offset)
            collect_record(frame, meta, offset, chunks, payloads, groups, metadata, source.name)
        except TraceVersionError:
            raise
        except TraceFormatError:
            break
        offset += frame.length
    index = Index(
        header,
        np.array(chunks, metas.CHUNK_ENTRY),
        np.array(list(payloads.values()), metas.PAYLOAD_ENTRY),
        groups,
        metadata,
        offset,
        path=source.name,
    )
    index.check()
    return index


def collect_record(
    frame: Frame,
    meta: bytes,
    offset: int,
    chunks: list[tuple[int, ...]],
    payloads: dict[bytes, tuple[Any, ...]],
    groups: dict[int, ProcessGroup],
    metadata: dict[str, str],
    path: str,
) -> None:
    """Adds what a record says to the parts of an index; records of unknown kinds are skipped."""
    if frame.kind == RecordKind.CHUNK:
        chunks.append(metas.chunk_entry(metas.parse_chunk(meta, path=path, offset=offset), frame, offset))
    elif frame.kind == RecordKind.PAYLOAD:
        digest, raw_length, compression = metas.parse_payload(meta, path=path, offset=offset)
        payloads.setdefault(digest, metas.payload_entry(digest, raw_length, compression, frame, offset))
    elif frame.kind == RecordKind.GROUP:
        groups.update((group.group_id, group) for group in metas.parse_groups(meta, path=path, offset=offset))
    elif frame.kind == RecordKind.METADATA:
        metadata.update(metas.parse_metadata(meta, path=path, offset=offset))
