"""Knows where everything is in a file: from its footer, or by scanning the records of an unfinished file.

Does not read columns or payload bytes.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismtrace import container, metas
from prismtrace.container import FRAME_BYTES, TRAILER_BYTES, Frame, RecordKind
from prismtrace.entries import (
    CHUNK_ENTRY,
    MAX_RANKS,
    PAYLOAD_ENTRY,
    RANK_RANGE,
    ChunkMeta,
    RankRange,
    chunk_entry,
    payload_entry,
    ranges_of,
    ranks_of,
)
from prismtrace.errors import (
    TraceChecksumError,
    TraceDataError,
    TraceFormatError,
    TraceLimitError,
    TraceTruncatedError,
    TraceVersionError,
)
from prismtrace.model import FORMAT_VERSION, ROLE_RANK, ProcessGroup, TableKind
from prismtrace.source import Source

MAX_META_BYTES_SCANNED = 1 << 26
MAX_RANK_CHUNKS = 1 << 24
MAX_REPEATED = 1 << 20
_NO_CHUNKS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class _Runs:
    """Chunks sorted by table, rank, role and first row; run `i` of equal ones is `place[starts[i]:starts[i + 1]]`.

    Arrays and not a dictionary: a small index may name a million ranks.
    """

    table: NDArray[Any]
    rank: NDArray[np.int64]
    role: NDArray[Any]
    starts: NDArray[np.int64]
    place: NDArray[np.int64]

    @cached_property
    def _of_table(self) -> dict[int, tuple[int, int]]:
        """Where the runs of each table begin and end."""
        tables, first = np.unique(self.table, return_index=True)
        return dict(zip(tables.tolist(), pairwise([*first.tolist(), len(self.table)]), strict=True))

    def chunks_of(self, table: int, rank: int, role: int) -> NDArray[np.int64]:
        """Positions of the chunks in the index, in row order."""
        low, high = self._of_table.get(table, (0, 0))
        if low == high:  # at once: it is asked for each of a million ranks
            return _NO_CHUNKS
        if not -(2**63) <= rank < 2**63 or not 0 <= role < 2**64:
            return _NO_CHUNKS
        for column, exact in ((self.rank, np.int64(rank)), (self.role, np.uint64(role))):  # else numpy compares floats
            part = column[low:high]
            first = low + int(part.searchsorted(exact))
            if first == high or column[first] != exact:
                return _NO_CHUNKS
            if first + 1 < high and column[first + 1] == exact:
                high = low + int(part.searchsorted(exact, "right"))
            else:
                high = first + 1
            low = first
        return self.place[self.starts[low] : self.starts[low + 1]]


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
    ranges: NDArray[Any] = field(default_factory=lambda: np.zeros(0, RANK_RANGE), kw_only=True)

    @cached_property
    def payloads(self) -> dict[bytes, int]:
        """Digest -> position in payload_entries."""
        raw = self.payload_entries["digest"].tobytes()
        return {raw[16 * i : 16 * i + 16]: i for i in range(len(self.payload_entries))}

    @cached_property
    def _by_rank(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """For each rank of each chunk: the position of the chunk, and the rank."""
        entries = self.chunk_entries
        several = np.flatnonzero(entries["num_ranges"])
        if not len(several):
            return np.arange(len(entries)), entries["rank"].astype(np.int64)
        counts = [int(self._ranges_of(entry)["num_ranks"].sum(dtype=np.uint64)) for entry in entries[several]]
        if max(counts) > MAX_RANKS:
            raise TraceLimitError(f"a chunk of {max(counts)} ranks", path=self.path)
        if (total := sum(counts)) > MAX_RANK_CHUNKS:
            raise TraceLimitError(f"an index of {total} pairs of rank and chunk", path=self.path)
        single = np.flatnonzero(entries["num_ranges"] == 0)
        places, ranks = [single], [entries["rank"][single].astype(np.int64)]
        for place in several.tolist():
            mine = ranks_of(RankRange(*row) for row in self._ranges_of(entries[place]).tolist())
            ranks.append(mine)
            places.append(np.full(len(mine), place))
        return np.concatenate(places), np.concatenate(ranks)

    def _ranges_of(self, entry: Any) -> NDArray[Any]:
        first = int(entry["first_range"])
        return self.ranges[first : first + int(entry["num_ranges"])]

    @cached_property
    def _runs(self) -> _Runs:
        place, rank = self._by_rank
        entries = self.chunk_entries
        table, role = entries["table"][place], np.where(rank == ROLE_RANK, entries["role"][place], np.uint64(0))
        first = entries["first_row"][place]
        order = np.lexsort((first, role, rank, table))
        place, rank, table, role, first = place[order], rank[order], table[order], role[order], first[order]
        same = (table[1:] == table[:-1]) & (rank[1:] == rank[:-1]) & (role[1:] == role[:-1])
        num_rows = entries["num_rows"][place]
        full = np.flatnonzero(num_rows)  # a chunk without rows has none that another one holds too
        owner = np.cumsum(np.concatenate([[0], ~same]))[full] if len(place) else full
        if ((owner[1:] == owner[:-1]) & (first[full[1:]] < (first + num_rows)[full[:-1]])).any():
            raise TraceDataError("two chunks hold the same rows of one table", path=self.path)
        starts = np.flatnonzero(np.concatenate([[True], ~same])) if len(place) else _NO_CHUNKS
        return _Runs(table[starts], rank[starts], role[starts], np.append(starts, len(place)), place)

    def owners(self) -> Iterator[tuple[int, int, int]]:
        """Every table, rank and role (0 unless the rank is ROLE_RANK) that has chunks."""
        runs = self._runs
        for at in range(len(runs.rank)):
            yield int(runs.table[at]), int(runs.rank[at]), int(runs.role[at])

    @property
    def owned(self) -> list[tuple[int, int]]:
        """Every table and rank that has chunks."""
        return [(table, rank) for table, rank, _ in self.owners() if rank != ROLE_RANK]

    def check(self) -> None:
        """Refuses an index in which two chunks hold the same rows."""
        _ = self._runs

    def entries(self, table: TableKind | int, rank: int, *, role: int = 0) -> NDArray[Any]:
        """The chunks of one table of one rank, or of a role (with ROLE_RANK), in row order."""
        places = self._runs.chunks_of(int(table), rank, role)
        if len(places) == 1:
            return self.chunk_entries[places[0] : places[0] + 1]
        return self.chunk_entries[places]

    def num_rows(self, table: TableKind, rank: int) -> int:
        """Rows of one table of one rank."""
        return int(self.entries(table, rank)["num_rows"].sum(dtype=np.int64))

    def total_rows(self, table: TableKind) -> int:
        """Rows of one table, over all ranks."""
        place, rank = self._by_rank
        num_ranks = np.bincount(place[rank != ROLE_RANK], minlength=len(self.chunk_entries))
        rows = num_ranks * self.chunk_entries["num_rows"].astype(np.int64)
        return int(rows[self.chunk_entries["table"] == int(table)].sum())

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with rows in a table that this library knows, sorted."""
        runs = self._runs
        known = np.isin(runs.table, [int(kind) for kind in TableKind if kind])
        return tuple(np.unique(runs.rank[known & (runs.rank != ROLE_RANK)]).tolist())

    @cached_property
    def roles(self) -> dict[int, tuple[int, ...]]:
        """Role -> the ranks whose units refer to it, for roles that have chunks of their own."""
        runs = self._runs
        found: dict[int, list[int]] = {role: [] for role in np.unique(runs.role[runs.rank == ROLE_RANK]).tolist()}
        for rank in self.ranks if found else ():
            role = self.role_of(rank)
            if role in found:
                found[role].append(rank)
        return {role: tuple(ranks) for role, ranks in found.items()}

    def role_of(self, rank: int) -> int | None:
        """The role that the units of a rank refer to; None without."""
        roles = self.entries(TableKind.UNITS, rank)["role"]
        roles = roles[roles != 0]
        return int(roles[0]) if len(roles) else None

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
    header = replace(header, required_features=header.required_features | footer.required_features)
    _check_entries(footer, start=start, end=offset, path=source.name, offset=offset)
    groups = {group.group_id: group for group in footer.groups}
    parts = (header, footer.chunks, footer.payloads, groups, footer.metadata)
    index = Index(*parts, path=source.name, ranges=footer.ranges)
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
        if (chunks["rank"] < np.where(chunks["role"], ROLE_RANK, 0)).any():
            raise TraceFormatError("the index has a rank out of range", path=path, offset=offset)
        if (chunks["first_row"] >= np.uint64(1 << 62)).any():
            raise TraceFormatError("the index has a row out of range", path=path, offset=offset)
        several = chunks[chunks["num_ranges"] > 0]
        if (several["first_range"].astype(np.uint64) + several["num_ranges"] > len(footer.ranges)).any():
            raise TraceFormatError("the index has a chunk with ranks that it lacks", path=path, offset=offset)
        if (several["rank"] != footer.ranges["first"][several["first_range"]]).any():
            raise TraceFormatError("the index has a chunk with other ranks than its first", path=path, offset=offset)
    ranges = footer.ranges
    last = ranges["first"] + ranges["stride"].astype(np.int64) * (ranges["num_ranks"].astype(np.int64) - 1)
    if ((ranges["first"] < 0) | (ranges["num_ranks"] < 1) | (ranges["stride"] < 1) | (last >= 1 << 31)).any():
        raise TraceFormatError("the index has ranks out of range", path=path, offset=offset)


@dataclass
class Collected:
    """What records said, one after the other: the parts of an index."""

    chunks: list[tuple[int, ...]] = field(default_factory=list)
    ranges: list[RankRange] = field(default_factory=list)
    payloads: dict[bytes, tuple[Any, ...]] = field(default_factory=dict)
    groups: dict[int, ProcessGroup] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def add(self, frame: Frame, meta: bytes, offset: int, path: str) -> None:
        """Adds what a record says; records of unknown kinds are skipped."""
        if frame.kind == RecordKind.CHUNK:
            self.add_chunk(metas.parse_chunk(meta, path=path, offset=offset), frame, offset)
        elif frame.kind == RecordKind.PAYLOAD:
            digest, raw_length, compression = metas.parse_payload(meta, path=path, offset=offset)
            self.payloads.setdefault(digest, payload_entry(digest, raw_length, compression, frame, offset))
        elif frame.kind == RecordKind.GROUP:
            found = metas.parse_groups(meta, path=path, offset=offset)
            self.groups.update((group.group_id, group) for group in found)
        elif frame.kind == RecordKind.METADATA:
            self.metadata.update(metas.parse_metadata(meta, path=path, offset=offset))

    def add_chunk(self, meta: ChunkMeta, frame: Frame, offset: int) -> None:
        """Adds a chunk."""
        self.chunks.append(chunk_entry(meta, frame, offset, first_range=len(self.ranges)))
        self.ranges.extend(meta.ranges)

    def drop_repeated_rows(self, path: str) -> list[tuple[int, int]]:
        """Lets of chunks with the same rows only the later one count; returns the place and size of what is gone."""
        if not self._has_repeated_rows(path):
            return []
        taken: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        dropped, kept, ranges = [], [], [self.ranges[entry[12] : entry[12] + entry[13]] for entry in self.chunks]
        for entry, mine in zip(reversed(self.chunks), reversed(ranges), strict=True):
            rank, table, first = entry[7], entry[14], entry[2]
            role = entry[5] if rank == ROLE_RANK else 0
            rows = (first, first + entry[6])
            ranks = ranks_of(mine).tolist() if mine else [rank]
            is_empty = rows[0] == rows[1]
            free = ranks if is_empty else []
            for r in () if is_empty else ranks:  # one may be named twice
                if not _overlap(taken.setdefault((table, r, role), []), rows):
                    insort(taken[table, r, role], rows)
                    free.append(r)
            if free:
                kept.append((entry, ranges_of(free) if mine else ()))
            else:
                dropped.append((entry[0], entry[1]))
        self.chunks, self.ranges = [], []
        for entry, left in reversed(kept):
            rank = left[0].first if left else entry[7]
            place = len(self.ranges) if left else 0
            self.chunks.append((*entry[:7], rank, *entry[8:12], place, len(left), *entry[14:]))
            self.ranges.extend(left)
        return dropped[::-1]

    def _has_repeated_rows(self, path: str) -> bool:
        header = metas.HeaderMeta(FORMAT_VERSION, 0, 0, 0, 0, "")
        chunks, payloads, ranges = self.arrays()
        index = Index(header, chunks, payloads, {}, {}, path=path, ranges=ranges)
        try:
            index.check()
        except TraceDataError:
            num_pairs = sum(item.num_ranks for item in self.ranges) + len(self.chunks)
            if num_pairs > MAX_REPEATED:
                raise TraceLimitError(f"repeated rows in {num_pairs} pairs of rank and chunk", path=path) from None
            return True
        return False

    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Chunks, payloads and ranges as the index has them."""
        payloads = np.array(list(self.payloads.values()), PAYLOAD_ENTRY)
        return np.array(self.chunks, CHUNK_ENTRY), payloads, np.array(self.ranges, RANK_RANGE)


def scan(source: Source) -> Index:
    """The index of an unfinished file, up to its last whole record."""
    header, offset = read_header(source)
    collected = Collected()
    while offset < source.size:
        try:
            frame, meta = read_meta(source, offset)
            collected.add(frame, meta, offset, source.name)
        except TraceVersionError:
            raise
        except TraceFormatError:
            break
        offset += frame.length
    collected.drop_repeated_rows(source.name)
    chunks, payloads, ranges = collected.arrays()
    parts = (header, chunks, payloads, collected.groups, collected.metadata, offset)
    index = Index(*parts, path=source.name, ranges=ranges)
    index.check()
    return index


def _overlap(taken: list[tuple[int, int]], rows: tuple[int, int]) -> bool:
    """Whether rows have some that are taken; `taken` is sorted and has no overlaps itself, and none is empty."""
    place = bisect_left(taken, (rows[1],))
    return place > 0 and taken[place - 1][1] > rows[0]
