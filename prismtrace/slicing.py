"""Cuts a smaller trace out of a trace: some ranks, some steps, some time.

Does not copy chunks as they are: rows are numbered from 0 again, and columns that refer to rows follow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.errors import TraceUsageError
from prismtrace.model import ABSENT, ABSENT32, TableKind
from prismtrace.reader import TraceReader
from prismtrace.rewriting import (
    TABLES,
    add_rows,
    check_ranks,
    copy_payload,
    is_digest_column,
    new_trace,
    present,
    read_table,
    take,
    used_values,
)
from prismtrace.source import TraceInput
from prismtrace.tables import Table, UnitTable
from prismtrace.wording import ranks_text
from prismtrace.writer import TraceWriter

Mask = NDArray[np.bool_]
_NO_STEP: Final = 2**31


@dataclass(frozen=True)
class SliceReport:
    """What went into a slice. `num_cut_waits`: WAIT units whose communication lies outside and that lost `awaits`."""

    ranks: tuple[int, ...]
    num_units: int
    num_units_before: int
    num_cut_waits: int
    num_payloads: int
    first_ns: int | None
    last_ns: int | None


def slice_trace(
    source: TraceInput,
    output: str | os.PathLike[str],
    *,
    ranks: Collection[int] | None = None,
    steps: range | None = None,
    time_ns: tuple[int | None, int | None] | None = None,
    keep_payloads: bool = True,
    allow_empty: bool = True,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SliceReport:
    """Writes the part of `source` that all conditions select; `output` appears only when it is complete.

    A unit belongs to a time window when it overlaps it; a unit without times does not. Events follow the unit that
    they name, else their own times. Groups, tracks, metadata and attachments are kept whole. Rows are numbered from 0
    again: `awaits`, and the units and tracks that events name, are changed to match; `seq` stays, so that ranks still
    match. A WAIT whose communication is outside loses its `awaits` (a validator warns, PT024), and a collective that
    only some members kept is incomplete (PT032).

    Args:
        source: a finished trace.
        output: the file to create.
        ranks: global ranks; all with data by default.
        steps: optimizer steps, as a range.
        time_ns: first and last nanosecond (exclusive) on the clock of the trace; None leaves an end open.
        keep_payloads: also copies the payloads that the kept units name.
        allow_empty: also writes a trace into which no row was selected (tracks, which are kept whole, do not count).
        overwrite: replaces a file that exists.
        progress: is told how many ranks of how many are cut; what ranks share is found and stored after that.

    Raises:
        TraceUsageError: a rank has no data, the selection is malformed, or selects nothing without `allow_empty`.
        TraceFormatError: the source is broken.
        TraceWriteError: the result cannot be written, or exists.
    """
    if steps is not None and steps.step != 1:
        raise TraceUsageError(f"steps must be a range with step 1, not {steps!r}")
    low, high = time_ns or (None, None)
    if low is not None and high is not None and high <= low:
        raise TraceUsageError(f"the time window {low}:{high} holds no time: its end is not above its start")
    with TraceReader(source) as reader:
        chosen = check_ranks(reader, ranks)
        pairs = {key: value for key, value in reader.metadata.items() if not key.startswith("slice.")}
        if ranks is not None:
            pairs["slice.ranks"] = ranks_text(chosen)
        if steps is not None:
            pairs["slice.steps"] = f"{steps.start}:{steps.stop if steps.stop < _NO_STEP else ''}"
        if time_ns is not None:
            pairs["slice.time_ns"] = f"{'' if low is None else low}:{'' if high is None else high}"
        window = None if time_ns is None else (ABSENT + 1 if low is None else low, 2**63 - 1 if high is None else high)
        with new_trace(output, like=reader, metadata=pairs, overwrite=overwrite) as writer:
            for _, group in sorted(reader.groups.items()):
                writer.add_group(group)
            cut = _Cut(reader, writer, steps=steps, window=window)
            for number, rank in enumerate(chosen):
                cut.rank(rank)
                if progress is not None:
                    progress(number + 1, len(chosen))
            if not cut.num_rows and not allow_empty:
                selection = [f"steps {pairs['slice.steps']}"] if steps is not None else []
                selection += [f"the time {pairs['slice.time_ns']} ns"] if time_ns is not None else []
                selection += [f"ranks {pairs['slice.ranks']}"] if ranks is not None else []
                raise TraceUsageError(f"{reader.path} has nothing in {' and '.join(selection) or 'it'}")
            num_payloads = _copy_payloads(reader, writer, cut.digests if keep_payloads else set())
        before = sum(reader.num_units(rank) for rank in chosen)
    first, last = (cut.first_ns, cut.last_ns) if cut.first_ns <= cut.last_ns else (None, None)
    return SliceReport(chosen, cut.num_units, before, cut.num_cut_waits, num_payloads, first, last)


class _Cut:
    """Copies rank after rank and counts."""

    def __init__(
        self, reader: TraceReader, writer: TraceWriter, *, steps: range | None, window: tuple[int, int] | None
    ) -> None:
        self._reader, self._writer, self._steps, self._window = reader, writer, steps, window
        self.num_rows = self.num_units = self.num_cut_waits = 0
        self.digests: set[bytes] = set()
        self.first_ns, self.last_ns = 2**63 - 1, ABSENT

    def rank(self, rank: int) -> None:
        """Copies the selected rows of all tables of a rank."""
        units = self._reader.units(rank, steps=self._steps)
        kept = self._in_window(units.start_ns, units.end_ns)
        rows = units.row_index[kept]
        columns = {name: take(column, kept) for name, column in units.columns().items()}
        self._follow_waits(columns, rows)
        self.num_units += len(rows)
        self.num_rows += len(rows)
        for column in columns.values():
            if is_digest_column(column):
                self.digests.update(used_values(column))
        if len(rows):
            add_rows(self._writer, TableKind.UNITS, rank, columns)
        span = self._span(units, kept)
        steps = set(np.unique(units.step[kept]).tolist())
        for kind in TABLES:
            if kind is not TableKind.UNITS:
                self._other(kind, rank, rows, steps, span)

    def _in_window(self, start: NDArray[np.int64], end: NDArray[np.int64]) -> Mask:
        """Rows that overlap the window; a row with one time counts as a point."""
        if self._window is None:
            return np.ones(len(start), np.bool_)
        low, high = self._window
        first = np.where(present(start), start, end)
        last = np.where(present(end), end, start)
        return np.asarray(present(first) & (first < high) & ((last > low) | ((first >= low) & (last >= low))))

    def _follow_waits(self, columns: dict[str, Any], rows: NDArray[np.int64]) -> None:
        """Gives `awaits` the new row numbers."""
        awaits = columns.get("awaits")
        if awaits is None:
            return
        columns["awaits"] = _renumbered(awaits, rows)
        self.num_cut_waits += int(np.count_nonzero(present(awaits) & ~present(columns["awaits"])))

    def _span(self, units: UnitTable, kept: Mask) -> tuple[int, int] | None:
        """The time that the kept units cover."""
        times = np.concatenate([units.start_ns[kept], units.end_ns[kept]])
        times = times[times != ABSENT]
        if not len(times):
            return None
        span = int(times.min()), int(times.max())
        self.first_ns, self.last_ns = min(self.first_ns, span[0]), max(self.last_ns, span[1])
        return span

    def _other(
        self, kind: TableKind, rank: int, rows: NDArray[np.int64], steps: set[int], span: tuple[int, int] | None
    ) -> None:
        table = read_table(self._reader, kind, rank)
        if not len(table):
            return
        columns = table.columns()
        mask = np.ones(len(table), np.bool_)
        if kind.name == "EVENTS":
            mask = self._events(table, rows, span)
            columns["unit"] = _renumbered(np.asarray(table.unit), rows)
        elif kind in (TableKind.STEPS, TableKind.SCALARS):
            step = np.asarray(table.step)
            if self._steps is not None:
                mask &= (step >= self._steps.start) & (step < self._steps.stop)
            if self._window is not None and kind is TableKind.STEPS:
                # a step without a start began where the one before it ended, the first with the job
                first = self._reader.first_ns
                before = np.concatenate([[ABSENT + 1 if first is None else first], np.asarray(table.end_ns)[:-1]])
                mask &= self._in_window(np.where(present(table.start_ns), table.start_ns, before), table.end_ns)
            elif self._window is not None:
                mask &= np.isin(step, list(steps - {ABSENT32}))
        self.num_rows += int(mask.sum()) if kind is not TableKind.TRACKS else 0
        if mask.any():
            add_rows(self._writer, kind, rank, {name: take(column, mask) for name, column in columns.items()})

    def _events(self, table: Table, rows: NDArray[np.int64], span: tuple[int, int] | None) -> Mask:
        """Events of kept units, and events of no unit that lie in the window (of the units, for a slice by steps)."""
        unit = np.asarray(table.unit)
        mask = self._in_window(table.start_ns, table.end_ns)
        if self._steps is None:
            return mask
        follows = present(unit)
        inside = np.zeros(len(unit), np.bool_)
        if span is not None:
            first = np.where(present(table.start_ns), table.start_ns, table.end_ns)
            inside = present(first) & (first >= span[0]) & (first <= span[1])
        return np.asarray(mask & np.where(follows, np.isin(unit, rows), inside))


def _renumbered(column: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row numbers before the cut -> after it; absent where the row is gone."""
    result = np.full(len(column), ABSENT, np.int64)
    if len(rows):
        place = np.searchsorted(rows, column).clip(0, len(rows) - 1)
        found = rows[place] == column
        result[found] = place[found]
    return result


def _copy_payloads(reader: TraceReader, writer: TraceWriter, digests: set[bytes]) -> int:
    wanted = {digest for digest in digests if reader.has_payload(digest)}
    wanted |= {digest for digest in reader.attachments.values() if reader.has_payload(digest)}
    for digest in reader.payload_digests:
        if digest in wanted:
            copy_payload(reader, writer, digest)
    return len(wanted)
