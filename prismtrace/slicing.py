"""Cuts a smaller trace out of a trace: some ranks, some steps, some time.

Does not copy chunks as they are: rows are numbered from 0 again, and columns that refer to rows follow.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from prismtrace.alike import Alike, alike_ranks
from prismtrace.columns import normalise
from prismtrace.errors import TraceFormatError, TraceUsageError
from prismtrace.model import ABSENT, ABSENT32, BEGINS_KEY, TableKind
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
    still_promised,
    take,
    used_values,
)
from prismtrace.sharing import add_alike, role_id_of
from prismtrace.source import TraceInput
from prismtrace.tables import Column, Table, UnitTable
from prismtrace.wording import ranks_text
from prismtrace.writer import TraceWriter

Mask = NDArray[np.bool_]
_NO_STEP: Final = 2**31
_FIXED: Final = frozenset({"step", "start_ns", "end_ns", "awaits", "unit"})
"""Columns by which rows are selected, or which name rows."""


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
    storing: Callable[[int, int], None] | None = None,
) -> SliceReport:
    """Writes the part of `source` that all conditions select; `output` appears only when it is complete.

    A unit belongs to a time window when it overlaps it; a unit without times does not. Events follow the unit that they
    name, else their own times. Groups, tracks, metadata and attachments are kept whole, but for metadata that the cut
    makes untrue: `rank.N.begins_ns` without the rank's first unit, and what `profile` promised of what is gone. Rows
    are numbered from 0 again: `awaits`, and the units and tracks that events name, are changed to match; `seq` stays,
    so that ranks still match. A WAIT whose communication is outside loses its `awaits` (a validator warns, PT024), and
    a collective that only some members kept is incomplete (PT032).

    Args:
        source: a finished trace.
        output: the file to create.
        ranks: global ranks; all with data by default.
        steps: optimizer steps, as a range.
        time_ns: first and last nanosecond (exclusive) on the clock of the trace; None leaves an end open.
        keep_payloads: also copies the payloads that the kept units name.
        allow_empty: also writes a trace into which no row was selected (tracks, which are kept whole, do not count).
        overwrite: replaces a file that exists.
        progress: is told how many ranks of how many are cut.
        storing: is told of how many ranks of how many what they share is found and stored again, where that has to be:
            ranks that differ from their role in times or in many values are cut one by one.

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
        begins = {BEGINS_KEY.format(rank): rank for rank in reader.ranks}
        pairs = {key: value for key, value in reader.metadata.items() if not key.startswith("slice.")}
        pairs = {key: value for key, value in pairs.items() if key not in begins}
        if ranks is not None:
            pairs["slice.ranks"] = ranks_text(chosen)
        if steps is not None:
            pairs["slice.steps"] = f"{steps.start}:{steps.stop if steps.stop < _NO_STEP else ''}"
        if time_ns is not None:
            pairs["slice.time_ns"] = f"{'' if low is None else low}:{'' if high is None else high}"
        window = None if time_ns is None else (ABSENT + 1 if low is None else low, 2**63 - 1 if high is None else high)
        cut = _Cut(reader, steps=steps, window=window)
        with new_trace(
            output, like=reader, metadata=pairs, overwrite=overwrite, find_roles=cut.undid_roles, progress=storing
        ) as writer:
            writer.add_groups(group for _, group in sorted(reader.groups.items()))
            for num_done in cut.ranks(writer, chosen):
                if progress is not None:
                    progress(num_done, len(chosen))
            if not cut.num_rows and not allow_empty:
                selection = [f"steps {pairs['slice.steps']}"] if steps is not None else []
                selection += [f"the time {pairs['slice.time_ns']} ns"] if time_ns is not None else []
                selection += [f"ranks {pairs['slice.ranks']}"] if ranks is not None else []
                raise TraceUsageError(f"{reader.path} has nothing in {' and '.join(selection) or 'it'}")
            num_payloads = _copy_payloads(reader, writer, cut.digests if keep_payloads else set())
            still = {key: value for key, value in reader.metadata.items() if begins.get(key) in cut.begun}
            lost = {"replay"} if cut.num_cut_waits else set()
            still |= still_promised(reader.metadata, lost=lost if keep_payloads else lost | {"payload"})
            if still:
                writer.update_metadata(still)
        before = sum(reader.num_units(rank) for rank in chosen)
    first, last = (cut.first_ns, cut.last_ns) if cut.first_ns <= cut.last_ns else (None, None)
    return SliceReport(chosen, cut.num_units, before, cut.num_cut_waits, num_payloads, first, last)


@dataclass(frozen=True)
class _Part:
    """What was selected of a rank: of each table with rows their columns, and their numbers before the cut."""

    tables: dict[TableKind, tuple[dict[str, Column], NDArray[np.int64]]]
    num_cut_waits: int
    span: tuple[int, int] | None


class _Cut:
    """Copies what was selected of ranks, and counts."""

    def __init__(self, reader: TraceReader, *, steps: range | None, window: tuple[int, int] | None) -> None:
        self._reader, self._steps, self._window = reader, steps, window
        self._alone: list[int] = []
        self._roles: set[int] = set()
        self.num_rows = self.num_units = self.num_cut_waits = 0
        self.digests: set[bytes] = set()
        self.first_ns, self.last_ns = 2**63 - 1, ABSENT
        #: The ranks that kept their first unit.
        self.begun: set[int] = set()

    def ranks(self, writer: TraceWriter, ranks: Collection[int]) -> Iterator[int]:
        """Copies ranks, those that share their rows together, and yields how many are done."""
        together, self._alone = alike_ranks(self._reader, ranks)
        num_done = 0
        for alike in together:
            if self._role(writer, alike):
                num_done += len(alike.ranks)
                yield num_done
            else:
                self._alone += alike.ranks
        for rank in sorted(self._alone):
            part = self._part(rank)
            self._count(part, (rank,))
            for kind, (columns, _) in part.tables.items():
                add_rows(writer, kind, rank, columns)
            num_done += 1
            yield num_done

    def undid_roles(self) -> bool:
        """Whether several ranks were copied one by one that have a role."""
        return sum(self._reader.role_of(rank) is not None for rank in self._alone) > 1

    def _role(self, writer: TraceWriter, alike: Alike) -> bool:
        """Copies ranks that share their rows; False, and nothing is copied, where that cannot be done together."""
        found = []
        try:
            if not alike.have(_FIXED):
                return False
            part = self._part(alike.ranks[0])
            for kind, (columns, row_index) in part.tables.items():
                replaced = alike.replaced(kind, row_index, columns)
                if replaced is None:
                    return False
                found.append((kind, *replaced))
        except TraceFormatError:
            return False  # one by one it is said of which rank
        role = self._role_id(found)
        self._count(part, alike.ranks)
        for kind, columns, changes in found:
            add_alike(writer, alike.ranks, columns, role=role, table=kind, replaced=changes)
        return True

    def _role_id(self, tables: Sequence[tuple[TableKind, dict[str, Column], object]]) -> int:
        """An id that follows from the rows; another one where ranks that share them were copied before."""
        role = role_id_of((kind, 0, normalise(kind, columns)) for kind, columns, _ in tables)
        while role in self._roles:
            role = role % (2**64 - 1) + 1
        self._roles.add(role)
        return role

    def _count(self, part: _Part, ranks: Collection[int]) -> None:
        num_ranks = len(ranks)
        for kind, (columns, rows) in part.tables.items():
            self.num_rows += len(rows) * num_ranks if kind is not TableKind.TRACKS else 0
            if kind is TableKind.UNITS:
                self.num_units += len(rows) * num_ranks
                self.begun.update(ranks if rows[0] == 0 else ())
                for column in columns.values():
                    if is_digest_column(column):
                        self.digests.update(used_values(column))
        self.num_cut_waits += part.num_cut_waits * num_ranks
        if part.span is not None:
            self.first_ns, self.last_ns = min(self.first_ns, part.span[0]), max(self.last_ns, part.span[1])

    def _part(self, rank: int) -> _Part:
        """What was selected of a rank; rows that name rows name them by their new numbers."""
        units = self._reader.units(rank, steps=self._steps)
        kept = self._in_window(units.start_ns, units.end_ns)
        rows = units.row_index[kept]
        columns = {name: take(column, kept) for name, column in units.columns().items()}
        num_cut_waits = 0
        awaits = columns.get("awaits")
        if isinstance(awaits, np.ndarray):
            columns["awaits"] = renumbered = _renumbered(awaits, rows)
            num_cut_waits = int(np.count_nonzero(present(awaits) & ~present(renumbered)))
        found = {TableKind.UNITS: (columns, rows)} if len(rows) else {}
        span = _span(units, kept)
        steps = set(np.unique(units.step[kept]).tolist())
        for kind in TABLES:
            if kind is not TableKind.UNITS and (other := self._other(kind, rank, rows, steps, span)) is not None:
                found[kind] = other
        return _Part(found, num_cut_waits, span)

    def _in_window(self, start: NDArray[np.int64], end: NDArray[np.int64]) -> Mask:
        """Rows that overlap the window; a row with one time counts as a point."""
        if self._window is None:
            return np.ones(len(start), np.bool_)
        low, high = self._window
        first = np.where(present(start), start, end)
        last = np.where(present(end), end, start)
        return np.asarray(present(first) & (first < high) & ((last > low) | ((first >= low) & (last >= low))))

    def _other(
        self, kind: TableKind, rank: int, rows: NDArray[np.int64], steps: set[int], span: tuple[int, int] | None
    ) -> tuple[dict[str, Column], NDArray[np.int64]] | None:
        table = read_table(self._reader, kind, rank)
        if not len(table):
            return None
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
        if not mask.any():
            return None
        return {name: take(column, mask) for name, column in columns.items()}, table.row_index[mask]

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


def _span(units: UnitTable, kept: Mask) -> tuple[int, int] | None:
    """The time that the kept units cover."""
    times = np.concatenate([units.start_ns[kept], units.end_ns[kept]])
    times = times[times != ABSENT]
    return (int(times.min()), int(times.max())) if len(times) else None


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
