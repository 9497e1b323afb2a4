"""Packs and parses the flatbuffers that are the meta sections of records.

Does not frame them and does not decode columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import flatbuffers
import numpy as np
from numpy.typing import NDArray

from prismtrace._generated import schema
from prismtrace.container import Frame
from prismtrace.encoding import STREAM_DTYPE, Stream
from prismtrace.errors import TraceFormatError, TraceLimitError, TraceUsageError, TraceVersionError, reading
from prismtrace.model import FORMAT_VERSION, ProcessGroup

fb: Any = schema  # generated code has no annotations

KNOWN_FEATURES: Final = 0
"""Bits of `required_features` that this library understands."""

MAX_CHUNK_ROWS: Final = 1 << 20
"""Limit of the rows of one chunk (spec/trace-format.md, limits)."""

CHUNK_ENTRY: Final = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u8"),
        ("first_row", "<u8"),
        ("first_ns", "<i8"),
        ("last_ns", "<i8"),
        ("num_rows", "<u4"),
        ("rank", "<i4"),
        ("first_step", "<i4"),
        ("last_step", "<i4"),
        ("meta_crc", "<u4"),
        ("data_crc", "<u4"),
        ("table", "u1"),
        ("reserved_0", "u1"),
        ("reserved_1", "<u2"),
        ("reserved_2", "<u4"),
    ]
)
PAYLOAD_ENTRY: Final = np.dtype(
    [
        ("digest", "V16"),
        ("offset", "<u8"),
        ("data_offset", "<u8"),
        ("stored_length", "<u8"),
        ("raw_length", "<u8"),
        ("data_crc", "<u4"),
        ("compression", "u1"),
        ("reserved_0", "u1"),
        ("reserved_1", "<u2"),
    ]
)


class ChunkMeta(NamedTuple):
    """The meta section of a chunk."""

    table: int
    rank: int
    first_row: int
    num_rows: int
    first_step: int
    last_step: int
    first_ns: int
    last_ns: int
    streams: tuple[Stream, ...]


@dataclass(frozen=True)
class HeaderMeta:
    """The meta section of the header."""

    version: tuple[int, int]
    required_features: int
    optional_features: int
    graph_kind: int
    world_size: int
    writer: str


@dataclass(frozen=True)
class FooterMeta:
    """The meta section of the footer."""

    required_features: int
    chunks: NDArray[Any]
    payloads: NDArray[Any]
    groups: tuple[ProcessGroup, ...]
    metadata: dict[str, str]


MAX_KEY_BYTES: Final = 1 << 10
MAX_VALUE_BYTES: Final = 1 << 24
MAX_GROUP_TEXT_BYTES: Final = 1 << 16


def check_entry(key: str, value: str) -> None:
    """Refuses a metadata entry that cannot be written."""
    if not isinstance(key, str) or not isinstance(value, str):  # type: ignore[redundant-expr]
        raise TraceUsageError(f"metadata are pairs of str, not {type(key).__name__} -> {type(value).__name__}")
    if not key or len(_utf8(key)) > MAX_KEY_BYTES or len(_utf8(value)) > MAX_VALUE_BYTES:
        raise TraceUsageError(f"metadata {key[:40]!r}: empty key, or key or value too long")


def check_group(group: ProcessGroup) -> None:
    """Refuses a process group that cannot be written."""
    if not 0 < group.group_id < 1 << 64:
        raise TraceUsageError(f"group_id {group.group_id} must be in 1 .. 2**64 - 1 (0 means no group)")
    for text in (group.name, group.description, group.backend):
        if len(_utf8(text)) > MAX_GROUP_TEXT_BYTES:
            raise TraceUsageError(f"group {group.group_id}: a text of {len(text)} characters")
    if any(not 0 <= rank < 1 << 31 for rank in group.ranks):
        raise TraceUsageError(f"group {group.group_id} has a rank out of range")


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TraceUsageError(f"{text[:40]!r} is not valid Unicode: {error.reason}") from error


def chunk_entry(meta: ChunkMeta, frame: Frame, offset: int) -> tuple[int, ...]:
    """The index entry of a chunk, in the order of CHUNK_ENTRY."""
    return (
        offset,
        frame.length,
        meta.first_row,
        meta.first_ns,
        meta.last_ns,
        meta.num_rows,
        meta.rank,
        meta.first_step,
        meta.last_step,
        frame.meta_crc,
        frame.data_crc,
        meta.table,
        0,
        0,
        0,
    )


def payload_entry(digest: bytes, raw_length: int, compression: int, frame: Frame, offset: int) -> tuple[Any, ...]:
    """The index entry of a payload, in the order of PAYLOAD_ENTRY."""
    data_offset = offset + frame.data_start
    return (digest, offset, data_offset, frame.data_length, raw_length, frame.data_crc, compression, 0, 0)


def _struct_vector(builder: Any, raw: bytes, count: int, size: int) -> int:
    builder.StartVector(size, count, 8)
    builder.head -= len(raw)
    builder.Bytes[builder.head : builder.head + len(raw)] = raw
    return int(builder.EndVector())


def _vector(table: Any, slot: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    position = table.Offset(4 + 2 * slot)
    if not position:
        return np.zeros(0, dtype)
    count = table.VectorLen(position)
    return np.frombuffer(table.Bytes, dtype, count, table.Vector(position))


def pack_chunk(meta: ChunkMeta) -> bytes:
    """The meta section of a CHUNK record."""
    raw = np.array([stream.row() for stream in meta.streams], STREAM_DTYPE).tobytes()
    builder = flatbuffers.Builder(len(raw) + 256)
    streams = _struct_vector(builder, raw, len(meta.streams), STREAM_DTYPE.itemsize)
    fb.ChunkStart(builder)
    fb.ChunkAddFirstRow(builder, meta.first_row)
    fb.ChunkAddFirstNs(builder, meta.first_ns)
    fb.ChunkAddLastNs(builder, meta.last_ns)
    fb.ChunkAddStreams(builder, streams)
    fb.ChunkAddNumRows(builder, meta.num_rows)
    fb.ChunkAddRank(builder, meta.rank)
    fb.ChunkAddFirstStep(builder, meta.first_step)
    fb.ChunkAddLastStep(builder, meta.last_step)
    fb.ChunkAddTable(builder, meta.table)
    builder.Finish(fb.ChunkEnd(builder))
    return bytes(builder.Output())


def parse_chunk(raw: bytes, *, path: str, offset: int) -> ChunkMeta:
    """Reads the meta section of a CHUNK record."""
    with reading("chunk header", path=path, offset=offset):
        chunk = fb.Chunk.GetRootAs(raw)
        rows = _vector(chunk._tab, 8, STREAM_DTYPE).tolist()
        meta = ChunkMeta(
            chunk.Table(),
            chunk.Rank(),
            chunk.FirstRow(),
            chunk.NumRows(),
            chunk.FirstStep(),
            chunk.LastStep(),
            chunk.FirstNs(),
            chunk.LastNs(),
            tuple(Stream(*row) for row in rows),
        )
        if meta.rank < 0 or meta.first_row >= 1 << 62:
            raise TraceFormatError("rank or first row out of range", path=path, offset=offset)
        if meta.num_rows > MAX_CHUNK_ROWS:
            raise TraceLimitError(f"chunk of {meta.num_rows} rows", path=path, offset=offset)
        return meta


def pack_header(meta: HeaderMeta) -> bytes:
    """The meta section of the HEADER record."""
    builder = flatbuffers.Builder(256)
    writer = builder.CreateString(meta.writer)
    fb.HeaderStart(builder)
    fb.HeaderAddRequiredFeatures(builder, meta.required_features)
    fb.HeaderAddOptionalFeatures(builder, meta.optional_features)
    fb.HeaderAddWorldSize(builder, meta.world_size)
    fb.HeaderAddWriter(builder, writer)
    fb.HeaderAddVersionMajor(builder, meta.version[0])
    fb.HeaderAddVersionMinor(builder, meta.version[1])
    fb.HeaderAddGraphKind(builder, meta.graph_kind)
    builder.Finish(fb.HeaderEnd(builder))
    return bytes(builder.Output())


def check_features(required: int, *, path: str, offset: int) -> None:
    """Refuses a file that needs something this library does not know."""
    if required & ~KNOWN_FEATURES:
        message = f"needs features {required & ~KNOWN_FEATURES:#x}, unknown here: install a later prismtrace"
        raise TraceVersionError(message, path=path, offset=offset)


def parse_header(raw: bytes, *, path: str, offset: int) -> HeaderMeta:
    """Reads the meta section of the HEADER record and refuses what this library cannot read."""
    with reading("header", path=path, offset=offset):
        header = fb.Header.GetRootAs(raw)
        version = (header.VersionMajor(), header.VersionMinor())
        if version[0] != FORMAT_VERSION[0] or version > FORMAT_VERSION:
            message = f"format {version[0]}.{version[1]}, this library reads 0.1: install a matching prismtrace"
            raise TraceVersionError(message, path=path, offset=offset)
        if header.WorldSize() < 0:
            raise TraceFormatError("negative world size", path=path, offset=offset)
        check_features(header.RequiredFeatures(), path=path, offset=offset)
        return HeaderMeta(
            version,
            header.RequiredFeatures(),
            header.OptionalFeatures(),
            header.GraphKind(),
            header.WorldSize(),
            _text(header.Writer()),
        )


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8")


def _add_group(builder: Any, group: ProcessGroup) -> int:
    texts = [builder.CreateString(text) for text in (group.name, group.description, group.backend)]
    ranks = builder.CreateNumpyVector(np.array(group.ranks, "<i4"))
    fb.GroupStart(builder)
    fb.GroupAddGroupId(builder, group.group_id)
    fb.GroupAddName(builder, texts[0])
    fb.GroupAddDescription(builder, texts[1])
    fb.GroupAddBackend(builder, texts[2])
    fb.GroupAddRanks(builder, ranks)
    return int(fb.GroupEnd(builder))


def _offsets(builder: Any, offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return int(builder.EndVector())


def _add_groups(builder: Any, groups: Iterable[ProcessGroup]) -> int:
    return _offsets(builder, [_add_group(builder, group) for group in groups])


def _add_entries(builder: Any, entries: Mapping[str, str]) -> int:
    offsets = []
    for key, value in entries.items():
        texts = builder.CreateString(key), builder.CreateString(value)
        fb.KeyValueStart(builder)
        fb.KeyValueAddKey(builder, texts[0])
        fb.KeyValueAddValue(builder, texts[1])
        offsets.append(fb.KeyValueEnd(builder))
    return _offsets(builder, offsets)


def _group_of(group: Any) -> ProcessGroup:
    ranks = _vector(group._tab, 4, np.dtype("<i4")).tolist()
    texts = (_text(group.Name()), _text(group.Description()), _text(group.Backend()))
    return ProcessGroup(group.GroupId(), *texts, ranks=tuple(ranks))


def pack_groups(groups: Iterable[ProcessGroup]) -> bytes:
    """The meta section of a GROUP record."""
    builder = flatbuffers.Builder(256)
    vector = _add_groups(builder, groups)
    fb.GroupsStart(builder)
    fb.GroupsAddGroups(builder, vector)
    builder.Finish(fb.GroupsEnd(builder))
    return bytes(builder.Output())


def parse_groups(raw: bytes, *, path: str, offset: int) -> tuple[ProcessGroup, ...]:
    """Reads the meta section of a GROUP record."""
    with reading("groups", path=path, offset=offset):
        groups = fb.Groups.GetRootAs(raw)
        return tuple(_group_of(groups.Groups(i)) for i in range(groups.GroupsLength()))


def pack_metadata(entries: Mapping[str, str]) -> bytes:
    """The meta section of a METADATA record."""
    builder = flatbuffers.Builder(256)
    vector = _add_entries(builder, entries)
    fb.MetadataStart(builder)
    fb.MetadataAddEntries(builder, vector)
    builder.Finish(fb.MetadataEnd(builder))
    return bytes(builder.Output())


def parse_metadata(raw: bytes, *, path: str, offset: int) -> dict[str, str]:
    """Reads the meta section of a METADATA record."""
    with reading("metadata", path=path, offset=offset):
        table = fb.Metadata.GetRootAs(raw)
        pairs = (table.Entries(i) for i in range(table.EntriesLength()))
        return {_text(pair.Key()): _text(pair.Value()) for pair in pairs}


def pack_payload(digest: bytes, raw_length: int, compression: int) -> bytes:
    """The meta section of a PAYLOAD record."""
    builder = flatbuffers.Builder(96)
    fb.PayloadStart(builder)
    fb.PayloadAddDigest0(builder, int.from_bytes(digest[:8], "little"))
    fb.PayloadAddDigest1(builder, int.from_bytes(digest[8:], "little"))
    fb.PayloadAddRawLength(builder, raw_length)
    fb.PayloadAddCompression(builder, compression)
    builder.Finish(fb.PayloadEnd(builder))
    return bytes(builder.Output())


def parse_payload(raw: bytes, *, path: str, offset: int) -> tuple[bytes, int, int]:
    """Digest, decoded length and compression of a PAYLOAD record."""
    with reading("payload header", path=path, offset=offset):
        table = fb.Payload.GetRootAs(raw)
        digest = table.Digest0().to_bytes(8, "little") + table.Digest1().to_bytes(8, "little")
        return digest, table.RawLength(), table.Compression()


def pack_footer(meta: FooterMeta) -> bytes:
    """The meta section of the FOOTER record."""
    builder = flatbuffers.Builder(1024)
    groups = _add_groups(builder, meta.groups)
    metadata = _add_entries(builder, meta.metadata)
    vectors = []
    for entries in (meta.chunks, meta.payloads):
        raw = entries.tobytes()
        vectors.append(_struct_vector(builder, raw, len(entries), entries.dtype.itemsize))
    fb.FooterStart(builder)
    fb.FooterAddRequiredFeatures(builder, meta.required_features)
    fb.FooterAddChunks(builder, vectors[0])
    fb.FooterAddPayloads(builder, vectors[1])
    fb.FooterAddGroups(builder, groups)
    fb.FooterAddMetadata(builder, metadata)
    builder.Finish(fb.FooterEnd(builder))
    return bytes(builder.Output())


def parse_footer(raw: bytes, *, path: str, offset: int) -> FooterMeta:
    """Reads the meta section of the FOOTER record."""
    with reading("footer", path=path, offset=offset):
        footer = fb.Footer.GetRootAs(raw)
        check_features(footer.RequiredFeatures(), path=path, offset=offset)
        pairs = (footer.Metadata(i) for i in range(footer.MetadataLength()))
        return FooterMeta(
            footer.RequiredFeatures(),
            _vector(footer._tab, 2, CHUNK_ENTRY),
            _vector(footer._tab, 3, PAYLOAD_ENTRY),
            tuple(_group_of(footer.Groups(i)) for i in range(footer.GroupsLength())),
            {_text(pair.Key()): _text(pair.Value()) for pair in pairs},
        )
