"""The exporter ``perfetto``. What a rank looks like is in ``ranks``, how packets are written in ``packets``."""

from __future__ import annotations

import datetime
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

import prismtrace
from prism_sdk.abc import ConversionReport, TraceExporter
from prism_sdk.errors import OutputError, UsageError
from prism_sdk.interop import options as reading
from prismtrace import ABSENT, ABSENT32
from prismtrace.tables import StepTable
from prismtrace_perfetto.events import add_events
from prismtrace_perfetto.packets import PacketWriter
from prismtrace_perfetto.ranks import RankTracks, Style, rows_of

_OPTIONS: Final = ("ranks", "steps", "flows", "annotations", "gzip")
_PROGRESS_S: Final = 2.0
Report = Callable[[str], None]


class PerfettoExporter(TraceExporter):
    """Writes a native Perfetto trace, rank by rank in bounded memory."""

    name = "perfetto"
    description = "a Perfetto trace for ui.perfetto.dev and its trace processor"
    suffixes = (".perfetto-trace.gz", ".perfetto-trace", ".pftrace.gz", ".pftrace")

    def export_trace(
        self, source: Path, *, output: Path, options: Mapping[str, str], report: Report
    ) -> ConversionReport:
        """Write units, steps, counters and flows of the chosen ranks and steps."""
        reading.check_known(options, _OPTIONS, of=f"the exporter {self.name}")
        flows = reading.choice(options, "flows", ("all", "messages", "none"), default="all")
        style = Style(flows != "none", flows == "all", reading.flag(options, "annotations", default=True))
        packed = reading.flag(options, "gzip", default=output.suffix == ".gz")
        steps = reading.steps_of(options)
        if output.is_dir():
            raise UsageError(f"{output} is a folder; a Perfetto trace is one file")
        with prismtrace.TraceReader(source) as reader:
            ranks = reading.ranks_of(options, reader.ranks)
            first_ns = _first_time(reader, ranks, steps)
            if first_ns is None:
                raise UsageError(f"{source}: no unit or step has a time; a graph without times cannot be drawn")
            shift_ns = max(0, -first_ns)
            counts: Counter[str] = Counter()
            with _whole_file(output) as file:
                target = _Packed(file) if packed else file
                writer = PacketWriter(target)
                writer.add_clock(first_ns + shift_ns, _realtime_ns(reader.metadata.get("created")))
                said = time.monotonic()
                for number, rank in enumerate(ranks):
                    tracks = RankTracks(
                        writer, rank, groups=reader.groups, shift_ns=shift_ns, style=style, counts=counts
                    )
                    tracks.add_steps(_chosen_steps(reader.steps(rank), steps))
                    for part in reader.iter_units(rank, steps=steps):
                        tracks.add_units(part)
                    if hasattr(reader, "events"):
                        _add_events(tracks, reader, rank, steps, counts)
                    if time.monotonic() - said > _PROGRESS_S:
                        said = time.monotonic()
                        report(f"{number + 1} of {len(ranks)} ranks, {counts['units']} units")
                if isinstance(target, _Packed):
                    target.finish()
        counts["ranks"] = len(ranks)
        return ConversionReport(output, _facts(counts), tuple(_notes(counts, shift_ns)))


def _add_events(tracks: RankTracks, reader: Any, rank: int, steps: range | None, counts: Counter[str]) -> None:
    """The events of a rank; of chosen steps those that belong to a unit of them, or lie in their time."""
    events = reader.events(rank)
    if not len(events):
        return
    if steps is not None:
        units = reader.units(rank, steps=steps, columns=["start_ns", "end_ns"])
        times = np.concatenate([units.start_ns, units.end_ns])
        times = times[times != ABSENT]
        inside = np.isin(events.unit, units.row_index)
        if len(times):
            inside |= (events.start_ns >= times.min()) & (events.start_ns <= times.max())
        counts["events of other steps (not shown)"] += int(np.count_nonzero(~inside))
        events = rows_of(events, np.flatnonzero(inside))
    add_events(tracks, events, reader.tracks(rank))


def _facts(counts: Counter[str]) -> dict[str, int]:
    moved = "overlapping slices moved to another lane"
    names = ("ranks", "tracks", "units", "events", "slices", "steps", "counter values", moved)
    return {name.replace(" ", "_"): counts[name] for name in names}


def _notes(counts: Counter[str], shift_ns: int) -> Iterator[str]:
    moved, lanes = counts["overlapping slices moved to another lane"], counts["lanes added for overlaps"]
    if moved:
        yield f"{moved} slices overlapped others of their track: {lanes} lanes were added, nothing was dropped"
    for name in counts:
        if name.startswith(("units ", "steps ", "events ", "metadata ")) and counts[name]:
            yield f"{counts[name]} {name}"
    if shift_ns:
        yield f"times began below zero: {shift_ns} ns were added to all of them"


def _first_time(reader: prismtrace.TraceReader, ranks: list[int], steps: range | None) -> int | None:
    """The earliest time that will be written."""
    first: int | None = None
    for rank in ranks:
        parts: list[Any] = [part.start_ns for part in reader.iter_units(rank, steps=steps, columns=["start_ns"])]
        table = _chosen_steps(reader.steps(rank), steps)
        if hasattr(reader, "events"):
            parts.append(reader.events(rank, columns=["start_ns"]).start_ns)
        for times in (*parts, table.start_ns, table.end_ns):
            present = times[times != ABSENT]
            if len(present):
                first = int(present.min()) if first is None else min(first, int(present.min()))
    return first


def _chosen_steps(table: StepTable, steps: range | None) -> StepTable:
    if steps is None:
        return table
    rows = np.flatnonzero((table.step >= steps.start) & (table.step < steps.stop) & (table.step != ABSENT32))
    return rows_of(table, rows)


def _realtime_ns(created: str | None) -> int | None:
    """The start of the job as time of day, where the trace knows it."""
    try:
        moment = datetime.datetime.fromisoformat(created or "")
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    nanoseconds = round(moment.timestamp() * 1e6) * 1000
    return nanoseconds if nanoseconds > 0 else None


class _Packed:
    """Compresses on the way to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._compressor = zlib.compressobj(1, zlib.DEFLATED, 31)

    def write(self, data: bytes) -> None:
        self._file.write(self._compressor.compress(data))

    def finish(self) -> None:
        """Write what is left."""
        self._file.write(self._compressor.flush())


@contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file under a temporary name, which takes the place of ``path`` when the block ends well, else vanishes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("wb", buffering=1 << 20) as file:
                yield file
            os.replace(temporary, path)
        except OSError as error:
            hint = "create the folder first" if isinstance(error, FileNotFoundError) else None
            raise OutputError(str(path), reason=error.strerror or str(error), hint=hint) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
