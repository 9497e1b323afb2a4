"""Writes a trace as a stream of whole records, so that a file that is cut anywhere is readable up to there.

Does not buffer rows, start threads, or merge files.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

import zstandard

from prismtrace import container, entries, limits, metas
from prismtrace._generated.schema import Compression
from prismtrace.chunk import encode_chunk
from prismtrace.columns import DIGEST_BYTES, ColumnsInput, Rows, normalise
from prismtrace.container import RecordKind
from prismtrace.errors import TraceUsageError, TraceWriteError, writing
from prismtrace.index import Collected
from prismtrace.model import COLUMNS, FORMAT_VERSION, ColumnType, GraphKind, ProcessGroup, TableKind

WRITER_NAME: Final = "prismtrace 1.0.0"
ROWS_PER_CHUNK: Final = 1 << 16
ATTACHMENT_PREFIX: Final = "attachment."
"""Begins the metadata keys that name attachments; the value is the digest in hexadecimal digits."""
_SAMPLE_BYTES: Final = 1 << 16
_MIN_GAIN: Final = 0.9
_MAX_VECTORS: Final = 512


def payload_digest(buffer: bytes | memoryview) -> bytes:
    """The 16 bytes that name a payload: BLAKE2b-128 of its bytes."""
    return hashlib.blake2b(buffer, digest_size=DIGEST_BYTES).digest()


def as_bytes(buffer: Any) -> memoryview:
    """A flat view of the bytes of any contiguous buffer."""
    try:
        view = memoryview(buffer)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        raise TraceUsageError(f"a contiguous buffer is needed: {error}") from error


class RecordFile:
    """An append-only file of whole records: what a failed write left behind is cut off again."""

    def __init__(self, path: str, *, overwrite: bool = False) -> None:
        self.path = path
        self.offset = 0
        self.failed: TraceWriteError | None = None
        with writing(path, what="cannot create"):
            if overwrite and os.path.lexists(path) and not os.path.isdir(path):
                os.unlink(path)
            self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._pid = os.getpid()

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._file.closed

    def append(self, buffers: list[Any]) -> int:
        """Writes buffers back to back and returns the offset of the first; all of them or none."""
        if self.failed is not None:
            raise TraceWriteError("an earlier write failed, the file stays unfinished", path=self.path) from self.failed
        if self.closed:
            raise TraceUsageError(f"{self.path}: the writer is closed")
        if os.getpid() != self._pid:
            raise TraceUsageError(f"{self.path}: the writer was opened in another process; open one file per process")
        start, position = self.offset, 0
        total = sum(len(buffer) for buffer in buffers)
        try:
            with writing(self.path):
                while position < total:
                    count = os.writev(self._file.fileno(), _rest(buffers, position))
                    if count == 0:
                        raise OSError(None, "the file takes no more bytes")
                    position += count
        except TraceWriteError as error:
            self.failed = error
            self._cut(start)
            raise
        self.offset = start + total
        return start

    def _cut(self, length: int) -> None:
        try:
            self._file.truncate(length)
        except OSError:
            return  # the torn record stays; readers stop before it

    def fileno(self) -> int:
        """The file descriptor, for copying inside the kernel."""
        return self._file.fileno()

    def sync(self) -> None:
        """Makes what was written survive a loss of power."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file as it is."""
        with writing(self.path, what="cannot close"):
            self._file.close()


def _rest(buffers: list[Any], position: int) -> list[Any]:
    """The buffers without their first `position` bytes, at most as many as one system call takes."""
    rest: list[Any] = []
    for buffer in buffers:
        if len(rest) == _MAX_VECTORS:
            break
        size = len(buffer)
        if position < size:
            rest.append(memoryview(buffer)[position:] if position else buffer)
        position = max(0, position - size)
    return rest


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
    ) -> None:
        if not 0 <= world_size < 1 << 31:
            raise TraceUsageError(f"world_size {world_size} is out of range")
        self._lock = threading.RLock()
        self._collected = Collected()
        self._types: dict[TableKind, dict[str, ColumnType]] = {kind: {} for kind in COLUMNS}
        self._num_rows: dict[tuple[TableKind, int], int] = {}
        self._file = RecordFile(os.fspath(path), overwrite=overwrite)
        header = metas.HeaderMeta(FORMAT_VERSION, 0, 0, int(GraphKind(graph_kind)), world_size, WRITER_NAME)
        try:
            _, buffers = container.pack_record(RecordKind.HEADER, metas.pack_header(header))
            self._file.append([container.MAGIC, *buffers])
            if metadata:
                self.update_metadata(metadata)
        except BaseException:
            self._file.close()
            raise

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
        limits.check_group(group)
        with self._lock:
            known = self._collected.groups.get(group.group_id)
            if known == group:
                return
            if known is not None and known.ranks != group.ranks:
                raise TraceUsageError(f"group {group.group_id} has ranks {known.ranks}, not {group.ranks}")
            self._append(RecordKind.GROUP, metas.pack_groups([group]))
            self._collected.groups[group.group_id] = group

    def add_units(self, rank: int, columns: ColumnsInput) -> int:
        """Appends rows to the units of `rank` and returns the unit_index of the first of them."""
        return self._add(TableKind.UNITS, rank, columns)

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
                footer = metas.FooterMeta(0, chunks, payloads, groups, pairs, ranges)
                append_footer(self._file, footer)
                self.flush(sync=sync)
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

    def _add(self, table: TableKind, rank: int, columns: ColumnsInput) -> int:
        if not 0 <= rank < 1 << 31:
            raise TraceUsageError(f"rank {rank} is out of range")
        with self._lock:
            rows = normalise(table, columns, types=self._types[table])
            first = self._num_rows.get((table, rank), 0)
            for start in range(0, rows.num_rows, ROWS_PER_CHUNK):
                part = rows.part(start, min(start + ROWS_PER_CHUNK, rows.num_rows))
                self._write_chunk(table, rank, first + start, part)
            self._types[table].update((spec.name, spec.type) for spec in rows.specs if "." in spec.name)
            return first

    def _write_chunk(self, table: TableKind, rank: int, first_row: int, rows: Rows) -> None:
        meta, data = encode_chunk(table, rank=rank, first_row=first_row, rows=rows)
        frame, offset = self._append(RecordKind.CHUNK, metas.pack_chunk(meta), data)
        self._num_rows[table, rank] = first_row + rows.num_rows
        self._collected.add_chunk(meta, frame, offset)

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
