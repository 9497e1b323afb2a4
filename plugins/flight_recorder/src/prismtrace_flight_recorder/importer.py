"""The importer `flight_recorder`: options, files, and what becomes of them in a trace. It reads no format itself."""

from __future__ import annotations

import gzip
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from prism_sdk.abc import ConversionReport, TraceImporter
from prism_sdk.errors import UsageError
from prism_sdk.interop.sources import ForeignFileError, Part, flag, number, parts, rank_of_name
from prismtrace import (
    GraphKind,
    Op,
    TraceDataError,
    TraceReadError,
    TraceUsageError,
    TraceWriter,
    UnitKind,
)
from prismtrace_flight_recorder import dumps, hang, matching
from prismtrace_flight_recorder.matching import Matched, Placed

MAX_NOTES: Final = 200
_KINDS: Final = {Op.SEND: UnitKind.SEND, Op.RECV: UnitKind.RECV}
_ENDINGS: Final = (".json", ".json.gz", ".pkl", ".pickle")


def _wanted(name: str) -> bool:
    plain = name.lower().removesuffix(".gz")
    return not name.startswith(".") and (plain.endswith(_ENDINGS) or plain[-1:].isdigit())


class FlightRecorderImporter(TraceImporter):
    """Dumps of PyTorch's flight recorder (NCCL and others), one file a rank, as pickle or JSON."""

    name = "flight_recorder"
    description = "dumps of PyTorch's flight recorder (NCCL), pickle or JSON; says who has not joined what"

    def recognises(self, source: Path, head: bytes) -> bool:
        """By the fields that a dump has in its first bytes; pickles are never loaded here."""
        if head:
            return _looks_right(head)
        try:
            for path in sorted(source.iterdir())[:64]:
                if _wanted(path.name) and path.is_file():
                    with open(path, "rb") as file:
                        head = file.read(1 << 16)
                    if head[:2] == b"\x1f\x8b":
                        with gzip.open(path) as inner:
                            head = inner.read(1 << 16)
                    if _looks_right(head):
                        return True
        except (OSError, EOFError):
            return False
        return False

    def import_trace(
        self,
        sources: Sequence[Path],
        *,
        output: Path,
        options: Mapping[str, str],
        report: Callable[[str], None],
    ) -> ConversionReport:
        """See the base class. Options: lossless (the dumps as attachments), rank (of the only file), world_size."""
        if unknown := sorted(set(options) - {"lossless", "rank", "world_size"}):
            raise UsageError(f"-O {unknown[0]} is not an option here; there are lossless, rank, world_size")
        only, world_size = number(options, "rank"), number(options, "world_size")
        lossless = flag(options, "lossless")
        notes: list[str] = []
        found: dict[int, dumps.Dump] = {}
        kept: dict[int, bytes] = {}
        for part in parts(sources, _wanted):
            try:
                dump = dumps.read(part.data, path=part.name)
            except ForeignFileError as error:
                if part.chosen:
                    raise
                notes.append(f"{part.name}: {error.message}; left out")
                continue
            rank = _rank(part, dump, only, found, notes)
            if world_size is not None and rank >= world_size:
                raise UsageError(f"{part.name} is of rank {rank}, in a world of {world_size}")
            found[rank] = dump
            if lossless:
                kept[rank] = part.data
            if len(found) % 64 == 0:
                report(f"{len(found)} dumps read")
        if not found:
            raise TraceReadError("no flight-recorder dump in it", path=", ".join(map(str, sources)))
        job = matching.match(found, world_size=world_size)
        notes = [*hang.explain(job), *job.notes, *(note for dump in found.values() for note in dump.notes), *notes]
        notes.append("times are those of each host's own clock, as its watchdog saw them: late, and not aligned")
        part_path = output.with_name(f".{output.name}.part")
        try:
            counts = _write(job, part_path, kept)
            os.replace(part_path, output)
        except (TraceUsageError, OverflowError) as error:
            raise TraceDataError(f"holds what a trace cannot: {error}", path=str(sources[0])) from error
        finally:
            part_path.unlink(missing_ok=True)
        if len(notes) > MAX_NOTES:
            notes = [*notes[:MAX_NOTES], f"{len(notes) - MAX_NOTES} more notes"]
        return ConversionReport(output, counts, tuple(notes))


def _looks_right(head: bytes) -> bool:
    start = head.lstrip()[:1]
    if start == b"{":
        if b'"traceEvents"' in head or b'"distributedInfo"' in head:
            return False  # a profile, whose process groups are called alike
        return b'"pg_config"' in head or (b'"entries"' in head and b'"profiling_name"' in head)
    return start in (b"\x80", b"}", b"(") and (b"profiling_name" in head or b"pg_config" in head)


def _rank(part: Part, dump: dumps.Dump, only: int | None, found: Mapping[int, Any], notes: list[str]) -> int:
    named = rank_of_name(part.base)
    rank = next((each for each in (only, dump.stated_rank, named) if each is not None), None)
    if rank is None:
        raise UsageError(f"{part.name} does not say of which rank it is", hint="say it with -O rank=N")
    if only is not None and found:
        raise UsageError(f"-O rank={only} says the rank of one file, there are several")
    if rank in found:
        message = f"{found[rank].path} and {part.name} are both of rank {rank}"
        raise UsageError(message, hint="a pickle and a JSON dump of one rank say the same: name one of them")
    if only is None and named is not None and named != rank:
        notes.append(f"{part.name} is of rank {rank}, its name says {named}")
    return rank


def _write(job: Matched, path: Path, kept: Mapping[int, bytes]) -> dict[str, int]:
    counts: Counter[str] = Counter(job.counts)
    metadata = {"import.format": "flight_recorder"}
    for key, values in (
        ("flight_recorder.version", {dump.version for dump in job.dumps.values()}),
        ("flight_recorder.library", {dump.library for dump in job.dumps.values() if dump.library}),
    ):
        if values:
            metadata[key] = ", ".join(sorted(values))
    with TraceWriter(
        path,
        graph_kind=GraphKind.OBSERVED,
        world_size=job.world_size if job.world_size < 1 << 31 else 0,  # too large to be stated
        metadata=metadata,
        overwrite=True,
    ) as writer:
        for group in job.groups.values():
            writer.add_group(group)
        for rank, operations in sorted(job.operations.items()):
            columns = _columns(operations)
            if operations:
                writer.add_units(rank, columns)
            writer.add_scalars(rank, _scalars(job, rank))
            counts["units"] += len(operations)
            for each in operations:
                counts[_KINDS.get(each.entry.op, UnitKind.COLLECTIVE).name.lower()] += 1
                counts["not_complete"] += not each.is_done
            if rank in kept:
                attaching: Any = writer
                attaching.add_attachment(f"flight_recorder.{rank}", kept[rank])
    counts["ranks"], counts["groups"] = len(job.dumps), len(job.groups)
    counts["missing_ranks"] = job.world_size - len(job.dumps)
    return dict(counts)


def _columns(operations: Sequence[Placed]) -> dict[str, Any]:
    entries = [each.entry for each in operations]
    starts = [entry.created_ns for entry in entries]
    ends = [
        done if (done := each.completed_ns) is not None and start is not None and done >= start else None
        for each, start in zip(operations, starts, strict=True)
    ]
    columns: dict[str, Any] = {
        "kind": [_KINDS.get(entry.op, UnitKind.COLLECTIVE) for entry in entries],
        "op": [entry.op for entry in entries],
        "dtype": [entry.dtype for entry in entries],
        "start_ns": starts,
        "end_ns": ends,
        "group_id": np.array([0 if each.group is None else each.group.group_id for each in operations], np.uint64),
        "seq": [each.seq for each in operations],
        "num_elements_in": [None if entry.op is Op.RECV else entry.num_in for entry in entries],
        "num_elements_out": [None if entry.op is Op.SEND else entry.num_out for entry in entries],
        "peer": [each.peer for each in operations],
        "is_async": [True] * len(entries),
        "label": [entry.name for entry in entries],
    }
    columns |= {
        "flight_recorder.record_id": [entry.record_id for entry in entries],
        "flight_recorder.collective_seq_id": [entry.seq for entry in entries],
        "flight_recorder.p2p_seq_id": [entry.p2p_seq for entry in entries],
        "flight_recorder.op_id": [entry.op_id for entry in entries],
        "flight_recorder.state": [entry.state or None for entry in entries],
        "flight_recorder.retired": [entry.retired for entry in entries],
        "flight_recorder.started_ns": [each.started_ns for each in operations],
        "flight_recorder.duration_ms": [_nan(entry.duration_ms) for entry in entries],
        "flight_recorder.timeout_ms": [entry.timeout_ms for entry in entries],
        "flight_recorder.frame": [entry.frame for entry in entries],
    }
    return columns


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _scalars(job: Matched, rank: int) -> dict[str, Any]:
    """Per rank and group the first and last collective that is left, and the first record: what was lost before."""
    names, values = ["flight_recorder.first_record_id"], [float(job.dumps[rank].lost_entries)]
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for each in job.operations[rank]:
        if each.group is not None and not each.is_p2p and each.entry.seq is not None:
            first.setdefault(each.group.name, each.entry.seq)
            last[each.group.name] = max(last.get(each.group.name, 0), each.entry.seq)
    for what, numbers in (("first", first), ("last", last)):
        for name, value in numbers.items():
            names.append(f"flight_recorder.{what}_collective_seq_id.{name}")
            values.append(float(value))
    return {"step": np.zeros(len(names), np.int32), "name": names, "value": np.array(values)}
