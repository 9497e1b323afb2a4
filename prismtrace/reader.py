"""Reads a trace lazily: the index on opening, the columns that are asked for when they are asked for.

Does not interpret the rows, and does not repair a broken file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from prismtrace import metas
from prismtrace.assemble import Joiner, Part, concatenate
from prismtrace.chunkreader import ChunkReader
from prismtrace.errors import (
    TraceFormatError,
    TraceLimitError,
    TraceUsageError,
    TraceVersionError,
)
from prismtrace.index import Index, index_of_footer, scan
from prismtrace.model import ABSENT32, COLUMNS, ROLE_RANK, ColumnSpec, GraphKind, ProcessGroup, TableKind
from prismtrace.notebook import ReaderFrames
from prismtrace.payloads import ATTACHMENT_PREFIX, PayloadReader, as_bytes
from prismtrace.selection import selected_names, specs_of, step_range
from prismtrace.source import TraceInput, open_source
from prismtrace.tables import (
    EventTable,
    ScalarTable,
    StepTable,
    Table,
    TrackTable,
    UnitTable,
    column_bytes,
    frozen,
    frozen_column,
)

DEFAULT_MAX_RESULT_BYTES: Final = 8 << 30
_DIGEST: Final = re.compile("[0-9a-f]{32}")
T = TypeVar("T", bound=Table)


class TraceReader(ReaderFrames):
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
        _keep_freed_memory()
        self._source = open_source(source)
        self._max_result_bytes = max_result_bytes
        try:
            self._index = self._open(allow_unfinished=allow_unfinished)
        except BaseException:
            self._source.close()
            raise
        self._rows: NDArray[np.int64] = np.zeros(0, np.int64)
        self._payloads = PayloadReader(self._source, self._index, max_bytes=max_result_bytes)
        self._chunk_reader = ChunkReader(
            self._source, self._index, payload=self._payloads.read, max_bytes=max_result_bytes
        )

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
        """What the times are worth; a kind of a later minor version is kept, its name is its number."""
        return GraphKind(self._index.header.graph_kind)

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

    def chunk_ranges(self, table: TableKind, rank: int, *, role: int = 0) -> NDArray[Any]:
        """The index of a table: first_row, num_rows, first_step, last_step, first_ns and last_ns of its chunks."""
        entries = self._index.entries(table, ROLE_RANK if role else rank, role=role)
        return entries[["first_row", "num_rows", "first_step", "last_step", "first_ns", "last_ns"]]

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
        self,
        rank: int,
        *,
        steps: range | int | None = None,
        columns: Collection[str] | None = None,
        max_rows: int | None = None,
    ) -> Iterator[UnitTable]:
        """The units of a rank in order, in bounded memory: chunk by chunk, or at most `max_rows` at a time."""
        if max_rows is not None and max_rows < 1:
            raise TraceUsageError(f"max_rows must be at least 1, not {max_rows}")
        specs, wanted = specs_of(TableKind.UNITS, columns), step_range(steps)
        for part in self._parts(TableKind.UNITS, rank, specs, wanted, selected_names(columns)):
            for start in range(0, len(part.row_index), max_rows or metas.MAX_CHUNK_ROWS):
                piece = part if max_rows is None else part.take(slice(start, start + max_rows))
                yield concatenate(UnitTable, rank, specs, [piece], selected=selected_names(columns), path=self.path)

    @property
    def roles(self) -> Mapping[int, tuple[int, ...]]:
        """Role -> the ranks that have it, for all roles of which the file has rows; from the index alone."""
        return MappingProxyType(self._index.roles)

    def role_of(self, rank: int) -> int | None:
        """The role that the units of a rank refer to (those of its first chunk that refers to one); None without."""
        return self._index.role_of(rank)

    def role_units(self, role: int, *, columns: Collection[str] | None = None) -> UnitTable:
        """The units of a role itself, which its ranks differ from; `rank` of the table is -1."""
        if role not in self.roles:
            raise TraceUsageError(f"{self.path}: no role {role}; it has: {_short(tuple(self.roles))}")
        return self._table(UnitTable, ROLE_RANK, None, columns, role=role)

    def role_table(self, role: int, table: TableKind) -> Table:
        """One whole table of a role itself."""
        kinds: tuple[type[Table], ...] = (UnitTable, StepTable, ScalarTable, EventTable, TrackTable)
        kind = next(kind for kind in kinds if kind.table is table)
        return self._table(kind, ROLE_RANK, None, None, role=role)

    def _table(
        self, kind: type[T], rank: int, steps: range | int | None, columns: Collection[str] | None, *, role: int = 0
    ) -> T:
        if not role and rank not in self._index.rank_set:
            raise TraceUsageError(f"{self.path}: rank {rank} has no data; ranks with data: {_short(self.ranks)}")
        specs, wanted = specs_of(kind.table, columns), step_range(steps)
        parts, size = [], 0
        entries = self._chunks(kind.table, rank, wanted, role)
        if len(entries) == 1 and wanted is None:
            return self._of_one_chunk(kind, rank, entries[0], specs, selected_names(columns))
        num_rows = int(entries["num_rows"].sum(dtype=np.int64))
        self._check_size(num_rows * 8 * max(1, len(specs)), rank)
        joiner = None
        if len(entries) > 1 and wanted is None:
            joiner = Joiner(kind, rank, specs, num_rows=num_rows, path=self.path)
        for part in self._parts(kind.table, rank, specs, wanted, selected_names(columns), role=role, joiner=joiner):
            size += sum(column_bytes(column) for column in part.columns.values())
            self._check_size(size, rank)
            if joiner is None:
                parts.append(part)
            else:
                joiner.add(part)
        if joiner is not None:
            return joiner.table(selected=selected_names(columns))
        return concatenate(kind, rank, specs, parts, selected=selected_names(columns), path=self.path)

    def _of_one_chunk(
        self, kind: type[T], rank: int, entry: Any, specs: list[ColumnSpec], selected: frozenset[str] | None
    ) -> T:
        """The table of a rank whose rows are in one chunk; there may be many such ranks, each with few rows."""
        first, count = int(entry["first_row"]), int(entry["num_rows"])
        self._check_size(count * 8 * max(1, len(specs)), rank)
        columns, named = self._chunk_reader.columns(entry, rank, specs, selected)
        self._check_size(sum([column_bytes(frozen_column(column)) for column in columns.values()]), rank)
        rows = self._rows
        if len(rows) != count or not count or rows[0] != first:  # else it is that of the rank before
            rows = self._rows = frozen(np.arange(first, first + count, dtype=np.int64))
        return kind(rank, columns, row_index=rows, selected=selected, named={spec.name: spec for spec in named})

    def _check_size(self, size: int, rank: int) -> None:
        if size > self._max_result_bytes:
            message = (
                f"rank {rank} would need up to {size} bytes, the limit is {self._max_result_bytes}: "
                "ask for fewer steps or columns, iterate, or raise max_result_bytes"
            )
            raise TraceLimitError(message, path=self.path)

    def _chunks(self, table: TableKind, rank: int, wanted: range | None, role: int) -> NDArray[Any]:
        entries = self._index.entries(table, rank, role=role)
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
        *,
        role: int = 0,
        joiner: Joiner[Any] | None = None,
    ) -> Iterator[Part]:
        step_spec = COLUMNS[table][2] if table is TableKind.UNITS else COLUMNS[table][0]
        decoded = specs if wanted is None or step_spec in specs else [*specs, step_spec]
        for entry in self._chunks(table, rank, wanted, role):
            first, count = int(entry["first_row"]), int(entry["num_rows"])
            into = None if joiner is None else partial(joiner.place, num_rows=count)
            columns, named = self._chunk_reader.columns(entry, rank, decoded, selected, into)
            rows = np.arange(first, first + count, dtype=np.int64)
            if wanted is not None:
                step = columns.get("step")
                if not isinstance(step, np.ndarray):
                    step = np.full(count, ABSENT32, np.int32)
                mask = (step >= wanted.start) & (step < wanted.stop) & (step != ABSENT32)
                if step_spec not in specs:
                    columns.pop("step", None)
                part = Part(columns, rows, named)
                yield part if mask.all() else part.take(mask)
            else:
                yield Part(columns, rows, named)

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
        return int(self._payloads.entry(digest)["raw_length"])

    def payload(self, digest: bytes) -> bytes:
        """The bytes of a payload."""
        return self._payloads.read(digest)

    def read_payload_into(self, digest: bytes, buffer: Any, *, verify: bool = True) -> int:
        """Reads a payload into the start of a writable buffer and returns its size.

        Payloads that are stored uncompressed are read straight into the buffer; `verify=False` then skips the
        checksum.
        """
        return self._payloads.read_into(digest, as_bytes(buffer), verify=verify)

    def close(self) -> None:
        """Closes the file; tables that were read stay valid."""
        self._chunk_reader.forget()
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@cache
def _keep_freed_memory() -> None:
    """Once in a process: lets the allocator of glibc keep a few MiB of what decoding frees and needs again at once.

    It takes this from the size of the largest block that was freed; before, each array of a chunk is given back to the
    system and costs its page faults again, a quarter of the time of reading a file.
    """
    np.empty(4 << 20, np.uint8)


def _short(ranks: Sequence[int]) -> str:
    if not ranks:
        return "none"
    if len(ranks) > 8:
        return f"{len(ranks)} in {ranks[0]} .. {ranks[-1]}"
    return ", ".join(map(str, ranks))
