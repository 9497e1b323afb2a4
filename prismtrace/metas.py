"""Packs and parses the flatbuffers that are the meta sections of records.

Does not frame them and does not decode columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import flatbuffers
import numpy as np
from numpy.typing import NDArray

from prismtrace._generated import schema
from prismtrace.encoding import STREAM_DTYPE, Stream
from prismtrace.entries import (
    CHUNK_ENTRY,
    MAX_RANKS,
    PAYLOAD_ENTRY,
    RANK_RANGE,
    ChunkMeta,
    RankRange,
    ranges_of,
    ranks_of,
)
from prismtrace.errors import TraceFormatError, TraceLimitError, TraceVersionError, reading
from prismtrace.model import (
    FIRST_NAMED_COLUMN,
    FORMAT_VERSION,
    ROLE_RANK,
    ColumnSpec,
    ColumnType,
    ProcessGroup,
    named_spec,
)

fb: Any = schema  # generated code has no annotations

DENSE: Final = 2
"""Bit of `required_features`: the file may use what format 1.1 added."""

KNOWN_FEATURES: Final = DENSE
"""Bits of `required_features` that this library understands."""

MAX_NAME_BYTES: Final = 1 << 10
"""Limit of the name of a named column, in UTF-8."""

MAX_CHUNK_ROWS: Final = 1 << 20
"""Limit of the rows of one chunk (spec/trace-format.md, limits)."""


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
    ranges: NDArray[Any] = field(default_factory=lambda: np.zeros(0, RANK_RANGE))


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


def _ranges_vector(builder: Any, ranges: Sequence[RankRange] | NDArray[Any]) -> int:
    raw = np.array(list(ranges), RANK_RANGE).tobytes()
    builder.StartVector(RANK_RANGE.itemsize, len(ranges), 4)
    builder.head -= len(raw)
    builder.Bytes[builder.head : builder.head + len(raw)] = raw
    return int(builder.EndVector())


def _add_named(builder: Any, specs: Sequence[ColumnSpec]) -> int:
    offsets = []
    for spec in specs:
        name = builder.CreateString(spec.name)
        fb.NamedColumnStart(builder)
        fb.NamedColumnAddName(builder, name)
        fb.NamedColumnAddColumn(builder, spec.column_id)
        fb.NamedColumnAddType(builder, int(spec.type))
        offsets.append(fb.NamedColumnEnd(builder))
    return _offsets(builder, offsets)


def pack_chunk(meta: ChunkMeta) -> bytes:
    """The meta section of a CHUNK record."""
    raw = np.array(list(meta.streams), STREAM_DTYPE).tobytes()
    builder = flatbuffers.Builder(len(raw) + 256)
    named = _add_named(builder, meta.named) if meta.named else 0
    ranges = _ranges_vector(builder, meta.ranges) if meta.ranges else 0
    streams = _struct_vector(builder, raw, len(meta.streams), STREAM_DTYPE.itemsize)
    fb.ChunkStart(builder)
    fb.ChunkAddFirstRow(builder, meta.first_row)
    fb.ChunkAddFirstNs(builder, meta.first_ns)
    fb.ChunkAddLastNs(builder, meta.last_ns)
    fb.ChunkAddRole(builder, meta.role)
    if meta.strings:
        fb.ChunkAddStrings0(builder, int.from_bytes(meta.strings[:8], "little"))
        fb.ChunkAddStrings1(builder, int.from_bytes(meta.strings[8:], "little"))
    if meta.stacked:
        fb.ChunkAddStacked(builder, True)
    fb.ChunkAddStreams(builder, streams)
    if named:
        fb.ChunkAddColumns(builder, named)
    if ranges:
        fb.ChunkAddRankRanges(builder, ranges)
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
        shared = chunk.Strings0().to_bytes(8, "little") + chunk.Strings1().to_bytes(8, "little")
        meta = ChunkMeta(
            chunk.Table(),
            chunk.Rank(),
            chunk.FirstRow(),
            chunk.NumRows(),
            chunk.FirstStep(),
            chunk.LastStep(),
            chunk.FirstNs(),
            chunk.LastNs(),
            tuple(map(Stream._make, rows)),
            _named_columns(chunk),
            chunk.Role(),
            tuple(RankRange(*row) for row in _vector(chunk._tab, 11, RANK_RANGE).tolist()),
            shared if any(shared) else b"",
            chunk.Stacked(),
        )
        if meta.rank < (ROLE_RANK if meta.role else 0) or meta.first_row >= 1 << 62:
            raise TraceFormatError("rank or first row out of range", path=path, offset=offset)
        if meta.num_rows > MAX_CHUNK_ROWS:
            raise TraceLimitError(f"chunk of {meta.num_rows} rows", path=path, offset=offset)
        if meta.ranges or meta.stacked:
            _check_ranges(meta, path=path, offset=offset)
        return meta


def _is_name(name: str) -> bool:
    return "." in name.strip(".") and len(name.encode("utf-8")) <= MAX_NAME_BYTES


def _named_columns(chunk: Any) -> tuple[ColumnSpec, ...]:
    """The named columns of types that this version knows; the streams of others are skipped."""
    specs = []
    ids, names = set(), set()
    for number in range(chunk.ColumnsLength()):
        column = chunk.Columns(number)
        name, column_id = _text(column.Name()), column.Column()
        if column_id < FIRST_NAMED_COLUMN or column_id in ids or name in names or not _is_name(name):
            raise ValueError(f"named column {column_id} {name[:40]!r}")
        ids.add(column_id)
        names.add(name)
        if 0 < column.Type() <= max(ColumnType):
            specs.append(named_spec(name, ColumnType(column.Type()), column_id=column_id))
    return tuple(specs)


def _check_ranges(meta: ChunkMeta, *, path: str, offset: int) -> None:
    total, last = 0, -1
    for first, count, stride in meta.ranges:
        total += count
        if first <= last or count < 1 or stride < 1:
            raise TraceFormatError("the ranks of a chunk do not rise", path=path, offset=offset)
        last = first + stride * (count - 1)
    if total > MAX_RANKS:
        raise TraceLimitError(f"chunk of {total} ranks", path=path, offset=offset)
    if total == 0 or last >= 1 << 31 or meta.rank != meta.ranges[0].first:
        raise TraceFormatError("the ranks of a chunk are out of range", path=path, offset=offset)
    if meta.stacked and total * meta.num_rows > MAX_CHUNK_ROWS:
        raise TraceLimitError(f"stacked chunk of {total} times {meta.num_rows} rows", path=path, offset=offset)


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
        if version[0] != FORMAT_VERSION[0]:
            message = f"format {version[0]}.{version[1]}, this library reads {FORMAT_VERSION[0]}.x"
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
    texts = [builder.CreateSharedString(text) for text in (group.name, group.description, group.backend)]
    ranges = ranges_of(group.ranks)
    dense = len(ranges) * RANK_RANGE.itemsize < len(group.ranks) * 4
    members = _ranges_vector(builder, ranges) if dense else builder.CreateNumpyVector(np.array(group.ranks, "<i4"))
    fb.GroupStart(builder)
    fb.GroupAddGroupId(builder, group.group_id)
    fb.GroupAddName(builder, texts[0])
    fb.GroupAddDescription(builder, texts[1])
    fb.GroupAddBackend(builder, texts[2])
    if dense:
        fb.GroupAddRankRanges(builder, members)
    else:
        fb.GroupAddRanks(builder, members)
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
    ranks = _vector(group._tab, 4, np.dtype("<i4"))
    ranges = _vector(group._tab, 5, RANK_RANGE)
    if len(ranges):
        if len(ranks) or int(ranges["num_ranks"].sum(dtype=np.uint64)) > MAX_RANKS:
            raise ValueError(f"members of group {group.GroupId()}")
        ranks = ranks_of(RankRange(*row) for row in ranges.tolist())
    texts = (_text(group.Name()), _text(group.Description()), _text(group.Backend()))
    return ProcessGroup(group.GroupId(), *texts, ranks=tuple(ranks.tolist()))


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
    ranges = _ranges_vector(builder, meta.ranges)
    fb.FooterStart(builder)
    fb.FooterAddRankRanges(builder, ranges)
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
            _vector(footer._tab, 6, RANK_RANGE),
        )
