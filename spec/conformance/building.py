"""Builds trace files by hand, right and wrong ones, from streams, chunks and records.

Does not know which vectors there are.
"""

from __future__ import annotations

import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from prismtrace import GraphKind, ProcessGroup, TraceWriter
from prismtrace._generated import schema
from prismtrace._generated.schema import StreamPart
from prismtrace.chunk import encode_chunk
from prismtrace.columns import normalise
from prismtrace.container import MAGIC, RecordKind, pack_record, pack_trailer
from prismtrace.encoding import Stream
from prismtrace.entries import CHUNK_ENTRY, PAYLOAD_ENTRY, RANK_RANGE, ChunkMeta, RankRange, chunk_entry, payload_entry
from prismtrace.metas import FooterMeta, HeaderMeta, pack_chunk, pack_footer, pack_header, pack_payload
from prismtrace.model import TableKind
from prismtrace.writer import payload_digest

HEADER = HeaderMeta((1, 0), 0, 0, int(GraphKind.OBSERVED), 2, "conformance")
GROUP = ProcessGroup(group_id=2**63 + 5, name="dp", description="data parallel", backend="gloo", ranks=(1, 0))
Chunk = tuple[ChunkMeta, list[Any]]
Streams = tuple[Stream, bytes]
Broken = dict[str, tuple[str, str, bytes]]
"""Name -> the kind of error, why, and the bytes."""


def units(columns: dict[str, Any], *, rank: int = 0, first_row: int = 0) -> Chunk:
    """An encoded chunk of units."""
    return encode_chunk(TableKind.UNITS, rank=rank, first_row=first_row, rows=normalise(TableKind.UNITS, columns))


def stream(raw: bytes, *, column: int, count: int, **changes: int) -> Streams:
    """A stream with a right checksum around any bytes."""
    plain = Stream(0, count, len(raw), len(raw), zlib.crc32(raw), 1, column, 0, StreamPart.VALUES, 1, 1, 1)
    return plain._replace(**changes), raw


def shuffled(values: list[int], width: int) -> bytes:
    """Unsigned integers, byte-shuffled."""
    return np.array(values, f"<u{width}").view(np.uint8).reshape(-1, width).T.tobytes()


def chunk(*streams: Streams, num_rows: int, ranks: tuple[RankRange, ...] = (), **changes: Any) -> Chunk:
    """A chunk of hand-made streams."""
    meta = ChunkMeta(1, 0, 0, num_rows, 0, -1, 0, -1, tuple(item for item, _ in streams), ranges=ranks)
    return meta._replace(**changes), [raw for _, raw in streams]


def trace(
    *chunks: Chunk,
    header: bytes | None = None,
    extras: list[tuple[int, bytes, bytes]] | None = None,
    payloads: list[bytes] | None = None,
    change_index: Callable[[Any], None] = lambda entries: None,
    change_ranges: Callable[[Any], None] = lambda ranges: None,
    change_footer: Callable[[bytes], bytes] = lambda footer: footer,
    required: int = 0,
    groups: tuple[ProcessGroup, ...] = (),
) -> bytes:
    """A finished file around hand-made chunks."""
    raw = bytearray(MAGIC)

    def add(kind: int, meta: bytes, data: list[Any]) -> Any:
        frame, buffers = pack_record(kind, meta, data)
        raw.extend(b"".join(bytes(buffer) for buffer in buffers))
        return frame

    add(RecordKind.HEADER, header or pack_header(HEADER), [])
    for kind, meta, data in extras or []:
        add(kind, meta, [data])
    kept = []
    for blob in payloads or []:
        offset, digest = len(raw), payload_digest(blob)
        frame = add(RecordKind.PAYLOAD, pack_payload(digest, len(blob), 1), [blob])
        kept.append(payload_entry(digest, len(blob), 1, frame, offset))
    entries, ranges = [], []
    for meta, data in chunks:
        offset = len(raw)
        frame = add(RecordKind.CHUNK, pack_chunk(meta), data)
        entries.append(chunk_entry(meta, frame, offset, first_range=len(ranges)))
        ranges.extend(meta.ranges)
    index, numbers = np.array(entries, CHUNK_ENTRY), np.array(ranges, RANK_RANGE)
    change_index(index)
    change_ranges(numbers)
    footer = FooterMeta(required, index, np.array(kept, PAYLOAD_ENTRY), groups, {}, numbers)
    offset = len(raw)
    frame = add(RecordKind.FOOTER, change_footer(pack_footer(footer)), [])
    return bytes(raw) + pack_trailer(offset, frame.length)


@contextmanager
def later_fields() -> Iterator[None]:
    """Every table of every meta section gets a field that a later minor version could have."""
    names = ("Header", "Chunk", "NamedColumn", "Payload", "Groups", "Group", "Metadata", "KeyValue", "Footer")

    def start(builder: Any) -> None:
        builder.StartObject(30)

    def end(builder: Any) -> int:
        builder.PrependUint64Slot(29, 12345, 0)
        return int(builder.EndObject())

    changes = {f"{name}Start": start for name in names} | {f"{name}End": end for name in names}
    with mock.patch.multiple(schema, **changes):
        yield


def written(fill: Callable[[TraceWriter], Any], **arguments: Any) -> bytes:
    """What TraceWriter makes of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.prism"
        with TraceWriter(path, **arguments) as writer:
            fill(writer)
        return path.read_bytes()


def changed(raw: bytes, offset: int, value: bytes | None = None) -> bytes:
    """The bytes with some replaced, or one flipped."""
    new = value if value is not None else bytes([raw[offset] ^ 0x40])
    return raw[:offset] + new + raw[offset + len(new) :]


def one(raw: bytes, num_rows: int = 2, **changes: int) -> bytes:
    """A file with one stream."""
    return trace(chunk(stream(raw, **{"column": 4, "count": 2, **changes}), num_rows=num_rows))
