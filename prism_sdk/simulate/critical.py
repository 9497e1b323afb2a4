"""Follows the longest path of a timeline back: which units, on which ranks, the step time consists of.

It changes no times and judges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prism_sdk.simulate.job import SimJob
from prism_sdk.simulate.simulation import Timeline
from prismtrace import Op, Phase, UnitKind

__all__ = ["PathPart", "critical_path"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PathPart:
    """A stretch of the critical path on one rank: what the job waited for from ``start_ns`` to ``end_ns``."""

    rank: int
    #: ``forward``, ``backward``, ``optimizer``, ``other``: computing; a communication operation; or ``host``.
    what: str
    start_ns: int
    end_ns: int
    #: The unit's row in its rank, and the Provenance number of its time.
    row: int
    provenance: int

    @property
    def duration_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns


@dataclass
class _Finder:
    """Finds the row of an event in a rank; an index for each program that was asked about."""

    job: SimJob
    orders: dict[int, tuple[Int64Array, Int64Array]] = field(default_factory=dict)

    def row(self, position: int, event: int) -> int:
        job = self.job
        lanes = slice(int(job.lanes.offsets[position]), int(job.lanes.offsets[position + 1]))
        base = job.lanes.event[lanes]
        lane = int(job.lanes.lane[lanes][base <= event][np.argmax(base[base <= event])])
        program = int(job.program[position])
        if program not in self.orders:
            rows = job.programs.rows(program)
            lane_of = job.programs.lane_of[rows]
            order = np.lexsort((job.programs.ordinal[rows], lane_of))
            self.orders[program] = order, np.searchsorted(lane_of[order], np.arange(int(lane_of.max()) + 2))
        order, begins = self.orders[program]
        # a message to the own rank has two local lanes; the one that arrived last is found by either
        local = int(np.flatnonzero(job.lanes.lane[lanes] == lane)[0])
        return int(order[begins[local] + event - job.lanes.first_event[lane]])


def critical_path(timeline: Timeline) -> list[PathPart]:
    """The longest path through the counted steps, in order of time; its parts follow each other without holes."""
    job = timeline.job
    ends, begins = [], []
    for position in range(job.num_ranks):
        first, last, _ = timeline.window(position)
        ends.append(_host_clock(timeline, position, last))
        begins.append(_host_clock(timeline, position, first))
    position = int(np.argmax(ends))
    horizon = min(begins)
    walker = _Walker(timeline, _Finder(job))
    parts = walker.back(position, timeline.window(position)[1] - 1, ends[position], horizon)
    parts.reverse()
    return parts


def _host_clock(timeline: Timeline, position: int, row: int) -> int:
    """The host clock of a rank before a row that begins a step, or behind its last row."""
    job = timeline.job
    bounds = job.programs.bounds[job.programs.bounds_of(int(job.program[position]))]
    at = int(np.searchsorted(bounds, row))
    if row == 0:
        return int(job.origin_ns[position])
    return int(timeline.step_end_ns[timeline.step_offsets[position] + at])


class _Walker:
    def __init__(self, timeline: Timeline, finder: _Finder) -> None:
        self.timeline, self.job, self.finder = timeline, timeline.job, finder
        self.parts: list[PathPart] = []
        self.names: dict[tuple[int, int, int], str] = {}

    def back(self, position: int, row: int, now: int, horizon: int) -> list[PathPart]:
        job, p = self.job, self.job.programs
        while row >= 0 and now > horizon:
            base = int(p.offsets[job.program[position]])
            shift = int(job.weight_base[position]) - base
            kind = int(p.kind[base + row])
            times = self.timeline.times(position)
            if kind == UnitKind.COMPUTE:
                start, end = int(times.start_ns[row]), int(times.end_ns[row])
                self._add(position, "host", end, now, row)
                self._add(position, self._name(base + row), start, min(end, now), row)
                now = min(start, now)
                gap = int(job.side[base + row + shift])
                self._add(position, "host", now - gap, now, row)
                now -= gap
                row -= 1
                continue
            if kind != UnitKind.WAIT:
                row -= 1
                continue
            start, end = min(int(times.start_ns[row]), now), min(int(times.end_ns[row]), now)
            awaited = int(p.awaited[base + row])
            complete = int(times.end_ns[awaited]) if awaited >= 0 else start
            if awaited < 0 or complete + int(job.side[base + row + shift]) < end or end <= start:
                self._add(position, "host", start, end, row)
                now, row = start, row - 1
                continue
            self._add(position, "host", complete, end, row)
            position, row, now = self._through(position, awaited, complete)
        if self.parts and self.parts[-1].start_ns < horizon:
            cut = self.parts.pop()
            self._add(job.position(cut.rank), cut.what, horizon, cut.end_ns, cut.row, cut.provenance)
        return self.parts

    def _through(self, position: int, row: int, complete: int) -> tuple[int, int, int]:
        """From the completion of a communication row to the post that it waited for: position, row before it, clock."""
        job, p = self.job, self.job.programs
        base = int(p.offsets[job.program[position]])
        weight = base + row + int(job.weight_base[position]) - base
        name = self._name(base + row)
        if p.kind[base + row] == UnitKind.SEND or job.main[weight] < 0:
            posted = int(self.timeline.times(position).start_ns[row])
            self._add(position, name, posted, complete, row)
        else:
            lane = int(job.lanes.offsets[position]) + int(p.lane_of[base + row])
            event = int(job.lanes.event[lane]) + int(p.ordinal[base + row])
            ready = int(self.timeline.arrival_ns[event])
            self._add(position, name, ready, complete, row)
            while self.timeline.last[event] == -2:  # the operation before it in the group was not complete
                event -= 1
                self._add(position, name, int(self.timeline.arrival_ns[event]), ready, row)
                ready = int(self.timeline.arrival_ns[event])
            position = int(self.timeline.last[event])
            row = self.finder.row(position, event)
            posted = ready
        weight = row + int(job.weight_base[position])
        gap = max(int(job.side[weight]), 0)  # below 0 its stream was ahead: the rows before say what it did until then
        self._add(position, "host", posted - gap, posted, row)
        return position, row - 1, posted - gap

    def _name(self, row: int) -> str:
        p = self.job.programs
        key = int(p.kind[row]), int(p.op[row]), int(p.phase[row])
        if key not in self.names:
            if key[0] == UnitKind.COMPUTE:
                name = Phase(key[2]).name if key[2] in Phase._value2member_map_ else "OTHER"
                self.names[key] = "other" if name == "UNSPECIFIED" else name.lower()
            elif key[0] == UnitKind.COLLECTIVE:
                self.names[key] = Op(key[1]).name.lower() if key[1] in Op._value2member_map_ else "collective"
            else:
                self.names[key] = "message"
        return self.names[key]

    def _add(self, position: int, what: str, start: int, end: int, row: int, provenance: int | None = None) -> None:
        if end <= start:
            return
        if provenance is None:
            weight = row + int(self.job.weight_base[position])
            provenance = int(self.job.provenance[weight]) if weight < len(self.job.provenance) else 0
        self.parts.append(PathPart(rank=int(self.job.ranks[position]), what=what, start_ns=start, end_ns=end, row=row,
                                   provenance=provenance))  # fmt: skip
