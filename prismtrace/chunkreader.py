"""Reads the chunks that an index names: checks them against it, and finds the chunk of the role that they refer to.

Does not join chunks, and does not choose which ones to read.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from prismtrace import container, metas
from prismtrace.container import RecordKind
from prismtrace.decoder import ChunkDecoder, Into
from prismtrace.entries import CHUNK_ENTRY, ChunkMeta, chunk_entry, ranks_of
from prismtrace.errors import TraceChecksumError, TraceDataError, TraceFormatError, TraceLimitError
from prismtrace.index import Index
from prismtrace.members import Changes
from prismtrace.model import ROLE_RANK, ColumnSpec, TableKind
from prismtrace.repeated import Repeated
from prismtrace.source import Source
from prismtrace.stacked import StackedChunk
from prismtrace.strings import parse_strings
from prismtrace.tables import Column

_HEAD_BYTES: Final = 1 << 12
_WHOLE_BYTES: Final = 1 << 14
_FEW_COLUMNS: Final = 6
_KEPT_STRINGS: Final = 4
_KEPT_LEAST: Final = 8
_KEPT_BYTES: Final = 64 << 20


class _Loaded(NamedTuple):
    """A chunk whose header was read. `tables` are its decoded maps and shifts by column, `stacks` its decoded rows."""

    meta: ChunkMeta
    fetch: Callable[[int, int], memoryview]
    data_offset: int
    ranks: NDArray[np.int64]
    tables: dict[int, Changes]
    stacks: list[StackedChunk]


K = TypeVar("K")
V = TypeVar("V")


class _Recent(Generic[K, V]):
    """What was used last: as many as `_KEPT_BYTES` hold decoded, and `_KEPT_LEAST` however large they are.

    The ranks of a job are read one after the other, and go round its roles: all of these are needed again soon.
    """

    def __init__(self) -> None:
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: K) -> V | None:
        found = self._items.get(key)
        if found is None:
            return None
        self._items.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        self._num_bytes += num_bytes - self._items.pop(key, (value, 0))[1]
        self._items[key] = value, num_bytes
        while len(self._items) > _KEPT_LEAST and self._num_bytes > _KEPT_BYTES:
            self._num_bytes -= self._items.popitem(last=False)[1][1]

    def clear(self) -> None:
        self._items.clear()
        self._num_bytes = 0


class ChunkReader:
    """Decodes chunks of one file. Safe to use from several threads."""

    def __init__(self, source: Source, index: Index, *, payload: Callable[[bytes], bytes], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._source, self._index, self._path, self._payload = source, index, source.name, payload
        self._strings: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        self._roles = _Recent[int, ChunkDecoder]()
        self._kept = _Recent[tuple[int, int], _Loaded]()
        self._repeated = Repeated()
        self._lock = threading.Lock()

    def columns(
        self,
        entry: Any,
        rank: int,
        specs: list[ColumnSpec],
        selected: frozenset[str] | None,
        into: Into | None = None,
    ) -> tuple[dict[str, Column], tuple[ColumnSpec, ...]]:
        """Columns of a chunk for one rank, and the description of the named ones. `selected`: names, None = all."""
        whole = selected is None or len(specs) > _FEW_COLUMNS
        loaded = self._of_several(entry) if entry["num_ranges"] else self._load(entry, whole=whole)
        place = self._place(loaded, entry, rank)
        if loaded.meta.stacked:
            return self._stack(loaded, entry, rank, len(specs)).columns(place, specs, selected)
        decoder = self._decoder_of(loaded, entry, rank, place, into)
        columns = decoder.decode(specs, selected)
        return columns, decoder.named_specs(columns)

    def members(self, entry: Any, ranks: Sequence[int]) -> tuple[ChunkDecoder, list[int]] | None:
        """The decoder of a chunk of several ranks and their places in it; None for one that holds rows of each."""
        loaded = self._of_several(entry)
        if loaded.meta.stacked:
            return None
        places = [self._place(loaded, entry, rank) for rank in ranks]
        return self._decoder_of(loaded, entry, ranks[0], places[0]), places

    def forget(self) -> None:
        """Drops what is kept. What is kept refers back to this object, so this also lets go of it at once."""
        with self._lock:
            for kept in (self._strings, self._roles, self._kept, self._repeated):
                kept.clear()

    def _stack(self, loaded: _Loaded, entry: Any, rank: int, num_columns: int) -> StackedChunk:
        """The columns of all ranks of a chunk, which are decoded together."""
        size = loaded.meta.num_rows * len(loaded.ranks) * 8 * max(1, num_columns)
        if size > self._max_bytes:
            message = f"the ranks of a stacked chunk need up to {size} bytes, the limit is {self._max_bytes}"
            raise TraceLimitError(message, path=self._path, offset=int(entry["offset"]))
        if not loaded.stacks:
            decoder = self._decoder_of(loaded, entry, rank, None)
            loaded.stacks.append(StackedChunk(decoder, num_rows=loaded.meta.num_rows))
        return loaded.stacks[0]

    def _place(self, loaded: _Loaded, entry: Any, rank: int) -> int:
        """Which of the chunk's ranks a rank is; 0 where it has one rank only."""
        if not loaded.meta.ranges:
            return 0
        place = int(loaded.ranks.searchsorted(rank))
        if place == len(loaded.ranks) or loaded.ranks[place] != rank:
            message = f"the index says that the chunk counts for rank {rank}, it does not"
            raise TraceDataError(message, path=self._path, offset=int(entry["offset"]))
        return place

    def _decoder_of(
        self, loaded: _Loaded, entry: Any, rank: int, place: int | None, into: Into | None = None
    ) -> ChunkDecoder:
        meta, template = loaded.meta, None
        if rank != ROLE_RANK and meta.role:
            template = self._template(meta, int(entry["offset"]))
        return ChunkDecoder(
            meta,
            fetch=loaded.fetch,
            path=self._path,
            data_offset=loaded.data_offset,
            template=template,
            place=place,
            num_ranks=max(1, len(loaded.ranks)),
            tables=loaded.tables,
            keep=rank == ROLE_RANK,
            into=into,
            shared=lambda: self._shared_strings(meta.strings, int(entry["offset"])),
            repeated=None if place is None else self._repeated,
        )

    def _of_several(self, entry: Any) -> _Loaded:
        """A chunk of several ranks, which is kept: its next rank is likely to be read next."""
        key = (int(entry["offset"]), int(entry["first_range"]))
        with self._lock:
            known = self._kept.get(key)
        if known is None:
            known = self._load(entry, whole=True)
            with self._lock:
                self._kept.put(key, known, int(entry["length"]) + _decoded_bytes(known))
        return known

    def _shared_strings(self, digest: bytes, offset: int) -> tuple[str, ...]:
        """The strings that a chunk's dictionary begins with."""
        if not digest:
            return ()
        with self._lock:
            known = self._strings.get(digest)
        if known is None:
            if digest not in self._index.payloads:
                message = f"the file lacks the shared strings {digest.hex()} of a chunk"
                raise TraceDataError(message, path=self._path, offset=offset)
            known = parse_strings(self._payload(digest), path=self._path, offset=offset)
            with self._lock:
                self._strings[digest] = known
                while len(self._strings) > _KEPT_STRINGS:
                    self._strings.popitem(last=False)
        return known

    def _template(self, meta: ChunkMeta, offset: int) -> ChunkDecoder:
        entries = self._index.entries(TableKind(meta.table), ROLE_RANK, role=meta.role)
        place = int(np.searchsorted(entries["first_row"], np.uint64(meta.first_row)))
        here = entries[place] if place < len(entries) else None
        if here is None or (int(here["first_row"]), int(here["num_rows"])) != (meta.first_row, meta.num_rows):
            last = meta.first_row + meta.num_rows - 1
            message = f"role {meta.role} has no chunk of rows {meta.first_row} .. {last}"
            raise TraceDataError(message, path=self._path, offset=offset)
        key = int(here["offset"])
        with self._lock:
            known = self._roles.get(key)
            if known is not None:
                return known
        loaded = self._load(here, whole=False)
        decoder = self._decoder_of(loaded, here, ROLE_RANK, 0)
        with self._lock:
            self._roles.put(key, decoder, int(here["length"]) + _decoded_bytes(loaded))
        return decoder

    def _load(self, entry: Any, *, whole: bool) -> _Loaded:
        """The checked header of a chunk, and what fetches bytes of its data section."""
        offset, length = int(entry["offset"]), int(entry["length"])
        raw = self._source.read_at(offset, length if whole or length <= _WHOLE_BYTES else _HEAD_BYTES)
        frame = container.parse_frame(raw, path=self._path, offset=offset)
        expected = (RecordKind.CHUNK, length, int(entry["meta_crc"]), int(entry["data_crc"]))
        if (frame.kind, frame.length, frame.meta_crc, frame.data_crc) != expected:
            raise TraceDataError("the chunk is not the one in the index", path=self._path, offset=offset)
        if len(raw) < frame.data_start:
            raw = self._source.read_at(offset, frame.data_start)
        meta_raw = bytes(raw[container.FRAME_BYTES : container.FRAME_BYTES + frame.meta_length])
        if zlib.crc32(meta_raw) != frame.meta_crc:
            raise TraceChecksumError("checksum of a chunk header", path=self._path, offset=offset)
        meta = metas.parse_chunk(meta_raw, path=self._path, offset=offset)
        told = dict(zip(CHUNK_ENTRY.names or (), chunk_entry(meta, frame, offset), strict=True))
        said = dict(zip(CHUNK_ENTRY.names or (), entry.item(), strict=True))
        if meta.ranges and said["num_ranges"]:  # the index may let the chunk count for some of its ranks only
            told |= {name: said[name] for name in ("rank", "first_range", "num_ranges")}
        if told != said:
            raise TraceDataError("the chunk is not what the index says", path=self._path, offset=offset)
        data_offset, data_length = offset + frame.data_start, frame.data_length
        if sum(stream.stored_length for stream in meta.streams) != data_length:
            raise TraceDataError("streams and chunk differ in length", path=self._path, offset=offset)
        head = raw[frame.data_start :]

        def fetch(start: int, size: int) -> memoryview:
            if start + size > data_length:
                raise TraceFormatError("streams reach past the chunk", path=self._path, offset=data_offset + start)
            if start + size <= len(head):
                return head[start : start + size]
            return self._source.read_at(data_offset + start, size)

        return _Loaded(meta, fetch, data_offset, ranks_of(meta.ranges), {}, [])


def _decoded_bytes(loaded: _Loaded) -> int:
    """About what is kept of a chunk once it was decoded: all rows of a stack or a role, what is replaced for others."""
    meta, num_ranks = loaded.meta, max(1, len(loaded.ranks))
    if meta.stacked or num_ranks == 1:
        return 8 * meta.num_rows * num_ranks * max(1, len(meta.streams))
    return 8 * sum(stream.num_values for stream in meta.streams)
