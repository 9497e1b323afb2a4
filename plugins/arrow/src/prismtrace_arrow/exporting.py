"""The exporters ``arrow`` and ``parquet``. Which columns and types a file has is said in ``schema``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

import prismtrace
from prism_sdk.abc import ConversionReport, TraceExporter
from prism_sdk.errors import UsageError
from prism_sdk.interop import options as reading
from prismtrace.model import ABSENT32, COLUMNS, ColumnType
from prismtrace.tables import DictionaryColumn, Table
from prismtrace_arrow.convert import max_rows_of, record_batch, rows_of
from prismtrace_arrow.schema import (
    GROUPS,
    METADATA,
    PAYLOADS,
    FileInfo,
    merged_types,
    named_types,
    table_kind,
    table_names,
    table_schema,
)
from prismtrace_arrow.sinks import COMPRESSIONS, TableSink, naming, whole_file, whole_folder

_OPTIONS: Final = ("table", "ranks", "steps", "names", "payloads", "compression", "level")
_PROGRESS_S: Final = 2.0
Report = Callable[[str], None]


class _Exporter(TraceExporter):
    """What both exporters do; only the kind of file differs."""

    kind: str

    def export_trace(
        self, source: Path, *, output: Path, options: Mapping[str, str], report: Report
    ) -> ConversionReport:
        """Write one file with one table, or a folder with all tables; see the class of each format."""
        reading.check_known(options, _OPTIONS, of=f"the exporter {self.name}")
        with prismtrace.TraceReader(source) as reader:
            job = _Job(reader, kind=self.kind, options=options, report=report)
            if output.name.endswith(self.suffixes):
                return job.write_file(output)
            if "table" in options:
                raise UsageError(
                    "-O table chooses the table of a single file, and the output is a folder",
                    hint=f"name the output with the ending {self.suffixes[0]}",
                )
            return job.write_folder(output)


class ArrowExporter(_Exporter):
    """Arrow IPC files: units of all ranks in one ``.arrow`` file, or a folder with one file a table."""

    name = "arrow"
    description = "Arrow IPC files: X.arrow with the units, or a folder with every table"
    suffixes = (".arrow", ".feather")
    kind = "arrow"


class ParquetExporter(_Exporter):
    """Parquet files: units of all ranks in one ``.parquet`` file, or a folder with one file a table."""

    name = "parquet"
    description = "Parquet files: X.parquet with the units, or a folder with every table"
    suffixes = (".parquet",)
    kind = "parquet"


class _Job:
    """One export."""

    def __init__(
        self, reader: prismtrace.TraceReader, *, kind: str, options: Mapping[str, str], report: Report
    ) -> None:
        self._reader = reader
        self._kind = kind
        self._report = report
        self._ranks = reading.ranks_of(options, reader.ranks)
        self._steps = reading.steps_of(options)
        self._names = reading.flag(options, "names")
        self._payloads = reading.flag(options, "payloads")
        self._table = reading.choice(options, "table", table_names(), default="units")
        self._compression = reading.choice(options, "compression", COMPRESSIONS[kind], default="zstd")
        high = {"zstd": 22, "gzip": 9}.get(self._compression)
        if high is None and "level" in options:
            raise UsageError(f"-O level has no meaning with compression {self._compression}")
        default = 3 if self._compression == "zstd" else None
        self._level = reading.integer(options, "level", default=default, low=1, high=high or 1)
        self._counts: dict[str, int] = {"ranks": len(self._ranks)}

    def write_file(self, output: Path) -> ConversionReport:
        with whole_file(output) as temporary:
            info = self._info(self._table, alone=True)
            self._write_table(self._table, temporary, info=info, target=output)
        return ConversionReport(output, dict(self._counts), tuple(self._left_out()))

    def write_folder(self, output: Path) -> ConversionReport:
        with whole_folder(output) as folder:
            for table in table_names():
                path = folder / f"{table}.{self._kind}"
                self._write_table(table, path, info=self._info(table, alone=False), target=output / path.name)
            self._write_side(folder, output)
        return ConversionReport(output, dict(self._counts), tuple(self._payload_notes()))

    def _info(self, table: str, *, alone: bool) -> FileInfo:
        reader = self._reader
        metadata, groups = (dict(reader.metadata), tuple(reader.groups.values())) if alone else ({}, ())
        return FileInfo(table, int(reader.graph_kind), reader.world_size, reader.writer, metadata, groups)

    def _sink(self, path: Path, schema: pa.Schema) -> TableSink:
        return TableSink(path, schema, kind=self._kind, compression=self._compression, level=self._level)

    def _write_table(self, table: str, path: Path, *, info: FileInfo, target: Path) -> None:
        """Write a table with the named columns of its first rank; once more where another rank has others."""
        first = next((part for rank in self._ranks[:1] for part in self._parts(table, rank)), None)
        named = {} if first is None else named_types(first)
        if not self._write_with(named, table, path, info=info, target=target):
            for rank in self._ranks:
                for part in self._parts(table, rank):
                    named = merged_types(named, named_types(part))
            self._write_with(named, table, path, info=info, target=target)

    def _write_with(
        self, named: Mapping[str, ColumnType], table: str, path: Path, *, info: FileInfo, target: Path
    ) -> bool:
        """Write a table; False when rows came up that have other named columns."""
        schema = table_schema(table, named=named, names=self._names, info=info)
        said = time.monotonic()
        with naming(target):
            sink = self._sink(path, schema)
            try:
                for number, rank in enumerate(self._ranks):
                    for part in self._parts(table, rank):
                        if merged_types(named, named_types(part)) != named:
                            return False
                        _write_rows(sink, part, schema, table)
                    if time.monotonic() - said > _PROGRESS_S:
                        said = time.monotonic()
                        self._report(f"{table}: {number + 1} of {len(self._ranks)} ranks, {sink.num_rows} rows")
            finally:
                sink.close()
        self._counts[table] = sink.num_rows
        return True

    def _parts(self, table: str, rank: int) -> Iterator[Table]:
        """The rows of a rank in pieces, without those of other steps than the chosen ones."""
        if table == "units":
            yield from self._reader.iter_units(rank, steps=self._steps)
            return
        whole: Table = getattr(self._reader, table)(rank)
        if self._steps is not None and any(spec.name == "step" for spec in COLUMNS[table_kind(table)]):
            step = whole.step
            rows = np.flatnonzero((step >= self._steps.start) & (step < self._steps.stop) & (step != ABSENT32))
            whole = rows_of(whole, rows)
        yield whole

    def _write_side(self, folder: Path, output: Path) -> None:
        groups = [self._reader.groups[number] for number in sorted(self._reader.groups)]
        rows = {
            "group_id": [group.group_id for group in groups],
            "name": [group.name for group in groups],
            "description": [group.description for group in groups],
            "backend": [group.backend for group in groups],
            "ranks": [list(group.ranks) for group in groups],
        }
        self._write_rows("groups", pa.RecordBatch.from_pydict(rows, GROUPS), folder, output)
        pairs = sorted(self._reader.metadata.items())
        batch = pa.RecordBatch.from_pydict({"key": [k for k, _ in pairs], "value": [v for _, v in pairs]}, METADATA)
        self._write_rows("metadata", batch, folder, output)
        if self._chosen_payloads():
            self._write_payloads(folder, output)

    def _write_rows(self, table: str, batch: pa.RecordBatch, folder: Path, output: Path) -> None:
        schema = batch.schema.with_metadata(self._side_metadata(table))
        path = folder / f"{table}.{self._kind}"
        with naming(output / path.name):
            sink = self._sink(path, schema)
            try:
                sink.write(batch.cast(schema))
            finally:
                sink.close()
        self._counts[table] = batch.num_rows

    def _side_metadata(self, table: str) -> dict[bytes, bytes]:
        return {b"prismtrace": self._info(table, alone=False).to_bytes()}

    def _write_payloads(self, folder: Path, output: Path) -> None:
        schema = PAYLOADS.with_metadata(self._side_metadata("payloads"))
        path = folder / f"payloads.{self._kind}"
        with naming(output / path.name):
            sink = self._sink(path, schema)
            try:
                for digest in self._chosen_payloads():
                    rows = {"digest": [digest], "data": [self._reader.payload(digest)]}
                    sink.write(pa.RecordBatch.from_pydict(rows, schema))
            finally:
                sink.close()
        self._counts["payloads"] = sink.num_rows

    def _chosen_payloads(self) -> list[bytes]:
        """All payloads when asked for, else those that are attachments."""
        attached = set(getattr(self._reader, "attachments", {}).values())
        return [digest for digest in self._reader.payload_digests if self._payloads or digest in attached]

    def _left_out(self) -> Iterator[str]:
        others = [name for name in table_names() if name != self._table]
        left = [
            name for name in others if any(len(part) for rank in self._ranks[:1] for part in self._parts(name, rank))
        ]
        if left:
            how = f"-o FOLDER --to {self._kind} writes a folder with every table"
            yield f"one file holds one table, here the {self._table}; {', '.join(left)} are left out: {how}"
        yield from self._payload_notes()

    def _payload_notes(self) -> Iterator[str]:
        count = len(self._reader.payload_digests) - self._counts.get("payloads", 0)
        if count:
            yield f"{count} payloads are left out; -O payloads=true with a folder as output keeps them"


def _write_rows(sink: TableSink, part: Table, schema: pa.Schema, table: str) -> None:
    limit = max_rows_of(part) if any(isinstance(c, DictionaryColumn) for c in part.columns().values()) else len(part)
    if len(part) <= limit:
        if len(part):
            sink.write(record_batch(part, schema, name=table))
        return
    for start in range(0, len(part), limit):
        sink.write(record_batch(rows_of(part, np.arange(start, min(start + limit, len(part)))), schema, name=table))
