"""The importers ``arrow`` and ``parquet``: files as this plugin writes them, also after another tool rewrote them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

import prismtrace
from prism_sdk.abc import ConversionReport, TraceImporter
from prism_sdk.errors import UsageError
from prism_sdk.interop import options as reading
from prismtrace import ProcessGroup, TraceReadError, TraceUsageError, TraceWriter
from prismtrace.tables import Column, ListColumn
from prismtrace_arrow.convert import columns_of, empty_rows, named_rows, table_of
from prismtrace_arrow.numbering import Numbering
from prismtrace_arrow.schema import SIDE_TABLES, FileInfo, row_name, table_names
from prismtrace_arrow.sinks import whole_file

ROWS_PER_READ: Final = 1 << 17
_PROGRESS_S: Final = 2.0
_MAGIC: Final[Mapping[str, bytes]] = {"arrow": b"ARROW1", "parquet": b"PAR1"}
_ENDINGS: Final[Mapping[str, tuple[str, ...]]] = {"arrow": (".arrow", ".feather"), "parquet": (".parquet",)}
Report = Callable[[str], None]


@contextmanager
def reading_file(path: Path) -> Iterator[None]:
    """The one place that turns what pyarrow says about a damaged or missing file into a TraceReadError."""
    try:
        yield
    except prismtrace.PrismTraceError:
        raise
    except FileNotFoundError as error:
        raise TraceReadError("there is no such file", path=str(path)) from error
    except OSError as error:
        raise TraceReadError(error.strerror or str(error), path=str(path), errno=error.errno) from error
    except (pa.ArrowException, ValueError, TypeError, OverflowError, KeyError, MemoryError) as error:
        raise TraceReadError(f"the file cannot be read: {_one_line(error)}", path=str(path)) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


@dataclass(frozen=True)
class Source:
    """One file of one table."""

    path: Path
    kind: str
    schema: pa.Schema
    info: FileInfo

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The rows in pieces of about ROWS_PER_READ."""
        with reading_file(self.path):
            parts: list[pa.RecordBatch] = []
            gathered = 0
            for batch in self._raw(columns):
                parts.append(batch)
                gathered += batch.num_rows
                if gathered >= ROWS_PER_READ:
                    yield pa.Table.from_batches(parts)
                    parts, gathered = [], 0
            if parts:
                yield pa.Table.from_batches(parts)

    def _raw(self, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        if self.kind == "parquet":
            with pq.ParquetFile(self.path, pre_buffer=False, buffer_size=1 << 20) as file:
                yield from file.iter_batches(ROWS_PER_READ, columns=columns, use_threads=False)
            return
        with pa.OSFile(str(self.path)) as mapped, pa.ipc.open_file(mapped) as opened:
            for number in range(opened.num_record_batches):
                batch = opened.get_batch(number)
                yield batch if columns is None else batch.select(columns)


def open_source(path: Path, kind: str, *, table: str | None) -> Source:
    """Looks at a file: its schema, and which table it holds."""
    with reading_file(path):
        if not path.is_file():
            raise TraceReadError("not a regular file" if path.exists() else "there is no such file", path=str(path))
        with path.open("rb") as file:
            head = file.read(6)
        if not head.startswith(_MAGIC[kind]):
            raise TraceReadError(f"not a file of this format: it does not begin with {_MAGIC[kind]!r}", path=str(path))
        if kind == "parquet":
            schema = pq.read_schema(path)
        else:
            with pa.OSFile(str(path)) as mapped, pa.ipc.open_file(mapped) as opened:
                schema = opened.schema
        _ = schema.names  # names that are no UTF-8 are refused here
        info = FileInfo.of_schema(schema)
        if info is None or table is not None:
            info = replace(info or FileInfo(""), table=table or _guessed(path, schema))
    if info.table not in (*table_names(), *SIDE_TABLES):
        raise TraceReadError(f"it holds the table {info.table!r}, which this version does not know", path=str(path))
    return Source(path, kind, schema, info)


def _guessed(path: Path, schema: pa.Schema) -> str:
    for name in (*table_names(), *SIDE_TABLES):
        if path.stem == name or path.stem.startswith((f"{name}-", f"{name}_", f"{name}.")):
            return name
    if {"rank", "kind", "start_ns"} <= set(schema.names):
        return "units"
    raise UsageError(
        f"{path}: nothing says which table of a trace this is",
        hint="say it with -O table=units, or give the columns their meaning: --from table -O column.start_ns=NAME ...",
    )


@dataclass
class _Counts:
    """What was imported so far."""

    rows: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class _Importer(TraceImporter):
    """What both importers do; only the kind of file differs."""

    kind: str

    def recognises(self, source: Path, head: bytes) -> bool:
        """A folder with the tables of a trace, or a file of this kind that says it is one of them."""
        try:
            if source.is_dir():
                names = [f"{table}{ending}" for table in table_names() for ending in _ENDINGS[self.kind]]
                return any((source / name).is_file() for name in names)
            if not head.startswith(_MAGIC[self.kind]):
                return False
            return open_source(source, self.kind, table=None).info.table in (*table_names(), *SIDE_TABLES)
        except Exception:
            return False

    def import_trace(
        self, sources: Sequence[Path], *, output: Path, options: Mapping[str, str], report: Report
    ) -> ConversionReport:
        """Read the files of one trace; rows of a rank must be in the order of their ordinals."""
        reading.check_known(options, ("table", "lossless"), of=f"the importer {self.name}")
        known = (*table_names(), *SIDE_TABLES)
        table = reading.choice(options, "table", known, default="units") if "table" in options else None
        files = [open_source(path, self.kind, table=table) for path in self._files(sources)]
        counts = _Counts()
        first = _agreed(files, counts)
        if all(source.info.table != "units" for source in files):
            counts.note("there is no table of units: the trace has no communication and no computing")
        with whole_file(output) as temporary:
            kind, world_size = first.known_graph_kind, first.world_size
            with TraceWriter(temporary, graph_kind=kind, world_size=world_size, overwrite=True) as writer:
                _write_side(writer, files, counts)
                numbering = Numbering()
                for name in sorted(table_names(), key=lambda name: name == "events"):  # events refer to the others
                    for source in files:
                        if source.info.table == name:
                            write_table(writer, source, name, numbering=numbering, counts=counts, report=report)
        for name in numbering.tables_with_gaps:
            counts.note(f"{name} were taken out of some ranks: the others are numbered anew, and references follow")
        return ConversionReport(output, counts.rows, tuple(counts.notes))

    def _files(self, sources: Sequence[Path]) -> list[Path]:
        files: list[Path] = []
        for source in sources:
            if source.is_dir():
                inside = sorted(path for path in source.iterdir() if path.name.endswith(_ENDINGS[self.kind]))
                if not inside:
                    raise TraceReadError(f"the folder has no {_ENDINGS[self.kind][0]} file", path=str(source))
                files += inside
            else:
                files.append(source)
        return files


class ArrowImporter(_Importer):
    """Reads Arrow IPC files as the exporter ``arrow`` writes them."""

    name = "arrow"
    description = "Arrow IPC files as the exporter arrow writes them (a file or a folder)"
    kind = "arrow"


class ParquetImporter(_Importer):
    """Reads Parquet files as the exporter ``parquet`` writes them."""

    name = "parquet"
    description = "Parquet files as the exporter parquet writes them (a file or a folder)"
    kind = "parquet"


def _agreed(files: Sequence[Source], counts: _Counts) -> FileInfo:
    """The graph kind and world size that the files agree about."""
    said = [source for source in files if source.info.world_size or source.info.graph_kind]
    if not said:
        counts.note("no file says what kind of graph this is, nor the number of ranks of the job")
        return FileInfo("")
    first = said[0]
    for other in said[1:]:
        pair = (other.info.graph_kind, other.info.world_size)
        if pair != (first.info.graph_kind, first.info.world_size):
            message = f"it is of another trace than {first.path}: graph kind and world size are {pair}"
            raise TraceReadError(message, path=str(other.path))
    return first.info


def _write_side(writer: TraceWriter, files: Sequence[Source], counts: _Counts) -> None:
    groups: dict[int, ProcessGroup] = {}
    pairs: dict[str, str] = {}
    for source in files:
        with reading_file(source.path):
            groups.update({group.group_id: group for group in source.info.groups})
            pairs.update(source.info.metadata)
            if source.info.table == "groups":
                for row in (row for part in source.batches() for row in part.to_pylist()):
                    group = ProcessGroup(
                        row["group_id"], row["name"], row["description"], row["backend"], tuple(row["ranks"])
                    )
                    groups[group.group_id] = group
            elif source.info.table == "metadata":
                for part in source.batches():
                    pairs.update({row["key"]: row["value"] for row in part.to_pylist()})
            elif source.info.table == "payloads":
                counts.rows["payloads"] = _write_payloads(writer, source)
            if source.info.table in ("groups", "metadata") or source.info.groups or source.info.metadata:
                writer.update_metadata(pairs)
                for group in groups.values():
                    writer.add_group(group)
    counts.rows["groups"], counts.rows["metadata"] = len(groups), len(pairs)


def _write_payloads(writer: TraceWriter, source: Source) -> int:
    number = 0
    for part in source.batches():
        for digest, data in zip(part["digest"], part["data"], strict=True):
            if writer.add_payload(data.as_buffer()) != digest.as_py():
                raise TraceReadError(
                    f"payload {digest.as_py().hex()} is not what its digest says", path=str(source.path)
                )
            number += 1
    return number


def write_table(
    writer: TraceWriter, source: Source, name: str, *, numbering: Numbering, counts: _Counts, report: Report
) -> None:
    """Adds the rows of one file, rank by rank as they come."""
    if "rank" not in source.schema.names:
        raise TraceReadError("it has no column 'rank'", path=str(source.path))
    said, total = time.monotonic(), 0
    for table in source.batches():
        with reading_file(source.path):
            if table["rank"].null_count:
                raise ValueError("column 'rank': a row has no rank")
            ranks = pc.cast(table["rank"], pa.int64()).to_numpy()
            if len(ranks) and (np.diff(ranks) < 0).any():
                order = np.argsort(ranks, kind="stable")
                table, ranks = table.take(pa.array(order)), ranks[order]
            columns = columns_of(table, name=name)
            row_index, valid = _row_index(table, name), named_rows(table)
            edges = [0, *(np.flatnonzero(np.diff(ranks)) + 1).tolist(), len(ranks)]
            for start, stop in itertools.pairwise(edges):
                if start == stop:
                    continue
                rank = int(ranks[start])
                part = {
                    key: _rows(column, start, stop)
                    for key, column in columns.items()
                    if key not in valid or valid[key][start:stop].any()
                }
                if not part:
                    part.update(empty_rows(name, stop - start))
                if row_index is not None:
                    numbering.add(name, rank, row_index[start:stop], column=row_name(name))
                numbering.follow(name, rank, part)
                try:
                    getattr(writer, f"add_{name}")(rank, table_of(name, rank, part, stop - start, table.schema))
                except TraceUsageError as error:
                    raise TraceReadError(f"rank {rank}: {error}", path=str(source.path)) from error
        total += len(ranks)
        if time.monotonic() - said > _PROGRESS_S:
            said = time.monotonic()
            report(f"{name}: {total} rows")
    counts.rows[name] = counts.rows.get(name, 0) + total


def _row_index(table: pa.Table, name: str) -> NDArray[np.int64] | None:
    if row_name(name) not in table.schema.names or table[row_name(name)].null_count:
        return None
    return np.asarray(pc.cast(table[row_name(name)], pa.int64()).to_numpy())


def _rows(column: Any, start: int, stop: int) -> Column:
    if isinstance(column, ListColumn):
        return ListColumn(column.offsets[start : stop + 1], column.values, column.valid[start:stop])
    rows: Column = column[start:stop]
    return rows


__all__ = ["ArrowImporter", "ParquetImporter", "Source", "open_source", "reading_file", "write_table"]
