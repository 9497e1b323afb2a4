"""The importer ``kineto``: sources -> one trace. Parsing, joining and packing are other modules' work."""

from __future__ import annotations

import gc
import gzip
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import prismtrace
from prism_sdk.abc import ConversionReport, TraceImporter
from prism_sdk.errors import UnreadableError, UsageError
from prismtrace import GraphKind, TraceFormatError, TraceWriter
from prismtrace_kineto import communication, events, lossless, sources, timeline, units
from prismtrace_kineto.columns import ColumnBuilder
from prismtrace_kineto.job import Job, Options, ReadDocument, understood
from prismtrace_kineto.scanner import TraceScanner

ATTACHMENT: Final = "kineto.events"
_HEAD: Final = re.compile(rb'"traceEvents"|"ph"\s*:\s*"|"schemaVersion"')
_ROWS_PER_BLOCK: Final = 1_000_000
_REPORT_SECONDS: Final = 2.0


class KinetoImporter(TraceImporter):
    """Kineto / Chrome trace JSON, one file or a whole job."""

    name = "kineto"
    description = "PyTorch profiler output (Chrome trace JSON): .json, .json.gz, folders and tar.gz of them"

    def recognises(self, source: Path, head: bytes) -> bool:
        """JSON that begins like a trace; a folder or tar file of them by name."""
        if source.name.endswith((".tar.gz", ".tgz", ".tar")):
            return b".json" in head and _HEAD.search(head) is not None
        if not head:
            try:
                inside = sorted(
                    item for item in source.iterdir() if re.search(r"\.json(\.gz)?$", item.name) and item.is_file()
                )[:8]
                return any(_is_trace(_start(item)) for item in inside)
            except (OSError, EOFError, zlib.error):
                return False
        return _is_trace(head)

    def import_trace(
        self, sources: Sequence[Path], *, output: Path, options: Mapping[str, str], report: Callable[[str], None]
    ) -> ConversionReport:  # fmt: skip
        """See the base class."""
        return import_files(
            [Path(source) for source in sources], output=output, options=Options.of(options), report=report
        )


def _start(path: Path) -> bytes:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return file.read(1 << 16)


def _is_trace(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") and _HEAD.search(head) is not None


def import_files(
    paths: Sequence[Path], *, output: Path, options: Options, report: Callable[[str], None]
) -> ConversionReport:  # fmt: skip
    """Reads all documents of one job and writes one trace, whole or not at all."""
    files = sources.expand(paths)
    if not files:
        raise UsageError("no source was named", hint="name a .json or .json.gz file, a folder or a .tar.gz")
    metadata = {"kineto.importer": "0.1.0", "kineto.lossless": str(options.lossless).lower()}
    was_enabled = gc.isenabled()
    gc.disable()  # millions of small objects without cycles: the collector would look at them again and again
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    first = temporary.with_name(f"{temporary.name}.parts")
    try:
        with TraceWriter(first, graph_kind=GraphKind.OBSERVED, overwrite=True) as writer:
            job = Job(writer, options, report)
            writer.update_metadata(metadata)
            _read_all(job, files)
            _finish(job)
        world_size = max(job.world_size, max(job.ranks) + 1, *(max(g.ranks) + 1 for g in job.groups.by_id.values()), 1)
        _with_world_size(first, temporary, world_size if world_size < 1 << 31 else 0)  # too large to be stated
        temporary.replace(output)
    finally:
        if was_enabled:
            gc.enable()
        for leftover in (first, temporary):
            leftover.unlink(missing_ok=True)
    for what, ranks in job.by_rank.items():
        where = ", ".join(map(str, sorted(ranks)[:8])) + (", ..." if len(ranks) > 8 else "")
        job.notes.append(f"{sum(ranks.values())} {what} (rank {where})")
    counts = {"ranks": len(job.ranks), **job.counts, "groups": len(job.groups.by_id)}
    return ConversionReport(output, counts, tuple(job.notes))


def _with_world_size(source: Path, target: Path, world_size: int) -> None:
    """The header comes first in a file, but how many ranks a job has is known last."""
    with TraceWriter(target, graph_kind=GraphKind.OBSERVED, world_size=world_size, overwrite=True):
        pass
    prismtrace.merge([target, source], target.with_name(target.name + ".whole"))
    target.with_name(target.name + ".whole").replace(target)


def _read_all(job: Job, files: Sequence[Path]) -> None:
    builder, pending = ColumnBuilder(), list[ReadDocument]()
    told = time.monotonic()
    for number, document in enumerate(sources.documents(files, job.notes)):
        if job.options.rank is not None and number:
            raise UsageError(
                "-O rank=N names one rank, but the sources hold several traces", hint="leave it out, or import one file"
            )
        scanner = TraceScanner(document.file)
        try:
            for block in scanner.blocks():
                builder.add(block)
                if time.monotonic() - told > _REPORT_SECONDS:
                    told = time.monotonic()
                    job.report(f"{document.name}: {scanner.report.num_events:,} events read")
        except ValueError as error:
            raise TraceFormatError(f"not a Chrome trace: {error}", path=document.name, offset=0) from error
        builder.end_document()
        read = understood(job, document, scanner)
        pending.append(read)
        if not job.options.lossless or builder.num_rows >= _ROWS_PER_BLOCK:
            _write(job, builder, pending)
            builder, pending = ColumnBuilder(), []
    if pending:
        _write(job, builder, pending)
    if not job.ranks:
        raise UnreadableError(str(files[0]), reason="the sources hold no trace", hint="name .json or .json.gz files")


def _write(job: Job, builder: ColumnBuilder, documents: Sequence[ReadDocument]) -> None:
    columns = builder.finish()
    for line, document in zip(timeline.timelines(columns, [d.base_ns for d in documents]), documents, strict=True):
        rank = document.rank
        for what, number in line.counts.items():
            job.tell(rank, what, number)
        launch, device = communication.launches(line)
        num_ambiguous = int((launch[device] < 0).sum())
        if num_ambiguous:
            job.tell(rank, "device events have no launch of their own (none, or one id for several)", num_ambiguous)
        declared = job.groups.declared(document.top.get("distributedInfo"))
        known = communication.communications(line, rank, launch, job.groups, declared)
        for group in job.groups.by_id.values():
            job.writer.add_group(group)
        for text, number in job.groups.notes.items():
            job.tell(rank, text, number)
        job.groups.notes.clear()
        missing = sum(1 for item in known if item.group_id and item.seq is None)
        if missing:
            job.tell(
                rank, "NCCL kernels have no sequence number: their units have none, and match no other rank's", missing
            )
        derived = units.derive(line, launch, device, known, labels=job.options.events)
        num_units = derived.counts.pop("units")
        for what, number in derived.counts.items():
            job.tell(rank, what, number)
        if num_units:
            job.writer.add_units(rank, derived.units)
        if derived.steps:
            job.writer.add_steps(rank, derived.steps)
        job.count("units", num_units)
        job.count("steps", len(derived.steps.get("step", ())))
        job.count("communications", len(known))
        if job.options.events:
            kept, left_out = events.event_columns(
                line, derived.unit_of, python=job.options.python or job.options.lossless
            )
            job.writer.add_events(rank, kept)
            if left_out:
                job.tell(
                    rank,
                    "Python calls were left out (-O python=true keeps them, lossless=true keeps everything)",
                    left_out,
                )
        if tracks := events.track_columns(line) if job.options.events else {}:
            job.writer.add_tracks(rank, tracks)
    if job.options.lossless:
        texts = [lossless.DocumentText(d.rank, Path(d.name).name, d.prefix, d.suffix) for d in documents]
        name = ATTACHMENT if not job.num_blocks else f"{ATTACHMENT}.{job.num_blocks}"
        job.writer.add_attachment(name, lossless.encode(columns, texts))
        job.num_blocks += 1


def _finish(job: Job) -> None:
    if len(job.bases) > 1:
        job.notes.append("ranks have different baseTimeNanoseconds; it was added to each rank's times")
    if len(job.ranks) > 1:
        job.notes.append(
            "clocks of hosts are taken as they are; if they differ, import hosts apart and `prism merge --align` them"
        )
    num_missing = job.world_size - sum(rank < job.world_size for rank in job.ranks)
    if num_missing:  # a file may claim any world size: no set of all its ranks
        missing = islice((rank for rank in range(job.world_size) if rank not in job.ranks), 8)
        shown = ", ".join(map(str, missing)) + (", ..." if num_missing > 8 else "")
        job.notes.append(f"{num_missing} of {job.world_size} ranks have no trace here ({shown})")
    if job.options.lossless and not job.options.events:
        job.notes.append(
            f"events are kept in the attachment {ATTACHMENT!r}, not as a table: `prism convert --to kineto` gives them "
            "back, -O events=true adds the table"
        )
