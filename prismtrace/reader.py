"""Reads a trace lazily: the index on opening, the columns that are asked for when they are asked for.

Does not interpret the rows, and does not repair a broken file.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from prismtrace import container, metas
from prismtrace._generated.schema import Compression
from prismtrace.assemble import Part, concatenate
from prismtrace.container import RecordKind
from prismtrace.decoder import ChunkDecoder
from prismtrace.encoding import decompress
from prismtrace.entries import chunk_entry
from prismtrace.errors import (
    TraceChecksumError,
    TraceDataError,
    TraceFormatError,
    TraceLimitError,
    TraceUsageError,
    TraceVersionError,
    reading,
)
from prismtrace.index import Index, index_of_footer, scan
from prismtrace.model import ABSENT32, COLUMNS, ColumnSpec, GraphKind, ProcessGroup, TableKind
from prismtrace.source import TraceInput, open_source
from prismtrace.tables import (
    Column,
    DictionaryColumn,
    EventTable,
    ListColumn,
    ScalarTable,
    StepTable,
    Table,
    TrackTable,
    UnitTable,
)
from prismtrace.writer import ATTACHMENT_PREFIX, as_bytes

DEFAULT_MAX_RESULT_BYTES: Final = 8 << 30
_DIGEST: Final = re.compile("[0-9a-f]{32}")
T = TypeVar("T", bound=Table)


class TraceReader:
    """Reads one trace file. A context manager; safe to use from several threads.

    Args:
        source: a path, a seekable binary file object or a memory map.
        allow_unfinished: also reads a file without an index, up to its last whole record.
        max_result_bytes: refuses to build a table, or to decompress a payload, above this size (TraceLimitError):
            files may be hostile.

    Raises:
        TraceReadError: the operating system refuses.
        TraceFormatError: or a subclass: the bytes are not a readable trace.
    """

    def __init__(
        self,
        source: TraceInput,
        *,
        allow_unfinished: bool = False,
        max_result_bytes: int = DEFAULT_MAX_RESULT_BYTES,
    ) -> None:
        self._source = open_source(source)
        self._max_result_bytes = max_result_bytes
        try:
            self._index = self._open(allow_unfinished=allow_unfinished)
        except BaseException:
            self._source.close()
            raise

    def _open(self, *, allow_unfinished: bool) -> Index:
        try:
            return index_of_footer(self._source)
        except (TraceVersionError, TraceLimitError):
            raise
        except TraceFormatError:
            if not allow_unfinished:
                raise
        return scan(self._source)

    @property
    def path(self) -> str:
        """What the file is called in messages."""
        return self._source.name

    @property
    def format_version(self) -> tuple[int, int]:
        """Major and minor version of the format the file was written in."""
        return self._index.header.version

    @property
    def writer(self) -> str:
        """What wrote the file."""
        return self._index.header.writer

    @property
    def graph_kind(self) -> GraphKind:
        """What the times are worth; UNSPECIFIED also for a kind of a later minor version."""
        kind = self._index.header.graph_kind
        return GraphKind(kind) if kind in GraphKind._value2member_map_ else GraphKind.UNSPECIFIED

    @property
    def world_size(self) -> int:
        """Number of ranks of the job; 0 = unknown."""
        return self._index.header.world_size

    @property
    def metadata(self) -> Mapping[str, str]:
        """String pairs about the job."""
        return MappingProxyType(self._index.metadata)

    @property
    def groups(self) -> Mapping[int, ProcessGroup]:
        """Process groups by id."""
        return MappingProxyType(self._index.groups)

    @property
    def unfinished(self) -> bool:
        """Whether the file has no (readable) index and was scanned."""
        return self._index.end is not None

    @property
    def readable_bytes(self) -> int:
        """How far whole records reach."""
        return self._source.size if self._index.end is None else self._index.end

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have rows in some table, sorted."""
        return self._index.ranks

    @property
    def payload_digests(self) -> tuple[bytes, ...]:
        """The digests of all payloads, in file order."""
        return tuple(self._index.payloads)

    @property
    def first_ns(self) -> int | None:
        """The earliest time of all tables, from the index alone; None when there are no times."""
        entries = self._index.chunk_entries
        timed = entries["first_ns"][entries["first_ns"] <= entries["last_ns"]]
        return int(timed.min()) if len(timed) else None

    def num_units(self, rank: int) -> int:
        """Number of units of a rank, from the index alone."""
        return self._index.num_rows(TableKind.UNITS, rank)

    def num_steps(self, rank: int) -> int:
        """Number of step rows of a rank, from the index alone."""
        return self._index.num_rows(TableKind.STEPS, rank)

    def num_events(self, rank: int) -> int:
        """Number of events of a rank, from the index alone."""
        return self._index.num_rows(TableKind.EVENTS, rank)

    def missing_rows(self, table: TableKind, rank: int) -> tuple[int, int] | None:
        """The first gap, as first and last row (exclusive), between the chunks of a table; None when there is none."""
        entries = self._index.entries(table, rank)
        ends = entries["first_row"] + entries["num_rows"]
        gaps = np.flatnonzero(entries["first_row"][1:] != ends[:-1])
        return (int(ends[gaps[0]]), int(entries["first_row"][gaps[0] + 1])) if len(gaps) else None

    def step_range(self, rank: int) -> tuple[int, int] | None:
        """First and last step that the units of a rank belong to, from the index alone."""
        entries = self._index.entries(TableKind.UNITS, rank)
        entries = entries[entries["first_step"] <= entries["last_step"]]
        return (int(entries["first_step"].min()), int(entries["last_step"].max())) if len(entries) else None

    def units(
        self, rank: int, *, steps: range | int | None = None, columns: Collection[str] | None = None
    ) -> UnitTable:
        """The units of a rank; of some steps only, or some columns only, when asked."""
        return self._table(UnitTable, rank, steps, columns)

    def steps(self, rank: int, *, columns: Collection[str] | None = None) -> StepTable:
        """The completed steps of a rank."""
        return self._table(StepTable, rank, None, columns)

    def scalars(self, rank: int, *, columns: Collection[str] | None = None) -> ScalarTable:
        """The scalars of a rank."""
        return self._table(ScalarTable, rank, None, columns)

    def events(self, rank: int, *, columns: Collection[str] | None = None) -> EventTable:
        """The imported or profiled events of a rank."""
        return self._table(EventTable, rank, None, columns)

    def tracks(self, rank: int, *, columns: Collection[str] | None = None) -> TrackTable:
        """The lines of execution that the events of a rank lie on."""
        return self._table(TrackTable, rank, None, columns)

    def iter_units(
        self, rank: int, *, steps: range | int | None = None, columns: Collection[str] | None = None
    ) -> Iterator[UnitTable]:
        """The units of a rank chunk by chunk, in bounded memory."""
        specs, wanted = _specs(TableKind.UNITS, columns), _step_range(steps)
        for part in self._parts(TableKind.UNITS, rank, specs, wanted, _selected(columns)):
            yield concatenate(UnitTable, rank, specs, [part], selected=_selected(columns), path=self.path)

    def _table(self, kind: type[T], rank: int, steps: range | int | None, columns: Collection[str] | None) -> T:
        if rank not in self._index.rank_set:
            raise TraceUsageError(f"{self.path}: rank {rank} has no data; ranks with data: {_short(self.ranks)}")
        specs, wanted = _specs(kind.table, columns), _step_range(steps)
        parts, size = [], 0
        entries = self._chunks(kind.table, rank, wanted)
        self._check_size(int(entries["num_rows"].sum(dtype=np.int64)) * 8 * max(1, len(specs)), rank)
        for part in self._parts(kind.table, rank, specs, wanted, _selected(columns)):
            size += sum(_nbytes(column) for column in part.columns.values())
            self._check_size(size, rank)
            parts.append(part)
        return concatenate(kind, rank, specs, parts, selected=_selected(columns), path=self.path)

    def _check_size(self, size: int, rank: int) -> None:
        if size > self._max_result_bytes:
            message = (
                f"rank {rank} would need up to {size} bytes, the limit is {self._max_result_bytes}: "
                "ask for fewer steps or columns, iterate, or raise max_result_bytes"
            )
            raise TraceLimitError(message, path=self.path)

    def _chunks(self, table: TableKind, rank: int, wanted: range | None) -> NDArray[Any]:
        entries = self._index.entries(table, rank)
        if wanted is not None:
            entries = entries[(entries["first_step"] < wanted.stop) & (entries["last_step"] >= wanted.start)]
        return entries

    def _parts(
        self,
        table: TableKind,
        rank: int,
        specs: list[ColumnSpec],
        wanted: range | None,
        selected: frozenset[str] | None,
    ) -> Iterator[Part]:
        step_spec = COLUMNS[table][2] if table is TableKind.UNITS else COLUMNS[table][0]
        decoded = specs if wanted is None or step_spec in specs else [*specs, step_spec]
        for entry in self._chunks(table, rank, wanted):
            columns, named = self._chunk(entry, decoded, selected)
            first, count = int(entry["first_row"]), int(entry["num_rows"])
            rows = np.arange(first, first + count, dtype=np.int64)
            if wanted is not None:
                step = columns.get("step")
                if not isinstance(step, np.ndarray):
                    step = np.full(count, ABSENT32, np.int32)
                mask = (step >= wanted.start) & (step < wanted.stop) & (step != ABSENT32)
                if not mask.all():
                    columns = {name: _take(column, mask) for name, column in columns.items()}
                    rows = rows[mask]
                if step_spec not in specs:
                    columns.pop("step", None)
            yield Part(columns, rows, named)

    def _chunk(
        self, entry: Any, specs: list[ColumnSpec], selected: frozenset[str] | None
    ) -> tuple[dict[str, Column], tuple[ColumnSpec, ...]]:
        offset, length = int(entry["offset"]), int(entry["length"])
        whole = len(specs) > 6 or length < 1 << 16
        raw = self._source.read_at(offset, length if whole else min(length, 1 << 13))
        frame = container.parse_frame(raw, path=self.path, offset=offset)
        expected = (RecordKind.CHUNK, length, int(entry["meta_crc"]), int(entry["data_crc"]))
        if (frame.kind, frame.length, frame.meta_crc, frame.data_crc) != expected:
            raise TraceDataError("the chunk is not the one in the index", path=self.path, offset=offset)
        if len(raw) < frame.data_start:
            raw = self._source.read_at(offset, frame.data_start)
        meta_raw = bytes(raw[container.FRAME_BYTES : container.FRAME_BYTES + frame.meta_length])
        if zlib.crc32(meta_raw) != frame.meta_crc:
            raise TraceChecksumError("checksum of a chunk header", path=self.path, offset=offset)
        meta = metas.parse_chunk(meta_raw, path=self.path, offset=offset)
        if chunk_entry(meta, frame, offset, first_range=int(entry["first_range"])) != entry.item():
            raise TraceDataError("the chunk is not what the index says", path=self.path, offset=offset)
        data_offset = offset + frame.data_start
        named = tuple(spec for spec in meta.named if selected is None or spec.name in selected)
        wanted = [*specs, *named]

        def fetch(start: int, size: int) -> memoryview:
            if start < base or start + size > base + len(data):
                raise TraceFormatError("streams reach past the chunk", path=self.path, offset=data_offset + start)
            return data[start - base : start - base + size]

        decoder = ChunkDecoder(meta, fetch=fetch, path=self.path, data_offset=data_offset)
        if decoder.data_length != frame.data_length:
            raise TraceDataError("streams and chunk differ in length", path=self.path, offset=offset)
        if whole:
            base, data = 0, raw[frame.data_start : frame.data_start + frame.data_length]
        else:
            base, end = decoder.span(wanted)
            data = self._source.read_at(data_offset + base, end - base)
        return decoder.decode(wanted), named

    @property
    def attachments(self) -> Mapping[str, bytes]:
        """Name -> digest of the bytes that are kept under a name."""
        found = {}
        for key, value in self._index.metadata.items():
            if key.startswith(ATTACHMENT_PREFIX) and _DIGEST.fullmatch(value):
                found[key.removeprefix(ATTACHMENT_PREFIX)] = bytes.fromhex(value)
        return MappingProxyType(found)

    def attachment(self, name: str) -> bytes:
        """The bytes that are kept under a name."""
        digest = self.attachments.get(name)
        if digest is None:
            there = ", ".join(self.attachments) or "none"
            raise TraceUsageError(f"{self.path}: no attachment {name!r}; it has: {there}")
        return self.payload(digest)

    def has_payload(self, digest: bytes) -> bool:
        """Whether the file holds the payload."""
        return digest in self._index.payloads

    def payload_bytes(self, digest: bytes) -> int:
        """Decoded size of a payload, from the index alone."""
        return int(self._payload_entry(digest)["raw_length"])

    def payload(self, digest: bytes) -> bytes:
        """The bytes of a payload."""
        entry = self._payload_entry(digest)
        offset, raw_length = int(entry["data_offset"]), int(entry["raw_length"])
        compression = int(entry["compression"])
        if compression != Compression.NONE and raw_length > self._max_result_bytes:
            raise TraceLimitError(f"payload of {raw_length} bytes", path=self.path, offset=offset)
        stored = self._source.read_at(offset, int(entry["stored_length"]))
        if zlib.crc32(stored) != int(entry["data_crc"]):
            raise TraceChecksumError("checksum of a payload", path=self.path, offset=offset)
        with reading("payload", path=self.path, offset=offset):
            return decompress(stored, compression=compression, raw_length=raw_length, path=self.path, offset=offset)

    def read_payload_into(self, digest: bytes, buffer: Any, *, verify: bool = True) -> int:
        """Reads a payload into the start of a writable buffer and returns its size.

        Payloads that are stored uncompressed are read straight into the buffer; `verify=False` then skips the
        checksum.
        """
        view = as_bytes(buffer)
        entry = self._payload_entry(digest)
        offset, raw_length = int(entry["data_offset"]), int(entry["raw_length"])
        if view.readonly or len(view) < raw_length:
            raise TraceUsageError(f"a writable buffer of at least {raw_length} bytes is needed")
        target = view[:raw_length]
        if int(entry["compression"]) != Compression.NONE or int(entry["stored_length"]) != raw_length:
            target[:] = self.payload(digest)
        else:
            self._source.read_into(offset, target)
            if verify and zlib.crc32(target) != int(entry["data_crc"]):
                raise TraceChecksumError("checksum of a payload", path=self.path, offset=offset)
        return raw_length

    def _payload_entry(self, digest: bytes) -> Any:
        position = self._index.payloads.get(digest)
        if position is None:
            raise TraceUsageError(f"{self.path}: no payload {bytes(digest).hex()}")
        return self._index.payload_entries[position]

    def close(self) -> None:
        """Closes the file; tables that were read stay valid."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _specs(table: TableKind, columns: Collection[str] | None) -> list[ColumnSpec]:
    if columns is None:
        return list(COLUMNS[table])
    if isinstance(columns, str):
        raise TraceUsageError(f"columns must be a collection of names, not the str {columns!r}")
    specs = [spec for spec in COLUMNS[table] if spec.name in columns]
    unknown = {name for name in set(columns) - {spec.name for spec in specs} if "." not in name}
    if unknown:
        raise TraceUsageError(f"{table.name.lower()} have no column {sorted(unknown)}")
    return specs


def _selected(columns: Collection[str] | None) -> frozenset[str] | None:
    return None if columns is None else frozenset(columns)


def _step_range(steps: range | int | None) -> range | None:
    if steps is None:
        return None
    wanted = range(steps, steps + 1) if isinstance(steps, int) else steps
    if not isinstance(wanted, range) or wanted.step != 1:  # type: ignore[redundant-expr]
        raise TraceUsageError(f"steps must be a range with step 1, or one step, not {steps!r}")
    return wanted


def _take(column: Column, rows: NDArray[Any]) -> Column:
    return column[rows] if isinstance(column, np.ndarray) else column.take(rows)


def _nbytes(column: Column) -> int:
    if isinstance(column, DictionaryColumn):
        return column.codes.nbytes
    if isinstance(column, ListColumn):
        return column.values.nbytes + column.offsets.nbytes
    return column.nbytes


def _short(ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "none"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks in {ranks[0]} .. {ranks[-1]}"
    return ", ".join(map(str, ranks))
