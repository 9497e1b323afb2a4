"""Writes a trace as a stream of whole records, so that a file that is cut anywhere is readable up to there.

Does not buffer rows, start threads, or merge files.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import zstandard

from prismtrace import container, entries, limits, metas
from prismtrace._generated.schema import Compression
from prismtrace._version import __version__
from prismtrace.chunk import Encoded, encode_chunk, encode_member
from prismtrace.columns import DIGEST_BYTES, ColumnsInput, Rows, normalise
from prismtrace.container import RecordKind
from prismtrace.errors import TraceUsageError
from prismtrace.index import Collected
from prismtrace.model import (
    BASE_VERSION,
    COLUMNS,
    FORMAT_VERSION,
    ROLE_RANK,
    ColumnType,
    GraphKind,
    ProcessGroup,
    TableKind,
)
from prismtrace.payloads import ATTACHMENT_PREFIX, as_bytes
from prismtrace.recordfile import RecordFile
from prismtrace.resuming import resume
from prismtrace.roles import Template
from prismtrace.strings import SharedStrings, pack_strings

WRITER_NAME: Final = f"prismtrace {__version__}"
ROWS_PER_CHUNK: Final = 1 << 16
_SAMPLE_BYTES: Final = 1 << 16
_MIN_GAIN: Final = 0.9


def payload_digest(buffer: bytes | memoryview) -> bytes:
    """The 16 bytes that name a payload: BLAKE2b-128 of its bytes."""
    return hashlib.blake2b(buffer, digest_size=DIGEST_BYTES).digest()


class TraceWriter:
    """Writes one new trace file. A context manager; safe to use from several threads of one process.

    Every add_* call has reached the operating system when it returns. `close` adds the index; without it, or when
    the with-block ends in an exception, the file stays *unfinished*: readable with `allow_unfinished=True`,
    repaired by `recover`.

    Args:
        path: the file to create; it must not exist, unless `overwrite` replaces it.
        graph_kind: what the times are worth.
        world_size: number of ranks of the job; 0 = unknown.
        metadata: string pairs to begin with.
        overwrite: replaces a file that exists.
        dense: the file may use what format 1.1 added, for the use of `compact`; readers of 1.0 alone refuse it.
        atomic: the file appears under its name only when it is complete, and not at all after an exception.

    Raises:
        TraceWriteError: the file cannot be created or written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        graph_kind: GraphKind = GraphKind.UNSPECIFIED,
        world_size: int = 0,
        metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
        atomic: bool = False,
        dense: bool = False,
    ) -> None:
        if not 0 <= world_size < 1 << 31:
            raise TraceUsageError(f"world_size {world_size} is out of range")
        self._begin(RecordFile(os.fspath(path), overwrite=overwrite, atomic=atomic))
        version, self._features = (FORMAT_VERSION, metas.DENSE) if dense else (BASE_VERSION, 0)
        kind = int(GraphKind(graph_kind))
        header = metas.HeaderMeta(version, self._features, 0, kind, world_size, WRITER_NAME)
        try:
            _, buffers = container.pack_record(RecordKind.HEADER, metas.pack_header(header))
            self._file.append([container.MAGIC, *buffers])
            if metadata:
                self.update_metadata(metadata)
        except BaseException:
            self._file.close()
            raise

    @classmethod
    def append(cls, path: str | os.PathLike[str], *, allow_unfinished: bool = False) -> Self:
        """A writer that goes on with a file: rows, groups and metadata are added to what it holds.

        The index at its end is cut off at once and written again by `close`: in between the file is unfinished.
        Keep a copy where that matters.

        Args:
            path: a finished file.
            allow_unfinished: also a file without an index, whose last whole record is then the last that counts.

        Raises:
            TraceUsageError: the file holds what this library could not keep.
            TraceFormatError: the file is broken.
            TraceWriteError: it cannot be opened, or another writer has it open.
        """
        file = RecordFile(os.fspath(path), resume=True)
        try:
            state = resume(file.path, allow_unfinished=allow_unfinished)
            file.cut(state.end)
        except BaseException:
            file.close()
            raise
        writer = cls.__new__(cls)
        writer._begin(file)
        writer._collected, writer._types, writer._features = state.collected, state.types, state.features
        writer._num_rows, writer._templates = state.num_rows, state.templates
        return writer

    def _begin(self, file: RecordFile) -> None:
        self._lock = threading.RLock()
        self._collected = Collected()
        self._types: dict[TableKind, dict[str, ColumnType]] = {kind: {} for kind in COLUMNS}
        self._num_rows: dict[tuple[int, int, int], int] = {}
        self._shared: SharedStrings | None = None
        self._templates: dict[tuple[TableKind, int, int], Template] = {}
        self._file = file
        self._features = 0

    @property
    def path(self) -> str:
        """The file that is written."""
        return self._file.path

    def set_metadata(self, key: str, value: str) -> None:
        """Sets one metadata entry; a later value wins."""
        self.update_metadata({key: value})

    def update_metadata(self, entries: Mapping[str, str]) -> None:
        """Sets metadata entries; later values win."""
        for key, value in entries.items():
            limits.check_entry(key, value)
        with self._lock:
            self._append(RecordKind.METADATA, metas.pack_metadata(entries))
            self._collected.metadata.update(entries)

    def add_group(self, group: ProcessGroup) -> None:
        """Adds a process group; adding the same one again does nothing."""
        self.add_groups([group])

    def add_groups(self, groups: Iterable[ProcessGroup]) -> None:
        """Adds process groups in one go; those that are there already do nothing."""
        fresh: dict[int, ProcessGroup] = {}
        with self._lock:
            for group in groups:
                limits.check_group(group)
                known = fresh.get(group.group_id) or self._collected.groups.get(group.group_id)
                if known is not None and known.ranks != group.ranks:
                    raise TraceUsageError(f"group {group.group_id} has ranks {known.ranks}, not {group.ranks}")
                if known != group:
                    fresh[group.group_id] = group
            if fresh:
                self._append(RecordKind.GROUP, metas.pack_groups(fresh.values()))
                self._collected.groups.update(fresh)

    def add_role(self, role_id: int, columns: ColumnsInput, *, table: TableKind = TableKind.UNITS) -> int:
        """Appends rows to a role, which rows of ranks may then refer to, and returns the index of the first.

        Args:
            role_id: 1 .. 2**64 - 1. Files whose roles have one id and different rows cannot be merged.
            columns: the rows; those of ranks differ from them in some columns.
            table: the table that the rows belong to.
        """
        if not 0 < role_id < 1 << 64:
            raise TraceUsageError(f"role {role_id} must be in 1 .. 2**64 - 1 (0 means no role)")
        with self._lock:
            rows = normalise(table, columns, types=self._types[table])
            first = self._num_rows.get((table, ROLE_RANK, role_id), 0)
            for template in self.put_rows(table, ROLE_RANK, first, rows, role=role_id):
                self._templates[table, role_id, template.first_row] = template
            self._remember(table, rows)
            return first

    def add_units(self, rank: int, columns: ColumnsInput, *, role: int | None = None) -> int:
        """Appends rows to the units of `rank` and returns the unit_index of the first of them.

        With `role` only what differs from the rows of that role with the same numbers is stored; the rows must be those
        of one or several add_role calls.
        """
        return self._add(TableKind.UNITS, rank, columns, role=role)

    def add_steps(self, rank: int, columns: ColumnsInput) -> int:
        """Appends rows to the steps of `rank` and returns the index of the first of them."""
        return self._add(TableKind.STEPS, rank, columns)

    def add_scalars(self, rank: int, columns: ColumnsInput) -> int:
        """Appends rows to the scalars of `rank` and returns the index of the first of them."""
        return self._add(TableKind.SCALARS, rank, columns)

    def add_events(self, rank: int, columns: ColumnsInput) -> int:
        """Appends rows to the events of `rank` and returns the index of the first of them."""
        return self._add(TableKind.EVENTS, rank, columns)

    def add_tracks(self, rank: int, columns: ColumnsInput) -> int:
        """Appends rows to the tracks of `rank` and returns the index of the first of them."""
        return self._add(TableKind.TRACKS, rank, columns)

    def share_strings(self, texts: Iterable[str]) -> bytes:
        """Keeps strings once for all chunks that are written from now on, and returns the digest that names them.

        Chunks of many ranks that say the same names become smaller. A further call replaces the strings for chunks
        to come; no strings end it.
        """
        values = tuple(dict.fromkeys(texts))
        raw = pack_strings(values)
        with self._lock:
            digest = self.add_payload(raw)
            self._shared = SharedStrings(digest, values) if values else None
            return digest

    def add_attachment(self, name: str, data: Any) -> bytes:
        """Keeps bytes under a name, as a payload, and returns their digest; a later attachment of that name wins."""
        digest = self.add_payload(data)
        self.set_metadata(ATTACHMENT_PREFIX + name, digest.hex())
        return digest

    def add_payload(self, buffer: Any) -> bytes:
        """Adds the bytes of a contiguous buffer, once, and returns their digest."""
        view = as_bytes(buffer)
        digest = payload_digest(view)
        with self._lock:
            if digest not in self._collected.payloads:
                self._write_payload(digest, view)
        return digest

    def flush(self, *, sync: bool = False) -> None:
        """Does nothing unless `sync` asks that what was written survives a loss of power: nothing is buffered."""
        if sync:
            self._file.sync()

    def close(self, *, sync: bool = False) -> None:
        """Writes the index and closes the file; a second call does nothing."""
        with self._lock:
            if self._file.closed:
                return
            try:
                chunks, payloads, ranges = self._collected.arrays()
                groups, pairs = tuple(self._collected.groups.values()), self._collected.metadata
                footer = metas.FooterMeta(self._features, chunks, payloads, groups, pairs, ranges)
                if sync:
                    self._file.sync()
                append_footer(self._file, footer)
                self.flush(sync=sync)
                self._file.publish()
            finally:
                self._file.close()

    def abandon(self) -> None:
        """Closes the file without an index: it stays unfinished and recoverable."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _append(self, kind: RecordKind, meta: bytes, data: list[Any] | None = None) -> tuple[container.Frame, int]:
        frame, buffers = container.pack_record(kind, meta, data or [])
        return frame, self._file.append(buffers)

    def _add(self, table: TableKind, rank: int, columns: ColumnsInput, *, role: int | None = None) -> int:
        if not 0 <= rank < 1 << 31:
            raise TraceUsageError(f"rank {rank} is out of range")
        with self._lock:
            rows = normalise(table, columns, types=self._types[table])
            first = self._num_rows.get((table, rank, 0), 0)
            if role is None:
                self.put_rows(table, rank, first, rows)
            else:
                templates = self._templates_of(table, role, first, rows.num_rows)
                self.put_member(table, rank, rows, role=role, templates=templates)
            self._remember(table, rows)
            return first

    def put_rows(self, table: TableKind, rank: int, first: int, rows: Rows, *, role: int = 0) -> list[Template]:
        """Writes rows from row `first` on, and returns them as templates if they are of a role; for this package."""
        templates = []
        for start in range(0, rows.num_rows, ROWS_PER_CHUNK):
            part = rows.part(start, min(start + ROWS_PER_CHUNK, rows.num_rows))
            encoded = encode_chunk(
                table,
                rank=rank,
                first_row=first + start,
                rows=part,
                role=role,
                shared=self._shared,
                dense=bool(self._features),
            )
            self.put(encoded)
            if role:
                templates.append(Template(part, first_row=first + start))
        return templates

    def put_member(self, table: TableKind, rank: int, rows: Rows, *, role: int, templates: Sequence[Template]) -> None:
        """Writes what rows of a rank have other than the role; for this package."""
        start = 0
        for template in templates:
            part = rows.part(start, start + template.rows.num_rows)
            start += template.rows.num_rows
            self.put(
                encode_member(
                    table,
                    rank=rank,
                    first_row=template.first_row,
                    rows=part,
                    role=role,
                    template=template,
                    shared=self._shared,
                    dense=bool(self._features),
                )
            )

    def _remember(self, table: TableKind, rows: Rows) -> None:
        self._types[table].update((spec.name, spec.type) for spec in rows.specs if "." in spec.name)

    def _templates_of(self, table: TableKind, role: int, first: int, num_rows: int) -> list[Template]:
        """The chunks of a role that hold the same rows, back to back."""
        found, end = [], first + num_rows
        while first < end:
            template = self._templates.get((table, role, first))
            if template is None or first + template.rows.num_rows > end:
                message = f"role {role} has no chunk of {table.name.lower()} that begins with row {first}"
                message += f" and ends before row {end}: add_role first, and rows of ranks in the same pieces"
                raise TraceUsageError(message)
            found.append(template)
            first += template.rows.num_rows
        return found

    def put(self, encoded: Encoded) -> None:
        """Writes an encoded chunk; for the use of this package."""
        meta, data = encoded
        with self._lock:
            frame, offset = self._append(RecordKind.CHUNK, metas.pack_chunk(meta), data)
            self._collected.add_chunk(meta, frame, offset)
            role = meta.role if meta.rank == ROLE_RANK else 0
            for rank in entries.ranks_of(meta.ranges).tolist() if meta.ranges else (meta.rank,):
                self._num_rows[meta.table, rank, role] = meta.first_row + meta.num_rows

    def _write_payload(self, digest: bytes, view: memoryview) -> None:
        compression, stored = _stored_payload(view)
        meta = metas.pack_payload(digest, len(view), compression)
        frame, offset = self._append(RecordKind.PAYLOAD, meta, [stored])
        self._collected.payloads[digest] = entries.payload_entry(digest, len(view), compression, frame, offset)


def append_footer(file: RecordFile, footer: metas.FooterMeta) -> None:
    """Writes footer and trailer in one go."""
    frame, buffers = container.pack_record(RecordKind.FOOTER, metas.pack_footer(footer))
    trailer = container.pack_trailer(file.offset, frame.length)
    file.append([*buffers, trailer])


def _stored_payload(view: memoryview) -> tuple[int, bytes | memoryview]:
    """Compresses a payload where a sample says that it pays: random weights stay raw and can be read in place."""
    size = len(view)
    if size < 64:
        return Compression.NONE, view
    middle = size // 2
    sample = view if size <= 2 * _SAMPLE_BYTES else view[middle : middle + _SAMPLE_BYTES]
    compressor = zstandard.ZstdCompressor(level=1)
    if len(compressor.compress(sample)) > _MIN_GAIN * len(sample):
        return Compression.NONE, view
    stored = compressor.compress(view)
    return (Compression.ZSTD, stored) if len(stored) < size else (Compression.NONE, view)
