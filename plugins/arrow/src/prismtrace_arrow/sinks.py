"""Writes record batches to Arrow or Parquet files, gathered to sensible sizes, whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from prism_sdk.errors import OutputError, OutputExistsError, UsageError

ROWS_PER_BATCH: Final = 1 << 16
ROWS_PER_GROUP: Final = 1 << 17
_MAX_GATHERED_BYTES: Final = 1 << 27
_DELTA: Final = ("start_ns", "end_ns", "unit_index", "row_index", "track_index", "seq", "awaits", "correlation_id")
COMPRESSIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "arrow": ("zstd", "lz4", "none"),
    "parquet": ("zstd", "snappy", "gzip", "lz4", "none"),
}


class TableSink:
    """One file of one table: batches are gathered until they are worth a piece of the file of their own."""

    def __init__(self, path: Path, schema: pa.Schema, *, kind: str, compression: str, level: int | None) -> None:
        self.num_rows = 0
        self._schema = schema
        self._rows = ROWS_PER_GROUP if kind == "parquet" else ROWS_PER_BATCH
        self._batches: list[pa.RecordBatch] = []
        self._gathered = 0
        self._gathered_bytes = 0
        self._writer = _open(path, schema, kind=kind, compression=compression, level=level)

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        self._batches.append(batch)
        self._gathered += batch.num_rows
        self._gathered_bytes += batch.nbytes
        self.num_rows += batch.num_rows
        if self._gathered >= self._rows or self._gathered_bytes > _MAX_GATHERED_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._batches:
            table = pa.Table.from_batches(self._batches, self._schema).combine_chunks()
            self._writer.write_table(table, self._rows)
        self._batches, self._gathered, self._gathered_bytes = [], 0, 0

    def close(self) -> None:
        """Write what is gathered, and the end of the file."""
        self._flush()
        self._writer.close()


def _open(path: Path, schema: pa.Schema, *, kind: str, compression: str, level: int | None) -> Any:
    if kind == "arrow":
        codec = None if compression == "none" else pa.Codec(compression, compression_level=level)
        return pa.ipc.new_file(str(path), schema, options=pa.ipc.IpcWriteOptions(compression=codec))
    names = {field.name: field.type for field in schema}
    delta = {name: "DELTA_BINARY_PACKED" for name in _DELTA if name in names and pa.types.is_integer(names[name])}
    return pq.ParquetWriter(
        path,
        schema,
        compression=compression,
        compression_level=level if compression not in ("none", "snappy", "lz4") else None,
        use_dictionary=[name for name, type_ in names.items() if name not in delta and not pa.types.is_list(type_)],
        column_encoding=delta or None,
        store_schema=True,
    )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """The one place that turns what the operating system refuses into an OutputError that names ``path``."""
    try:
        yield
    except OSError as error:
        # pyarrow's own words name the temporary file
        reason = os.strerror(error.errno) if error.errno else error.strerror or str(error) or type(error).__name__
        raise OutputError(str(path), reason=reason, hint=_hint(error)) from error


def _hint(error: OSError) -> str | None:
    if isinstance(error, FileNotFoundError):
        return "create the folder first"
    if isinstance(error, PermissionError):
        return "choose a folder that you may write to"
    return None


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, which takes its place when the block ends well, else vanishes."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder, and one file was asked for")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with naming(path):
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path``, which becomes ``path`` when the block ends well, else vanishes."""
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise OutputExistsError(str(path), hint="name a new folder, or remove this one")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        temporary.mkdir()
    try:
        yield temporary
        with naming(path):
            os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
