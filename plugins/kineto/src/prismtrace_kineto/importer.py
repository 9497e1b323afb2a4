"""The importer ``kineto``: sources -> one trace. Parsing, joining and packing are other modules' work."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import prismtrace
from prism_sdk.abc import ConversionReport, TraceImporter
from prism_sdk.errors import UnreadableError, UsageError
from prismtrace import GraphKind, TraceFormatError, TraceWriter
from prismtrace_kineto import communication, events, lossless, sources, timeline, units
from prismtrace_kineto.columns import ColumnBuilder
from prismtrace_kineto.scanner import TraceScanner, decode

ATTACHMENT: Final = "kineto.events"
_HEAD: Final = re.compile(rb'"traceEvents"|"ph"\s*:\s*"|"schemaVersion"')
_ROWS_PER_BLOCK: Final = 1_000_000
_REPORT_SECONDS: Final = 2.0


@dataclass(frozen=True)
class Options:
    """What the user asked for by ``-O``."""

    lossless: bool = False
    rank: int | None = None
    python: bool = False
    events: bool = True

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Options:
        """Checks names and values; raises UsageError."""
        known = {"lossless", "rank", "python", "events"}
        for name in options:
            if name not in known:
                raise UsageError(
                    f"-O {name}=...: the importer kineto has no such option", hint=f"it has {', '.join(sorted(known))}"
                )
        whole = _flag(options, "lossless", False)
        rank = options.get("rank")
        if rank is not None and (not rank.isdecimal() or int(rank) >= 1 << 31):
            raise UsageError(f"-O rank={rank} is not a rank", hint="give a whole number from 0 on")
        return cls(
            whole,
            None if rank is None else int(rank),
            _flag(options, "python", False),
            _flag(options, "events", not whole),
        )


def _flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    value = options.get(name, str(default)).lower()
    if value not in ("true", "false"):
        raise UsageError(f"-O {name}={options[name]} is neither true nor false")
    return value == "true"


@dataclass
class _Document:
    """One document that was read: what stands around its events."""

    name: str
    rank: int
    prefix: str
    suffix: str
    top: dict[str, Any]
    base_ns: int


@dataclass
class _Job:
    """What is collected over all documents."""

    writer: TraceWriter
    options: Options
    report: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    by_rank: dict[str, dict[int, int]] = field(default_factory=dict)
    groups: communication.Groups = field(default_factory=communication.Groups)
    ranks: dict[int, str] = field(default_factory=dict)
    world_size: int = 0
    num_blocks: int = 0
    bases: set[int] = field(default_factory=set)

    def count(self, what: str, number: int) -> None:
        """Adds to a count of the report."""
        if number:
            self.counts[what] = self.counts.get(what, 0) + number

    def tell(self, rank: int, what: str, number: int) -> None:
        """Notes something that was found `number` times on a rank."""
        self.by_rank.setdefault(what, {})
        self.by_rank[what][rank] = self.by_rank[what].get(rank, 0) + number


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
                return source.is_dir() and any(re.search(r"\.json(\.gz)?$", item.name) for item in source.iterdir())
            except OSError:
                return False
        return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") and _HEAD.search(head) is not None

    def import_trace(
        self, sources: Sequence[Path], *, output: Path, options: Mapping[str, str], report: Callable[[str], None]
    ) -> ConversionReport:  # fmt: skip
        """See the base class."""
        return import_files(
            [Path(source) for source in sources], output=output, options=Options.of(options), report=report
        )


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
            job = _Job(writer, options, report)
            writer.update_metadata(metadata)
            _read_all(job, files)
            _finish(job)
        world_size = max(job.world_size, max(job.ranks) + 1, *(max(g.ranks) + 1 for g in job.groups.by_id.values()), 1)
        _with_world_size(first, temporary, world_size)
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


def _read_all(job: _Job, files: Sequence[Path]) -> None:
    builder, pending = ColumnBuilder(), list[_Document]()
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
        read = _understood(job, document, scanner)
        pending.append(read)
        if not job.options.lossless or builder.num_rows >= _ROWS_PER_BLOCK:
            _write(job, builder, pending)
            builder, pending = ColumnBuilder(), []
    if pending:
        _write(job, builder, pending)
    if not job.ranks:
        raise UnreadableError(str(files[0]), reason="the sources hold no trace", hint="name .json or .json.gz files")


def _understood(job: _Job, document: sources.Document, scanner: TraceScanner) -> _Document:
    found = scanner.report
    text = f"{scanner.prefix}{scanner.suffix}" if not found.truncated else f"{scanner.prefix}]}}"
    if scanner.prefix == "[":
        text = "{}"
    try:
        top = decode(text if found.has_events or not found.truncated else f"{scanner.prefix}}}")
    except ValueError:
        top = {}
        if not found.truncated:
            job.notes.append(f"{document.name}: what stands around the events is no JSON; it is kept as text only")
            try:
                top = decode(f"{scanner.prefix}]}}")
            except ValueError:
                top = {}
    top = top if isinstance(top, dict) else {}
    if not found.has_events and not top:
        raise TraceFormatError("no traceEvents and no other readable content", path=document.name, offset=0)
    if not found.has_events:
        job.notes.append(f"{document.name}: there are no traceEvents")
    damage = document.gzip.damage if document.gzip else found.read_error
    if found.truncated or damage:
        lost = (
            f"{found.num_lost_characters:,} characters of an unfinished event are lost"
            if found.num_lost_characters
            else "no event was cut"
        )
        reason = f" ({damage})" if damage else ""
        job.notes.append(
            f"{document.name}: the file is cut off{reason}; all {found.num_events:,} whole events before it are kept, {lost}, and what followed is unknown"
        )
    if found.num_damaged:
        job.notes.append(
            f"{document.name}: {found.num_damaged} stretches are no JSON and were left out, the first at character {found.first_damage:,}"
        )
    rank = _rank(job, document, top)
    if found.num_duplicate_keys:
        job.tell(rank, "keys come twice in one object: the last value is kept", found.num_duplicate_keys)
    base = top.get("baseTimeNanoseconds", 0)
    if type(base) is not int or abs(base) >= 1 << 61:
        job.tell(rank, "baseTimeNanoseconds is no usable number and counts as 0", 1)
        base = 0
    job.bases.add(base)
    job.count("events", found.num_events)
    return _Document(document.name, rank, scanner.prefix, scanner.suffix, top, base)


def _rank(job: _Job, document: sources.Document, top: Mapping[str, Any]) -> int:
    distributed = top.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    told = distributed.get("rank")
    if job.options.rank is not None:
        rank = job.options.rank
        if type(told) is int and told != rank:
            job.notes.append(f"{document.name}: -O rank={rank} counts; the trace itself says rank {told}")
    elif type(told) is int and 0 <= told < 1 << 31:
        rank = told
    else:
        hint = document.rank_hint()
        if hint is None:
            raise UsageError(
                f"{document.name}: the trace does not say its rank (no distributedInfo.rank), nor does its name",
                hint="import one file with -O rank=N, or rename the files to rank0.json, rank1.json, ...",
            )
        rank = hint
        job.notes.append(f"{document.name}: the trace does not say its rank; {rank} is taken from its name")
    if rank in job.ranks:
        raise UsageError(
            f"{document.name} and {job.ranks[rank]} are both of rank {rank}",
            hint="import traces of one run and one step range at a time, or name one file with -O rank=N",
        )
    job.ranks[rank] = document.name
    world_size = distributed.get("world_size")
    if type(world_size) is int and 0 < world_size < 1 << 31:
        if world_size <= rank:
            job.notes.append(f"{document.name}: rank {rank} lies outside its world_size {world_size}")
        job.world_size = max(job.world_size, world_size)
    return rank


def _write(job: _Job, builder: ColumnBuilder, documents: Sequence[_Document]) -> None:
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


def _finish(job: _Job) -> None:
    if len(job.bases) > 1:
        job.notes.append("ranks have different baseTimeNanoseconds; it was added to each rank's times")
    if len(job.ranks) > 1:
        job.notes.append(
            "clocks of different hosts are taken as they are; `prism merge --align` or the like may correct them"
        )
    missing = sorted(set(range(job.world_size)) - set(job.ranks))
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        job.notes.append(f"{len(missing)} of {job.world_size} ranks have no trace here ({shown})")
    if job.options.lossless and not job.options.events:
        job.notes.append(
            f"events are kept in the attachment {ATTACHMENT!r}, not as a table: `prism convert --to kineto` gives them back, -O events=true adds the table"
        )
